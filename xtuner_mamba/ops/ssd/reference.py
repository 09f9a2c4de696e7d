"""State space duality over packed documents in plain PyTorch, a chunk of tokens at a time."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner_mamba.ops.parts import GradientPart
from xtuner_mamba.ops.ssd.chunk_grid import ChunkGrid, chunk_size_for
from xtuner_mamba.ops.ssd.gated_norm import GatedNorm


def ssd_reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    norm: GatedNorm | None, initial_states: Tensor | None, cu_seqlens: Tensor,
    chunk_size: int | None, *, return_final_states: bool,
    dxBC_out: Sequence[GradientPart] | None = None, dz_out: GradientPart | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.ssd`; rows are laid end to end, step sizes are final.

    ``dxBC_out`` and ``dz_out`` are not made use of.

    In the equations c counts chunks, t and s their tokens, g groups, h heads of a group, p
    channels, n states. A chunk holds one document's tokens, so that nothing needs a mask.
    """
    out_dtype, dtype = x.dtype, A.dtype
    grid = ChunkGrid.from_cu_seqlens(cu_seqlens, chunk_size or chunk_size_for(cu_seqlens, 1, 64))
    heads = (B.shape[1], -1)
    x = x.to(dtype)
    dt_c = grid.scatter(dt).unflatten(2, heads)
    dtx_c = dt_c[..., None] * grid.scatter(x).unflatten(2, heads)
    B_c, C_c = (grid.scatter(t.to(dtype)) for t in (B, C))
    log_decay = dt_c * A.unflatten(0, heads)

    between = torch.exp(_sums_between(log_decay.movedim(1, -1)))
    since_start = torch.exp(log_decay.cumsum(1))
    CB = torch.einsum("ctgn,csgn->cgts", C_c, B_c)
    y = torch.einsum("cghts,csghp->ctghp", CB[:, :, None] * between, dtx_c)
    to_end = between[..., -1, :].movedim(-1, 1)
    added = torch.einsum("csghp,csgn->cghpn", to_end[..., None] * dtx_c, B_c)

    before, final_states = grid.pass_states(
        since_start[:, -1, :, :, None, None],
        added,
        None if initial_states is None else initial_states.unflatten(1, heads),
    )
    y = y + since_start[..., None] * torch.einsum("ctgn,cghpn->ctghp", C_c, before)

    y = grid.gather(y).flatten(1, 2)
    if D is not None:
        y = y + D.to(dtype).view(len(D), -1) * x
    if z is not None:
        y = _gate_and_norm(y, z.to(dtype), norm, B.shape[1])
    return y.to(out_dtype), final_states.flatten(1, 2) if return_final_states else None


def _gate_and_norm(y: Tensor, z: Tensor, norm: GatedNorm | None, ngroups: int) -> Tensor:
    gate = F.silu(z)
    if norm is None:
        return y * gate
    groups = (y if norm.before_gate else y * gate).view(len(y), ngroups, -1)
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + norm.eps)
    y = (groups.flatten(1) * norm.weight.to(y.dtype)).view_as(z)
    return y * gate if norm.before_gate else y


def _sums_between(t: Tensor) -> Tensor:
    """Sum what comes after s up to t, ``[..., t, s]``, with -inf where s comes after t.

    Not as differences of sums from the start, which would lose digits.
    """
    size = t.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=t.device).tril()
    summands = t[..., None].expand(*t.shape, size).masked_fill(~causal.tril(-1), 0)
    return summands.cumsum(-2).masked_fill(~causal, -torch.inf)
