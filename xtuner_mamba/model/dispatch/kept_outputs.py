"""Narrow outputs of linear layers, which a recomputed mixer keeps: their products are wide."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_thread = threading.local()


@contextmanager
def keep_outputs(outputs: list[Tensor]) -> Iterator[None]:
    """Add what :func:`linear_kept` makes to a list. Acts on the thread that enters it."""
    with _as_active(outputs.append, None):
        yield


@contextmanager
def take_outputs(outputs: list[Tensor]) -> Iterator[None]:
    """Let :func:`linear_kept` take from a list, in turn, instead of multiplying again."""
    with _as_active(None, iter(outputs).__next__):
        yield


@contextmanager
def _as_active(
    put: Callable[[Tensor], None] | None, take: Callable[[], Tensor] | None
) -> Iterator[None]:
    before, _thread.active = getattr(_thread, "active", (None, None)), (put, take)
    try:
        yield
    finally:
        _thread.active = before


def linear_kept(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply, as ``torch.nn.functional.linear`` does, once for a forward and its recomputation.

    Args:
        x: ``(..., in)``.
        weight: ``(out, in)``, in the dtype of ``x``.

    Returns:
        ``(..., out)``.
    """
    put, take = getattr(_thread, "active", (None, None))
    if put is None and take is None:
        return F.linear(x, weight)
    y = _LinearFunction.apply(x, weight, None if take is None else take())
    if put is not None:
        put(y.detach())
    return y


class _LinearFunction(torch.autograd.Function):
    """Saves the same in both runs, whose saved tensors a checkpoint counts."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, known: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight) if known is None else known.view_as(known)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = dy.flatten(0, -2).t() @ x.flatten(0, -2)
        return dx, dweight, None
