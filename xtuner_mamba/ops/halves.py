"""Halves of a tensor whose gradients are written side by side at once.

Autograd cuts a tensor in two without a copy, but copies both gradients to lay them side by side
again. Ops that are told where theirs will stand spare that pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class GradientHalf(NamedTuple):
    """Where an op may write the gradient of one half."""

    whole: "_WholeGradient"
    i_half: int

    def allocate(self) -> Tensor:
        """Return memory in the half's shape and dtype, its last dimension contiguous.

        To be called by the backward that fills it, once each time that it runs.
        """
        return self.whole.allocate_half(self.i_half)


class Halves(NamedTuple):
    """Result of :func:`split_halves`."""

    first: Tensor
    """``(..., dim)``."""
    second: Tensor
    """``(..., dim)``."""
    dfirst: GradientHalf
    dsecond: GradientHalf


def split_halves(whole: Tensor) -> Halves:
    """Cut the last dimension in two, as ``whole.chunk(2, dim=-1)`` does.

    Whoever writes the gradient of a half to what ``dfirst`` or ``dsecond`` allocates spares its
    copy. That is an offer: gradients that come otherwise (of other ops, summed, replaced by a
    hook) are laid side by side as ever.

    Args:
        whole: ``(..., 2 dim)``.

    Raises:
        ValueError: The last dimension is odd.
    """
    if whole.shape[-1] % 2:
        raise ValueError(f"whole must have an even last dimension, got shape {tuple(whole.shape)}")
    gradient = _WholeGradient(whole)
    first, second = SplitHalvesFunction.apply(whole, gradient)
    return Halves(first, second, GradientHalf(gradient, 0), GradientHalf(gradient, 1))


class SplitHalvesFunction(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx, whole, gradient):
        ctx.gradient = gradient
        return whole.chunk(2, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dfirst, dsecond):
        return ctx.gradient.join(dfirst, dsecond), None


class _WholeGradient:
    """Memory for the gradients of both halves, new in every backward."""

    def __init__(self, like: Tensor) -> None:
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._memory: Tensor | None = None
        self._free: dict[int, Tensor] = {}

    def allocate_half(self, i_half: int) -> Tensor:
        # one that was handed out may still be in somebody's hands, and is not given away again
        half = self._free.pop(i_half, None)
        if half is None:
            self._memory = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._free = dict(enumerate(self._memory.chunk(2, dim=-1)))
            half = self._free.pop(i_half)
        return half

    def join(self, dfirst: Tensor, dsecond: Tensor) -> Tensor:
        memory, self._memory, self._free = self._memory, None, {}
        if memory is not None:
            first, second = memory.chunk(2, dim=-1)
            if dfirst.is_set_to(first) and dsecond.is_set_to(second):
                return memory
        return torch.cat((dfirst, dsecond), dim=-1)
