"""Changes to a config that ``xtuner train`` has read, each with a line in the log."""

import argparse

from mmengine.config import Config
from mmengine.config.lazy import LazyObject
from mmengine.logging import print_log

from xtuner_mamba.integration.config_checks import type_name, walk

# XTuner's name, what stands in for it, and arguments that it gets where the config has none
_EXACT = {
    "SupervisedFinetune": (LazyObject("xtuner_mamba.model", "PackedSupervisedFinetune"), {}),
    "process_hf_dataset": (
        LazyObject("xtuner_mamba.dataset", "process_packed_dataset"),
        # XTuner's own way of packing
        {"packing": "wrap"},
    ),
    "default_collate_fn": (LazyObject("xtuner_mamba.dataset", "packed_collate_fn"), {}),
    "VarlenAttnArgsToMessageHubHook": (
        LazyObject("xtuner_mamba.engine.hooks", "PackedLayoutHook"),
        {},
    ),
}
_PARTS = ("model", "train_dataloader", "val_dataloader", "test_dataloader", "custom_hooks")


def train_exactly(cfg: Config) -> None:
    """Put our parts where a config has XTuner's, for a model whose every mixer is ours.

    A config of ours is left as it is.
    """
    for part in _PARTS:
        for path, node in walk(cfg.get(part), part):
            name = type_name(node)
            if name in _EXACT:
                ours, arguments = _EXACT[name]
                node["type"] = ours
                for key, value in arguments.items():
                    node.setdefault(key, value)
                _log(f"{path}: {name}", f"{ours}({_keywords(arguments)})")
    optim_wrapper = cfg.optim_wrapper
    if "constructor" not in optim_wrapper and not optim_wrapper.get("paramwise_cfg"):
        ours = LazyObject("xtuner_mamba.engine", "MambaOptimWrapperConstructor")
        optim_wrapper["constructor"] = ours
        _log("optim_wrapper.constructor: none", str(ours))


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
    dist_cfg = cfg.setdefault("env_cfg", {}).setdefault("dist_cfg", {})
    if dist_cfg.get("backend", "nccl") == "nccl":
        dist_cfg["backend"] = "gloo"
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


def _keywords(arguments: dict) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _log(before: str, after: str) -> None:
    print_log(f"xtuner_mamba changes the config: {before} -> {after}", logger="current")
