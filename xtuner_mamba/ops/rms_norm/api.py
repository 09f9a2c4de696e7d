"""RMS norm at the head of a residual block: contract, checks and choice of the kernel.

    s        = x + update
    s'       = s rounded to ``dtype``
    y[t]     = weight * s'[t] / sqrt(mean(s'[t]^2) + eps)
    residual = s in ``residual_dtype``

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; roundings as in
transformers' ``MambaRMSNorm`` and ``MambaBlock``. Both uses of the sum are one op, so that its
backward adds their gradients while it writes them, in the dtypes of both summands.

Dimensions:
    dim: channels
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from xtuner_mamba.ops.autocast import without_autocast

Impl = Literal["triton", "reference"]


class NormWithResidual(NamedTuple):
    """Result of :func:`rms_norm`."""

    y: Tensor
    """Normed, ``(..., dim)``."""
    residual: Tensor
    """What was normed, ``(..., dim)``."""


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    update: Tensor | None = None,
    impl: Impl | None = None,
) -> NormWithResidual:
    """Norm every token on its own, and hand on what came in.

    Squares are summed in float32 (float64 for float64 in the reference).

    Args:
        x: Activations, ``(..., dim)``.
        weight: Scale of each channel, ``(dim,)``.
        eps: Added to the mean square.
        dtype: The sum is rounded to it before it is normed; ``None`` leaves it in that of ``x``.
        residual_dtype: Of the residual; ``None`` stands for that of ``x``.
        update: Added to ``x`` first, in its dtype or a narrower one, ``(..., dim)``.
        impl: ``"triton"`` runs on a GPU, ``"reference"`` in plain PyTorch. ``None`` takes the
            first on a GPU and the second elsewhere; a named one is never switched.

    Returns:
        The normed tokens, in the dtype that ``weight`` and ``dtype`` promote to, and the residual.
        Differentiable in ``x``, ``weight`` and ``update``.

    Raises:
        ValueError: A shape or a dtype disagrees with the above, or ``impl`` is unknown.
    """
    if weight.shape != x.shape[-1:] or 0 in x.shape:
        raise ValueError(
            "x must have shape (..., dim) with weight (dim,), none of them 0, got "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(f"x must have a floating-point dtype, got {x.dtype}")
    if update is not None:
        _check_update(x, update)
    norm = _resolve(impl, x.device)
    args = x, weight, eps, dtype or x.dtype, residual_dtype or x.dtype, update
    with without_autocast(x.device.type):
        return NormWithResidual(*norm(*args))


def _check_update(x: Tensor, update: Tensor) -> None:
    if update.shape != x.shape:
        raise ValueError(
            f"update must have the shape of x, {tuple(x.shape)}, got {tuple(update.shape)}"
        )
    if torch.promote_types(x.dtype, update.dtype) != x.dtype:
        raise ValueError(
            f"update must have the dtype of x, {x.dtype}, or a narrower one, got {update.dtype}; "
            "the sum would be rounded"
        )


def _resolve(impl: Impl | None, device: torch.device):
    if impl is None:
        impl = "triton" if device.type == "cuda" else "reference"
    if impl == "triton":
        from xtuner_mamba.ops.rms_norm.triton import rms_norm_triton

        return rms_norm_triton
    if impl == "reference":
        from xtuner_mamba.ops.rms_norm.reference import rms_norm_reference

        return rms_norm_reference
    raise ValueError(f"impl must be None, 'triton' or 'reference', got {impl!r}")
