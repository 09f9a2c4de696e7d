"""Causal attention over packed documents: the definition, document by document."""

from itertools import pairwise

import torch
from torch import Tensor


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, sliding_window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """See :func:`xtuner_mamba.ops.attention`; the rows are laid end to end."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    ys = []
    for start, end in pairwise(cu_seqlens.tolist()):
        q_i, k_i, v_i = (t[start:end].to(dtype) for t in (q, k, v))
        k_i, v_i = (t.repeat_interleave(group, dim=1) for t in (k_i, v_i))
        scores = scale * torch.einsum("ihd,jhd->hij", q_i, k_i)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril()
        if sliding_window is not None:
            visible = visible.triu(1 - sliding_window)
        probabilities = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        ys.append(torch.einsum("hij,jhd->ihd", probabilities, v_i))
    return torch.cat(ys).to(q.dtype)
