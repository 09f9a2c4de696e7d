"""Selective scan over packed documents: which inputs the Gluon kernels take."""

import torch
import triton
from torch import Tensor

_HALVES = torch.float16, torch.bfloat16
# documents this short leave nothing to prefetch; the Triton kernels need no prefetch of their own
_MIN_MEAN_SEQLEN = 16


def why_not_gluon(x: Tensor, dt: Tensor, A: Tensor, z: Tensor | None, num_seqs: int) -> str | None:
    """Say what keeps the Gluon kernels from these inputs.

    Args:
        x: Input of the recurrence, ``(total, dim)``.
        dt: Step sizes, ``(total, dim)``.
        A: Decay rates, ``(dim, dstate)``.
        z: Gate, ``(total, dim)``.
        num_seqs: Documents of the row.

    Returns:
        The first condition that does not hold, with the value; ``None`` if all hold.
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 6):
        return f"Triton must be 3.6 or newer, got {triton.__version__}"
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        return f"the device must be a GPU of compute capability 9.0, got {x.device}"
    for name, tensor in {"x": x, "dt": dt, "z": z}.items():
        if tensor is not None and tensor.dtype not in _HALVES:
            return f"{name} must be float16 or bfloat16, got {tensor.dtype}"
    if A.shape[1] != 16:
        return f"dstate must be 16, got {A.shape[1]}"
    if x.shape[1] % 64:
        return f"dim must be a multiple of 64, got {x.shape[1]}"
    if x.shape[0] < _MIN_MEAN_SEQLEN * num_seqs:
        return (
            f"documents must have {_MIN_MEAN_SEQLEN} tokens on average, "
            f"got {x.shape[0]} tokens in {num_seqs}"
        )
    return None
