"""RMS norm at the head of a residual block: contract, checks and choice of the kernel.

    x'       = x rounded to ``dtype``
    y[t]     = weight * x'[t] / sqrt(mean(x'[t]^2) + eps)
    residual = x in ``residual_dtype``

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; roundings as in
transformers' ``MambaRMSNorm`` and ``MambaBlock``. Both uses of x are one op, so that its backward
adds their gradients while it writes them.

Where x is a sum, :func:`add_before_norm` makes sum and norm in one kernel. To autograd they stay
two ops, and whoever looks at the sum or changes it finds what it would be without.

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
    """What went in, ``(..., dim)``."""


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    impl: Impl | None = None,
) -> NormWithResidual:
    """Norm every token on its own, and hand on what came in.

    Squares are summed in float32 (float64 for float64 in the reference).

    Args:
        x: Activations, ``(..., dim)``.
        weight: Scale of each channel, ``(dim,)``.
        eps: Added to the mean square.
        dtype: ``x`` is rounded to it before anything else; ``None`` leaves it.
        residual_dtype: Of the residual; ``None`` stands for that of ``x``.
        impl: ``"triton"`` runs on a GPU, ``"reference"`` in plain PyTorch. ``None`` takes the
            first on a GPU and the second elsewhere; a named one is never switched.

    Returns:
        The normed tokens, in the dtype that ``weight`` and ``dtype`` promote to, and the residual.
        Differentiable in ``x`` and ``weight``.

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
    norm = _resolve(impl, x.device)
    with without_autocast(x.device.type):
        return NormWithResidual(*norm(x, weight, eps, dtype or x.dtype, residual_dtype or x.dtype))


def add_before_norm(
    x: Tensor, update: Tensor, weight: Tensor, *, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Add on a GPU, and norm ahead for a :func:`rms_norm` of the sum with the same arguments.

    Args:
        x: ``(..., dim)``.
        update: In the dtype of ``x`` or a narrower one, ``(..., dim)``.
        weight: Of the norm, ``(dim,)``.
        eps: Of the norm.
        dtype: Of the norm.

    Returns:
        The sum, in the dtype of ``x``, ``(..., dim)``. Differentiable in ``x`` and ``update``.

    Raises:
        ValueError: A shape or a dtype disagrees with the above.
        RuntimeError: The tensors are not on a GPU, and Triton does not interpret.
    """
    if update.shape != x.shape or weight.shape != x.shape[-1:] or 0 in x.shape:
        raise ValueError(
            "x and update must have shape (..., dim) with weight (dim,), none of them 0, got "
            f"{tuple(x.shape)}, {tuple(update.shape)} and {tuple(weight.shape)}"
        )
    if torch.promote_types(x.dtype, update.dtype) != x.dtype:
        raise ValueError(
            f"update must have the dtype of x, {x.dtype}, or a narrower one, got {update.dtype}; "
            "the sum would be rounded"
        )
    from xtuner_mamba.ops.rms_norm.triton import add_before_norm_triton

    with without_autocast(x.device.type):
        return add_before_norm_triton(x, update, weight, eps, dtype or x.dtype)


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
