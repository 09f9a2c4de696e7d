"""Changes to a config that ``xtuner`` has read, each with a line in the log."""

import argparse

from mmengine.config import Config, ConfigDict
from mmengine.config.lazy import LazyObject
from mmengine.logging import print_log

from xtuner_mamba.integration.config_checks import is_covered
from xtuner_mamba.integration.config_parts import ConfigError, type_name, walk

# by XTuner's name: what stands in for it, and the arguments that differ (None: there is none)
_EXACT_MODELS = {
    "SupervisedFinetune": (LazyObject("xtuner_mamba.model", "PackedSupervisedFinetune"), {}),
    "DPO": (LazyObject("xtuner_mamba.model", "PackedDPO"), {}),
    "ORPO": (LazyObject("xtuner_mamba.model", "PackedORPO"), {}),
    "RewardModel": (LazyObject("xtuner_mamba.model", "PackedRewardModel"), {}),
}
_EXACT = _EXACT_MODELS | {
    "process_hf_dataset": (
        LazyObject("xtuner_mamba.dataset", "process_packed_dataset"),
        # as XTuner packs
        {"packing": "wrap"},
    ),
    "build_preference_dataset": (
        LazyObject("xtuner_mamba.dataset", "process_preference_dataset"),
        # as XTuner does, but for answers that it cuts
        {"too_long": "drop"},
    ),
    "preference_collate_fn": (
        LazyObject("xtuner_mamba.dataset", "preference_packed_collate_fn"),
        {"use_varlen_attn": None},
    ),
    "default_collate_fn": (
        LazyObject("xtuner_mamba.dataset", "packed_collate_fn"),
        {"use_varlen_attn": None},
    ),
    "VarlenAttnArgsToMessageHubHook": (
        LazyObject("xtuner_mamba.engine.hooks", "PackedLayoutHook"),
        {},
    ),
}
PACKED_MODELS = ("PackedSupervisedFinetune", "PackedDPO", "PackedORPO", "PackedRewardModel")
"""Models of ours, whose loss is that of an optimizer step and whose dtype is autocast's."""

_PARTS = ("model", "train_dataloader", "val_dataloader", "test_dataloader", "custom_hooks")


def train_exactly(cfg: Config) -> None:
    """Put our parts where a config has XTuner's, for a model whose every mixer is ours.

    A config of ours is left as it is, and so is one that trains something else, which has other
    parts.
    """
    if type_name(cfg.model) not in (*_EXACT, *PACKED_MODELS):
        return
    for part in _PARTS:
        for path, node in walk(cfg.get(part), part):
            if type_name(node) in _EXACT:
                _put_ours(path, node)
    optim_wrapper = cfg.optim_wrapper
    if "constructor" not in optim_wrapper and not optim_wrapper.get("paramwise_cfg"):
        ours = LazyObject("xtuner_mamba.engine", "MambaOptimWrapperConstructor")
        optim_wrapper["constructor"] = ours
        _log("optim_wrapper.constructor: none", str(ours))


def build_exactly(model: ConfigDict) -> None:
    """Put our model in the place of XTuner's, in all that :func:`train_exactly` does so.

    Args:
        model: What is about to be built, a model or a part of one.
    """
    if type_name(model) not in _EXACT_MODELS or not model.get("use_varlen_attn"):
        return
    try:
        covered = is_covered(model)
    except ConfigError:
        # it was trained elsewhere: XTuner says what is missing here
        return
    if covered:
        _put_ours("model", model)


def fit_cpu(cfg: Config, args: argparse.Namespace) -> None:
    """Make a config for GPUs run on a machine that has none; it could not run there before."""
    from xtuner.utils.device import get_device_name

    if get_device_name() != "cpu" or cfg.get("framework", "mmengine").lower() == "huggingface":
        return
    if type_name(cfg.optim_wrapper) == "AmpOptimWrapper":
        cfg.optim_wrapper["type"] = LazyObject("mmengine.optim", "OptimWrapper")
        for key in ("dtype", "loss_scale", "use_fsdp"):
            cfg.optim_wrapper.pop(key)
        _log("optim_wrapper: AmpOptimWrapper", "OptimWrapper, float32")
    if args.launcher == "none":
        return
    if cfg.get("env_cfg", {}).get("dist_cfg", {}).get("backend", "nccl") == "nccl":
        cfg.merge_from_dict({"env_cfg.dist_cfg.backend": "gloo"})
        _log("env_cfg.dist_cfg.backend: nccl", "gloo")
    if not args.deepspeed and "model_wrapper_cfg" not in cfg:
        # MMEngine names a GPU there unless told otherwise
        cfg.model_wrapper_cfg = dict(
            type="MMDistributedDataParallel",
            device_ids=None,
            broadcast_buffers=False,
            find_unused_parameters=cfg.get("find_unused_parameters", False),
        )
        _log("model_wrapper_cfg: of a GPU", "of the CPU")


def _put_ours(path: str, node: dict) -> None:
    name = type_name(node)
    ours, arguments = _EXACT[name]
    node["type"] = ours
    for key, value in arguments.items():
        if value is None:
            node.pop(key)
        else:
            node[key] = value
    _log(f"{path}: {name}", str(ours))


def _log(before: str, after: str) -> None:
    print_log(f"xtuner_mamba changes the config: {before} -> {after}", logger="current")
