"""Causal attention over packed documents in plain PyTorch, a block of queries at a time.

Exact on any device and in any dtype. At most ``_BLOCK`` queries of a document meet its keys at
once, and the backward computes the probabilities again, so that no square of a document is kept.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.layout import offsets_on_host

_BLOCK = 128


def attention_blocked(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, sliding_window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """See :func:`xtuner_mamba.ops.attention`; the rows are laid end to end."""
    blocks = list(_blocks(offsets_on_host(cu_seqlens), sliding_window))
    return BlockedAttentionFunction.apply(q, k, v, blocks, scale, sliding_window, softcap)


def _blocks(offsets: tuple[int, ...], sliding_window: int | None) -> Iterator[tuple[slice, slice]]:
    """Iterate over blocks of queries and the keys that one of them can see."""
    for begin, stop in pairwise(offsets):
        for start in range(begin, stop, _BLOCK):
            end = min(start + _BLOCK, stop)
            first = begin if sliding_window is None else max(begin, start + 1 - sliding_window)
            yield slice(start, end), slice(first, end)


class BlockedAttentionFunction(torch.autograd.Function):
    """Saves the inputs only."""

    @staticmethod
    def forward(ctx, q, k, v, blocks, scale, sliding_window, softcap):
        ctx.save_for_backward(q, k, v)
        ctx.arguments = blocks, scale, sliding_window, softcap
        return _attention_fwd(q, k, v, blocks, scale, sliding_window, softcap)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        # somebody may call it under autocast, which api.py has switched off for the forward
        with torch.autocast(dy.device.type, enabled=False):
            dq, dk, dv = _attention_bwd(dy, *ctx.saved_tensors, *ctx.arguments)
        return dq, dk, dv, None, None, None, None


def _attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, blocks: list[tuple[slice, slice]], scale: float,
    sliding_window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    y = torch.empty_like(q)
    for rows, columns in blocks:
        q_b, k_b, v_b = _split(q[rows], k[columns], v[columns])
        p, _ = _probabilities(q_b, k_b, rows, columns, scale, sliding_window, softcap)
        y[rows] = torch.einsum("hgij,jhd->ihgd", p, v_b).flatten(1, 2)
    return y


def _attention_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: list[tuple[slice, slice]], scale: float,
    sliding_window: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty_like(q)
    # a key gathers gradients from several blocks
    dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    for rows, columns in blocks:
        q_b, k_b, v_b = _split(q[rows], k[columns], v[columns])
        p, slope = _probabilities(q_b, k_b, rows, columns, scale, sliding_window, softcap)
        dy_b = dy[rows].to(dtype).view_as(q_b)
        dv[columns] += torch.einsum("hgij,ihgd->jhd", p, dy_b)
        dp = torch.einsum("ihgd,jhd->hgij", dy_b, v_b)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        if slope is not None:
            ds = ds * slope
        dq[rows] = torch.einsum("hgij,jhd->ihgd", ds, k_b).flatten(1, 2)
        dk[columns] += torch.einsum("hgij,ihgd->jhd", ds, q_b)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _split(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group the query heads by the key head that they share, in the dtype of the computation."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.to(dtype).unflatten(1, (k.shape[1], -1)), k.to(dtype), v.to(dtype)


def _probabilities(
    q: Tensor, k: Tensor, rows: slice, columns: slice, scale: float, sliding_window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the probabilities, ``(nkvheads, group, i, j)``, and the slope of the soft cap."""
    scores = scale * torch.einsum("ihgd,jhd->hgij", q, k)
    slope = None
    if softcap is not None:
        bounded = torch.tanh(scores / softcap)
        scores, slope = softcap * bounded, 1 - bounded.square()
    i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    j = torch.arange(columns.start, columns.stop, device=q.device)
    hidden = j > i
    if sliding_window is not None:
        hidden |= j <= i - sliding_window
    return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), slope
