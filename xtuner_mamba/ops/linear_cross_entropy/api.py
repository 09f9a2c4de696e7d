"""Cross entropy of a linear head, summed: contract, checks and choice of the kernel.

    logits[t] = weight x[t]
    loss      = sum over t that have a target of
                log(sum_v exp(logits[t, v])) - logits[t, targets[t]]

Dimensions:
    total: tokens
    dim:   channels
    vocab: rows of the head
"""

from typing import Literal

import torch
from torch import Tensor

from xtuner_mamba.ops.autocast import without_autocast

Impl = Literal["triton", "reference"]


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, impl: Impl | None = None
) -> Tensor:
    """Sum the cross entropy of every token that has a target.

    Logits are rounded to the dtype of ``x``, the rest is float32 (float64 for float64 in the
    reference). Under autocast ``x`` and ``weight`` are cast as a linear layer casts them.

    Args:
        x: Hidden states, ``(total, dim)``.
        weight: Of the head, ``(vocab, dim)``, in the dtype of ``x``.
        targets: Int64, ``(total,)``, -100 where there is none.
        impl: ``"triton"`` runs on a GPU and never holds all logits, ``"reference"`` in plain
            PyTorch. ``None`` takes the first on a GPU and the second elsewhere; a named one is
            never switched.

    Returns:
        Float32 (or float64), ``()``. Differentiable in ``x`` and ``weight``.

    Raises:
        ValueError: A shape or a dtype disagrees with the above, or ``impl`` is unknown.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
    if x.ndim != 2 or weight.shape[1:] != x.shape[1:] or targets.shape != x.shape[:1]:
        raise ValueError(
            "x, weight and targets must have shapes (total, dim), (vocab, dim) and (total,), got "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    if x.dtype != weight.dtype or targets.dtype != torch.int64:
        raise ValueError(
            "x and weight must have one dtype, and targets int64, got "
            f"{x.dtype}, {weight.dtype} and {targets.dtype}"
        )
    with without_autocast(device):
        return _resolve(impl, x.device)(x, weight, targets)


def _resolve(impl: Impl | None, device: torch.device):
    if impl is None:
        impl = "triton" if device.type == "cuda" else "reference"
    if impl == "triton":
        from xtuner_mamba.ops.linear_cross_entropy.triton import linear_cross_entropy_triton

        return linear_cross_entropy_triton
    if impl == "reference":
        from xtuner_mamba.ops.linear_cross_entropy.reference import (
            linear_cross_entropy_reference,
        )

        return linear_cross_entropy_reference
    raise ValueError(f"impl must be None, 'triton' or 'reference', got {impl!r}")
