"""Causal depthwise conv1d over packed documents in plain PyTorch, all tokens at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner_mamba.ops.parts import GradientPart


def causal_conv1d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor | None,
    cu_seqlens: Tensor, activation: str | None, *, return_final_states: bool,
    dx_out: GradientPart | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.causal_conv1d`.

    Every document is led by a state of ``width - 1`` rows, so that no tap reaches the document
    before. With width 3, documents of 2 and 1 tokens (a, b) stand as ``s s a a s s b``.
    ``dx_out`` is not made use of.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows, width = x.flatten(0, 1), weight.shape[1]
    total, dim = rows.shape
    state = width - 1
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff()
    docs = torch.arange(len(lengths), device=x.device)
    state_rows = (starts + docs * state)[:, None] + torch.arange(state, device=x.device)
    token_rows = torch.arange(total, device=x.device)
    token_rows = token_rows + (docs + 1).repeat_interleave(lengths) * state

    led = rows.new_zeros(total + len(lengths) * state, dim, dtype=dtype)
    led.index_copy_(0, token_rows, rows.to(dtype))
    if initial_states is not None:
        states = initial_states.mT.flatten(0, 1)
        led.index_copy_(0, state_rows.flatten(), states.to(dtype))
    windows = len(led) - state
    weight = weight.to(dtype)
    y = weight.new_zeros(dim) if bias is None else bias.to(dtype)
    y = torch.addcmul(y, led[:windows], weight[:, 0])
    for tap in range(1, width):
        y.addcmul_(led[tap : tap + windows], weight[:, tap])
    # windows that end in a state belong to no token
    y = y.index_select(0, token_rows - state)
    y = (F.silu(y) if activation == "silu" else y).to(x.dtype).view(x.shape)
    if not return_final_states:
        return y, y, None
    return y, y, led[state_rows + lengths[:, None]].mT.to(x.dtype)
