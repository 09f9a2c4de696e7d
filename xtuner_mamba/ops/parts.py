"""Parts of a tensor whose gradients are written side by side at once.

Autograd cuts a tensor without a copy, but copies the gradients of all parts to lay them side by
side again. Ops that are told where theirs will stand spare that pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class GradientPart(NamedTuple):
    """Where an op may write the gradient of one part."""

    whole: "_WholeGradient"
    i_part: int

    def allocate(self) -> Tensor:
        """Return memory in the part's shape and dtype, its last dimension contiguous.

        To be called by the backward that fills it, once each time that it runs.
        """
        return self.whole.allocate_part(self.i_part)


class Parts(NamedTuple):
    """Result of :func:`split_parts`."""

    tensors: tuple[Tensor, ...]
    """``(..., size)`` each."""
    gradients: tuple[GradientPart, ...]


def split_parts(whole: Tensor, sizes: Sequence[int]) -> Parts:
    """Cut the last dimension, as ``whole.split(sizes, dim=-1)`` does.

    Whoever writes the gradient of a part to what one of ``gradients`` allocates spares its copy.
    That is an offer: those that come otherwise (of other ops, summed, replaced by a hook) are
    copied as ever.

    Args:
        whole: ``(..., sum(sizes))``.
        sizes: Of the parts, in their order.

    Raises:
        ValueError: The sizes do not add up to the last dimension.
    """
    if sum(sizes) != whole.shape[-1]:
        raise ValueError(
            f"sizes must add up to whole's last dimension, {whole.shape[-1]}, got {list(sizes)}"
        )
    gradient = _WholeGradient(whole, sizes)
    tensors = SplitPartsFunction.apply(whole, gradient)
    return Parts(tensors, tuple(GradientPart(gradient, i) for i in range(len(sizes))))


class SplitPartsFunction(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx, whole, gradient):
        ctx.gradient = gradient
        return gradient.split(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return ctx.gradient.join(gradients), None


class _WholeGradient:
    """Memory for the gradients of all parts, new in every backward."""

    def __init__(self, like: Tensor, sizes: Sequence[int]) -> None:
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._sizes = list(sizes)
        self._memory: Tensor | None = None
        self._free: dict[int, Tensor] = {}

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return whole.split(self._sizes, dim=-1)

    def allocate_part(self, i_part: int) -> Tensor:
        # one that was handed out may still be in somebody's hands, and is not given away again
        part = self._free.pop(i_part, None)
        if part is None:
            self._memory = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._free = dict(enumerate(self.split(self._memory)))
            part = self._free.pop(i_part)
        return part

    def join(self, gradients: Sequence[Tensor]) -> Tensor:
        memory, free = self._memory, self._free
        self._memory, self._free = None, {}
        if memory is None:
            return torch.cat(gradients, dim=-1)
        # nor is it overwritten
        for i_part, (part, gradient) in enumerate(zip(self.split(memory), gradients)):
            if i_part not in free and not gradient.is_set_to(part):
                return torch.cat(gradients, dim=-1)
        for i_part, part in free.items():
            part.copy_(gradients[i_part])
        return memory
