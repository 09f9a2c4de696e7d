"""Selective scan over packed documents: which inputs the Gluon kernels take."""

import functools

import torch
import triton
from torch import Tensor

_HALVES = torch.float16, torch.bfloat16


def why_not_gluon(x: Tensor, dt: Tensor, A: Tensor, z: Tensor | None) -> str | None:
    """Say what keeps the Gluon kernels from these inputs.

    Args:
        x: Input of the recurrence, ``(..., dim)``.
        dt: Step sizes, as x.
        A: Decay rates, ``(dim, dstate)``.
        z: Gate, as x.

    Returns:
        The first condition that does not hold, with the value; ``None`` if all hold.
    """
    reason = _why_not_here(x.device)
    if reason is not None:
        return reason
    for name, tensor in (("x", x), ("dt", dt), ("z", z)):
        if tensor is not None and tensor.dtype not in _HALVES:
            return f"{name} must be float16 or bfloat16, got {tensor.dtype}"
    if A.shape[1] != 16:
        return f"dstate must be 16, got {A.shape[1]}"
    if x.shape[-1] % 64:
        return f"dim must be a multiple of 64, got {x.shape[-1]}"
    return None


@functools.cache
def _why_not_here(device: torch.device) -> str | None:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 6):
        return f"Triton must be 3.6 or newer, got {triton.__version__}"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"the device must be a GPU of compute capability 9.0, got {device}"
    return None
