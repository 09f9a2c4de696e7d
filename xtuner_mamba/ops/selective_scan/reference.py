"""Selective scan over packed documents: the definition, token by token."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def selective_scan_reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor, dt_softplus: bool,
    *, return_final_states: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.selective_scan`; the rows are laid end to end."""
    out_dtype, dtype = x.dtype, A.dtype
    x, dt, B, C = (t.to(dtype) for t in (x, dt, B, C))
    if dt_bias is not None:
        dt = dt + dt_bias.to(dtype)
    if dt_softplus:
        # PyTorch's threshold of 20 would cost float64 its last digits
        dt = F.softplus(dt, threshold=40)

    tokens = list(zip(x.unbind(), dt.unbind(), B.unbind(), C.unbind()))
    ys, final_states = [], []
    for i_seq, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        h = torch.zeros_like(A) if initial_states is None else initial_states[i_seq].to(dtype)
        for x_t, dt_t, B_t, C_t in tokens[start:end]:
            h = torch.exp(dt_t[:, None] * A) * h + (dt_t * x_t)[:, None] * B_t
            ys.append((h * C_t).sum(1))
        final_states.append(h)
    y = torch.stack(ys)
    if D is not None:
        y = y + D.to(dtype) * x
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(out_dtype), torch.stack(final_states) if return_final_states else None
