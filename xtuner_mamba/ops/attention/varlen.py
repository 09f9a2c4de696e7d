"""Causal attention over packed documents by the flash attention that comes with PyTorch."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

# registers the operators
import torch.nn.attention.varlen
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.layout import offsets_on_host


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, sliding_window: int | None,
    softcap: None,
) -> Tensor:  # fmt: skip
    """See :func:`xtuner_mamba.ops.attention`; the rows are laid end to end."""
    max_seqlen = max(end - start for start, end in pairwise(offsets_on_host(cu_seqlens)))
    # tokens before itself; -1 is all of them
    window = [-1 if sliding_window is None else sliding_window - 1, 0]
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return VarlenAttentionFunction.apply(q, k, v, cu_seqlens, max_seqlen, scale, window)


class VarlenAttentionFunction(torch.autograd.Function):
    """PyTorch's operators, but the backward gives the same bits twice.

    ``torch.nn.attention.varlen.varlen_attn`` adds up dq in the order in which blocks finish,
    unless the whole process has asked for deterministic algorithms.
    """

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, max_seqlen, scale, window):
        ends = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window == [-1, 0])
        y, lse, rng_state = torch.ops.torch_attn._varlen_attn(q, k, v, *ends, scale, window)
        ctx.save_for_backward(q, k, v, y, lse, cu_seqlens, rng_state)
        ctx.arguments = max_seqlen, scale, window
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v, y, lse, cu_seqlens, rng_state = ctx.saved_tensors
        max_seqlen, scale, window = ctx.arguments
        ends = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window == [-1, 0])
        with _deterministic():
            dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
                dy.contiguous(), q, k, v, y, lse, *ends, rng_state, scale, window
            )
        return dq, dk, dv, None, None, None, None


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
