"""RMS norm at the head of a residual block in plain PyTorch: the definition."""

import torch
from torch import Tensor


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, residual_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See :func:`xtuner_mamba.ops.rms_norm`."""
    rounded = x.to(dtype).to(torch.promote_types(dtype, torch.float32))
    normed = rounded * torch.rsqrt(rounded.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(dtype), x.to(residual_dtype)
