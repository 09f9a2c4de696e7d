"""What a config must fulfil to train on packed documents, before anything is built."""

import argparse
import inspect
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, LOOPS, OPTIM_WRAPPERS
from mmengine.runner import EpochBasedTrainLoop
from mmengine.utils import get_object_from_string
from torch import nn
from xtuner.registry import BUILDER

from xtuner_mamba.dataset.arguments import check_names
from xtuner_mamba.dataset.buckets import check_bucket_arguments
from xtuner_mamba.dataset.carried_chunks import check_carried_arguments, check_chunk_arguments
from xtuner_mamba.dataset.document_dataset import check_document_arguments
from xtuner_mamba.dataset.preference import check_preference_arguments
from xtuner_mamba.dataset.process import check_arguments
from xtuner_mamba.dataset.sources import check_source
from xtuner_mamba.dataset.token_budget import check_budget_arguments
from xtuner_mamba.engine.token_accumulation import (
    TokenAccumulationOptimWrapper,
    TokenStepLoop,
    check_accumulation_arguments,
    check_step_loop_arguments,
)
from xtuner_mamba.integration.config_parts import (
    DATALOADERS,
    REWARD_MODELS,
    ConfigError,
    check_parts,
    type_name,
    walk,
)
from xtuner_mamba.model.dispatch import DISPATCH_TABLE, dispatch_packed, token_mixers
from xtuner_mamba.model.reward_saving import can_save_reward_model

_HOOKS = ("PackedLayoutHook", "VarlenAttnArgsToMessageHubHook")
# by the part of a config: where a type that is a mere name is looked for
_REGISTRIES = {
    "model": BUILDER,
    "custom_hooks": HOOKS,
    "optim_wrapper": OPTIM_WRAPPERS,
    "train_cfg": LOOPS,
}
_OPTIONS = ("autocast_dtype", "fuse_norm", "fuse_loss", "recompute")
# of a part's config, but for others than its constructor
_NO_ARGUMENTS = ("type", "constructor", "paramwise_cfg")
# by the name of what is built: the check of its arguments
_CHECKS = {
    "process_packed_dataset": check_arguments,
    "process_document_dataset": check_document_arguments,
    "process_chunk_dataset": check_chunk_arguments,
    "process_preference_dataset": check_preference_arguments,
    "BucketBatchSampler": check_bucket_arguments,
    "TokenBudgetBatchSampler": check_budget_arguments,
    "CarriedChunkBatchSampler": check_carried_arguments,
}


def check_packed_training(cfg: Config, args: argparse.Namespace) -> bool:
    """Check a config with ``use_varlen_attn``; any other is XTuner's business.

    Args:
        cfg: As read by ``xtuner train``, ``--cfg-options`` merged.
        args: Of ``xtuner train``.

    Returns:
        Whether every token mixer of the model has a varlen path of ours.

    Raises:
        ConfigError: The config cannot train.
    """
    if cfg.get("framework", "mmengine").lower() == "huggingface" or not _uses_varlen(cfg):
        return False
    _check_constructors(cfg)
    _check_batches(cfg)
    _check_row_length(cfg)
    _check_hooks(cfg)
    _check_work_dir(cfg, args)
    _check_accumulation(cfg, args)
    covered = is_covered(cfg.model)
    if covered:
        _check_rows_are_whole(cfg)
        _check_loop(cfg)
    _check_arguments(cfg, covered)
    check_parts(cfg)
    return covered


def _uses_varlen(cfg: Config) -> bool:
    settings = {"use_varlen_attn": bool(cfg.get("use_varlen_attn", False))}
    for part in ("model", *DATALOADERS):
        for path, node in walk(cfg.get(part), part):
            if "use_varlen_attn" in node:
                settings[f"{path}.use_varlen_attn"] = bool(node["use_varlen_attn"])
    if len(set(settings.values())) > 1:
        raise ConfigError(
            f"use_varlen_attn must be the same everywhere, got {settings}; set it in the config "
            "file, since --cfg-options does not reach what the file computed from it"
        )
    return any(settings.values())


def _check_batches(cfg: Config) -> None:
    batch_size = cfg.train_dataloader.batch_size
    if batch_size != 1:
        raise ConfigError(
            f"batch_size must be 1 with use_varlen_attn, got {batch_size}; a row already holds "
            "many documents: raise max_length instead, or accumulative_counts"
        )
    settings = [cfg, *(node for _, node in walk(cfg.train_dataloader))]
    if not all(node.get("pack_to_max_length", True) for node in settings):
        raise ConfigError(
            "pack_to_max_length must be True with use_varlen_attn, got False; set it to True, or "
            "train on padded rows with use_varlen_attn=False"
        )


def _check_row_length(cfg: Config) -> None:
    size = cfg.get("sequence_parallel_size", 1)
    for path, node in walk(cfg.train_dataloader, "train_dataloader"):
        length = node.get("max_length")
        # what is no number is told where the arguments of the dataset are checked
        if isinstance(length, int) and length % size:
            raise ConfigError(
                f"max_length must be divisible by sequence_parallel_size, got {length} and {size} "
                f"in {path}; choose a multiple of {size}"
            )


def _check_hooks(cfg: Config) -> None:
    names = [type_name(hook) for hook in cfg.get("custom_hooks") or ()]
    publishing = [name for name in names if name in _HOOKS]
    if not publishing:
        raise ConfigError(
            f"custom_hooks must hold PackedLayoutHook with use_varlen_attn, got {names}; add "
            "dict(type=PackedLayoutHook) from xtuner_mamba.engine.hooks, without it the model "
            "does not know where documents start"
        )
    if len(publishing) > 1:
        raise ConfigError(
            f"custom_hooks must hold PackedLayoutHook once, got {publishing}; leave the others "
            "out, for which the first one leaves no boundaries in the batch"
        )


def _check_work_dir(cfg: Config, args: argparse.Namespace) -> None:
    default = Path("work_dirs") / Path(args.config).stem
    work_dir = Path(args.work_dir or cfg.get("work_dir") or default)
    checkpoints = sorted(work_dir.glob("iter_*.pth")) + sorted(work_dir.glob("epoch_*.pth"))
    # MMEngine saves a file, DeepSpeed a folder of the same name
    wrong = [path.name for path in checkpoints if path.is_dir() != bool(args.deepspeed)]
    if wrong:
        saved, saves = ("a file", "a folder") if args.deepspeed else ("a folder", "a file")
        raise ConfigError(
            f"work_dir must not hold checkpoints of a run {'without' if args.deepspeed else 'with'}"
            f" DeepSpeed, got {wrong} in {work_dir}, each {saved} where this run saves {saves}; "
            "choose another --work-dir, or move them away"
        )


def _check_accumulation(cfg: Config, args: argparse.Namespace) -> None:
    if args.deepspeed and type_name(cfg.optim_wrapper) == "TokenAccumulationOptimWrapper":
        raise ConfigError(
            f"optim_wrapper must not be TokenAccumulationOptimWrapper with --deepspeed, got "
            f"{args.deepspeed}, which steps after as many micro-batches every time; train without "
            "it, or use AmpOptimWrapper with accumulative_counts, and TrainLoop"
        )


def is_covered(model_cfg: dict) -> bool:
    """Tell whether every token mixer has a varlen path of ours.

    Args:
        model_cfg: Of XTuner's model, with the language model in ``llm``.

    Raises:
        ConfigError: One has no path at all, or the trained model could not be saved.
    """
    model = _model_without_weights(model_cfg["llm"])
    if model is None:
        return False
    found = token_mixers(model)
    if found and set(found) <= set(DISPATCH_TABLE):
        try:
            dispatch_packed(model)
        except RuntimeError as error:
            raise ConfigError(str(error)) from None
        if type_name(model_cfg) in REWARD_MODELS:
            _check_reward_model(model_cfg, model)
        return True
    from xtuner.model.modules.dispatch import SUPPORT_FLASH2, VARLEN_ATTN_DISPATCH_MAPPING

    theirs = {name for name, entry in VARLEN_ATTN_DISPATCH_MAPPING.items() if entry is not None}
    class_name = type(model).__name__
    leaking = sorted(set(found) - set(DISPATCH_TABLE) - theirs)
    if leaking or not (found or theirs & {type(module).__name__ for module in model.modules()}):
        raise ConfigError(
            f"every token-mixing layer of {class_name} must have a varlen path, got none for "
            f"{leaking or 'any layer'}; train with use_varlen_attn=False, or use a model whose "
            f"layers are among {sorted(DISPATCH_TABLE)}"
        )
    if not SUPPORT_FLASH2:
        raise ConfigError(
            f"flash-attn must be installed for the varlen path of {sorted(found)} in "
            f"{class_name}, got none; `pip install flash-attn`, or train with "
            "use_varlen_attn=False"
        )
    return False


def _check_reward_model(model_cfg: dict, model: nn.Module) -> None:
    if not can_save_reward_model(model.base_model):
        raise ConfigError(
            "the llm of a reward model must have a class for sequence classification, got "
            f"{type(model).__name__}, for which transformers has none; use a Mamba or a Llama, "
            "or train with DPO"
        )
    token, size = model_cfg.get("reward_token_id"), model.config.vocab_size
    # with a tokenizer the embeddings grow
    if token is not None and token >= size and model_cfg.get("tokenizer") is None:
        raise ConfigError(
            f"reward_token_id must be below the model's vocabulary of {size}, got {token}; choose "
            "one that ends no turn, such as the tokenizer's end of text"
        )


def _model_without_weights(llm: dict) -> nn.Module | None:
    """Build what ``from_pretrained`` would, on no device; None where only building it will tell."""
    from transformers import AutoConfig
    from transformers.modeling_utils import no_init_weights

    path, builder = llm.get("pretrained_model_name_or_path"), llm.get("type")
    if isinstance(builder, str):
        builder = get_object_from_string(builder)
    model_class = getattr(builder, "__self__", None)
    if path is None or not isinstance(model_class, type):
        return None
    trust = dict(trust_remote_code=bool(llm.get("trust_remote_code", False)))
    try:
        config = AutoConfig.from_pretrained(path, **trust)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"pretrained_model_name_or_path must name a model that transformers can read, got "
            f"{path!r}; {error}"
        ) from None
    with torch.device("meta"), no_init_weights():
        if not hasattr(model_class, "from_config"):
            return model_class(config)
        try:
            return model_class.from_config(config, **trust)
        except ValueError:
            raise ConfigError(
                f"pretrained_model_name_or_path must name a causal language model, which is all "
                f"that XTuner trains, got {path!r} of the model_type {config.model_type!r}, for "
                f"which {model_class.__name__} has no class; choose another model"
            ) from None


def _check_rows_are_whole(cfg: Config) -> None:
    size = cfg.get("sequence_parallel_size", 1)
    if size != 1:
        raise ConfigError(
            f"sequence_parallel_size must be 1 with forwards of ours, got {size}; a Mamba's state "
            "runs along the row, which cannot be cut, and our attention reads all of a document: "
            "lower max_length or use ZeRO instead"
        )


def _check_loop(cfg: Config) -> None:
    train_cfg = cfg.get("train_cfg") or {}
    loop = train_cfg.get("type")
    if isinstance(loop, str):
        loop = LOOPS.get(loop)
    if loop is None and train_cfg.get("by_epoch"):
        loop = EpochBasedTrainLoop
    if isinstance(loop, type) and issubclass(loop, EpochBasedTrainLoop):
        raise ConfigError(
            f"train_cfg must use an iteration-based loop with PackedLayoutHook, got "
            f"{loop.__name__}; use dict(type=TrainLoop, max_epochs=...) from xtuner.engine.runner, "
            "which counts epochs too"
        )


def _check_arguments(cfg: Config, covered: bool) -> None:
    checks = dict(_CHECKS)
    if covered:
        # becomes ours before it is built
        checks["process_hf_dataset"] = check_arguments
        checks["build_preference_dataset"] = check_preference_arguments
    for part in (*DATALOADERS, "custom_hooks"):
        for path, node in walk(cfg.get(part), part):
            check = checks.get(type_name(node))
            if check is None:
                continue
            try:
                check({name: node[name] for name in node if name != "type"})
                if "dataset" in node:
                    check_source(node["dataset"])
            except ValueError as error:
                raise ConfigError(f"{path}: {error}") from None


def _check_constructors(cfg: Config) -> None:
    """Check what our model, hooks, optimizer wrapper and loop are given, in this order."""
    nodes = {part: cfg.get(part) for part in ("model", "optim_wrapper", "train_cfg")}
    nodes |= {f"custom_hooks[{i}]": hook for i, hook in enumerate(cfg.get("custom_hooks") or ())}
    for path, node in nodes.items():
        built = (node or {}).get("type")
        if isinstance(built, str):
            built = _REGISTRIES[path.partition("[")[0]].get(built)
        if not isinstance(built, type) or not built.__module__.startswith("xtuner_mamba."):
            continue
        arguments = {name: node[name] for name in node if name not in _NO_ARGUMENTS}
        try:
            _check_given(built, arguments, cfg)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None


def _check_given(built: type, arguments: dict, cfg: Config) -> None:
    if issubclass(built, nn.Module):
        # late: it imports XTuner's models, which ask for our dispatch meanwhile
        from xtuner_mamba.model.sft import check_options

        check_options(**{name: arguments[name] for name in _OPTIONS if name in arguments})
    elif built is TokenAccumulationOptimWrapper:
        check_accumulation_arguments(arguments)
    elif built is TokenStepLoop:
        check_step_loop_arguments(arguments, cfg.get("param_scheduler"))
    check_names(built.__name__, arguments, _constructor_names(built))
    if issubclass(built, Hook):
        required = [
            name for name, p in inspect.signature(built).parameters.items() if p.default is p.empty
        ]
        missing = [name for name in required if name not in arguments]
        if missing:
            raise ValueError(
                f"{built.__name__} must be given {', '.join(required)}, got {sorted(arguments)}; "
                f"add {', '.join(missing)}"
            )
        # to build it is to check it: a hook of ours does nothing before the training
        built(**arguments)


def _constructor_names(cls: type) -> list[str]:
    """Return the arguments of a constructor, those that it hands on to its base as well."""
    names: list[str] = []
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        names += [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names
