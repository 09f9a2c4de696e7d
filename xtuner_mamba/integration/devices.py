"""Runs without a GPU: XTuner, MMEngine and DeepSpeed take one for granted in these places."""

import functools
import importlib.util
from collections.abc import Callable
from types import ModuleType

import torch


def tell_cpu_has_bfloat16(device: ModuleType) -> None:
    """Answer ``get_torch_device().is_bf16_supported()`` where that is ``torch.cpu``."""
    if not hasattr(device.torch.cpu, "is_bf16_supported"):
        # PyTorch computes in bfloat16 on every CPU
        device.torch.cpu.is_bf16_supported = lambda: True


def init_dist_without_gpu(utils: ModuleType) -> None:
    """Let MMEngine start process groups where ``torch.cuda.set_device`` would raise."""
    for name in ("_init_dist_pytorch", "_init_dist_slurm", "_init_dist_mpi"):
        setattr(utils, name, without_gpu(getattr(utils, name)))


def spare_compiler(strategy: ModuleType) -> None:
    """Let DeepSpeed use gloo on the CPU instead of compiling an all-reduce of its own.

    That takes a minute, and fails where there is no compiler. On a GPU there is no such thing.
    """
    if importlib.util.find_spec("deepspeed"):
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False


def without_gpu(init_dist: Callable) -> Callable:
    """Wrap a function that selects a GPU, so that it runs on a machine without one."""

    @functools.wraps(init_dist)
    def wrapper(*args, **kwargs):
        if torch.cuda.is_available():
            return init_dist(*args, **kwargs)
        set_device = torch.cuda.set_device
        torch.cuda.set_device = lambda device: None
        try:
            return init_dist(*args, **kwargs)
        finally:
            torch.cuda.set_device = set_device

    return wrapper
