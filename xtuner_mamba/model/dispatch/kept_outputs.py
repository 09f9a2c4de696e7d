"""Narrow outputs of linear layers, which a recomputed mixer keeps: their products are wide."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Kept = tuple[Tensor, Tensor] | None
"""Weight and output of a layer, ``None`` if it is to be called again."""
_thread = threading.local()


@contextmanager
def keep_outputs(outputs: list[Kept]) -> Iterator[None]:
    """Add what :func:`project_once` makes to a list. Acts on the thread that enters it."""
    with _as_active(outputs.append, None):
        yield


@contextmanager
def take_outputs(outputs: list[Kept]) -> Iterator[None]:
    """Let :func:`project_once` take from a list, in turn, instead of multiplying again."""
    with _as_active(None, iter(outputs).__next__):
        yield


@contextmanager
def _as_active(
    put: Callable[[Kept], None] | None, take: Callable[[], Kept] | None
) -> Iterator[None]:
    before, _thread.active = getattr(_thread, "active", (None, None)), (put, take)
    try:
        yield
    finally:
        _thread.active = before


def project_once(layer: nn.Module, x: Tensor, weight: Tensor | None) -> Tensor:
    """Call a linear layer, in a forward and its recomputation together once if it is plain.

    Args:
        layer: The layer, which is called where its output is not to be kept.
        x: ``(..., in)``.
        weight: ``(out, in)``, all that the layer multiplies ``x`` with, in its dtype; ``None`` if
            the layer does more. Read in the first run, which decides for both.

    Returns:
        ``(..., out)``.
    """
    put, take = getattr(_thread, "active", (None, None))
    if take is not None:
        known = take()
        return layer(x) if known is None else _LinearFunction.apply(x, *known)
    if put is None:
        return layer(x)
    if weight is None:
        put(None)
        return layer(x)
    y = _LinearFunction.apply(x, weight, None)
    put((weight, y.detach()))
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
