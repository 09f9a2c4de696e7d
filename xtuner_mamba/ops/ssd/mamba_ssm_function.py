"""Forward and backward of the op from the kernels of mamba_ssm, one call each.

As in mamba_ssm's ``_mamba_chunk_scan_combined_fwd`` and ``_bwd``, but for kernels of our own that
sum decays, and hand states from chunk to chunk. All chunks of all documents stand in one row;
mamba_ssm's kernels read none but their own chunk and its states.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.ops.parts import GradientPart
from xtuner_mamba.ops.selective_scan.recomputation import is_backward_next
from xtuner_mamba.ops.ssd.chunk_grid import ChunkGrid
from xtuner_mamba.ops.ssd.triton_decays import decays_bwd, decays_fwd
from xtuner_mamba.ops.ssd.triton_rows import copy_rows
from xtuner_mamba.ops.ssd.triton_states import pass_states_bwd, pass_states_fwd


class SsdFunction(torch.autograd.Function):
    """Keeps the states before chunks, the largest of its tensors, only if the backward comes next.

    What a checkpoint counts is the same number of tensors either way. The output stays in its
    chunks, ``(1, slots, nheads, headdim)``, unless it ``leaves_chunks``.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
        z: Tensor | None, initial_states: Tensor | None, grid: ChunkGrid,
        kernels: SimpleNamespace, return_final_states: bool, leaves_chunks: bool,
        dxBC_out: Sequence[GradientPart] | None, dz_out: GradientPart | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        x, B, C = (_row_of(grid, t) for t in (x, B, C))
        z = None if z is None else _row_of(grid, z)
        D = None if D is None else D.contiguous()
        steps, dA_cumsum = decays_fwd(dt, A, grid)
        states, final_states = _states_before_chunks(
            B, x, steps, dA_cumsum, initial_states, grid, kernels, return_final_states
        )
        CB = kernels._bmm_chunk_fwd(C, B, grid.chunk_size, output_dtype=torch.float32)
        y, ungated = kernels._chunk_scan_fwd(CB, x, steps, dA_cumsum, C, states, D=D, z=z)
        ctx.grid, ctx.kernels, ctx.leaves_chunks = grid, kernels, leaves_chunks
        ctx.dxBC_out, ctx.dz_out = dxBC_out, dz_out
        kept = states if is_backward_next() else states.new_empty(0)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, A, B, C, D, z, initial_states, dA_cumsum, steps, CB, ungated, kept)
        return _tokens_of(grid, y) if leaves_chunks else y, final_states

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None, dfinal_states: Tensor | None) -> tuple[Tensor | None, ...]:
        x, A, B, C, D, z, initial_states, dA_cumsum, steps, CB, ungated, states = ctx.saved_tensors
        grid, kernels, ngroups = ctx.grid, ctx.kernels, B.shape[2]
        if not len(states):
            states, _ = _states_before_chunks(
                B, x, steps, dA_cumsum, initial_states, grid, kernels, return_final_states=False
            )
        if dy is None:
            dy = torch.zeros_like(x)
        elif ctx.leaves_chunks:
            dy = _row_of(grid, dy)
        dz = None
        if z is not None:
            dz, dy, dD = kernels._chunk_scan_bwd_dz(
                x, z, ungated, dy, grid.chunk_size, has_ddAcs=False, D=D
            )
        dstates = kernels._chunk_scan_bwd_dstates(C, dA_cumsum, dy, dtype=torch.float32)
        # what is carried from step to step needs none
        if not ctx.needs_input_grad[7]:
            initial_states = None
        dadded, ddecays, dinitial_states = pass_states_bwd(
            dstates, states, dA_cumsum, grid, initial_states, dfinal_states, x.dtype
        )
        dx, dsteps, dD_of_x = kernels._chunk_scan_chunk_state_bwd_dx(
            x, steps, dA_cumsum, B, CB, dy, dadded, D=D
        )
        if z is None:
            dD = dD_of_x
        dB_added, ddA_to_end = kernels._chunk_state_bwd_db(
            x, steps, dA_cumsum, dadded, B=B, ngroups=ngroups
        )
        dC_states, ddA_cumsum = kernels._chunk_scan_bwd_dC(
            states, dA_cumsum, dy, C=C, ngroups=ngroups
        )
        dCB = kernels._chunk_scan_bwd_dcb(x, steps, dA_cumsum, dy, ngroups=ngroups)
        dB = kernels._bmm_chunk_bwd(C, dCB, residual=dB_added)
        dC = kernels._bmm_chunk_bwd(B, dCB.transpose(-1, -2), residual=dC_states)
        ddA_within = kernels._chunk_scan_bwd_ddAcs_stable(x, steps, dA_cumsum, dy, CB)
        ddt, dA = decays_bwd(ddA_within, ddA_to_end, ddA_cumsum, ddecays, dsteps, steps, A, grid)
        outs = ctx.dxBC_out or 3 * [None]
        dx, dB, dC = (_tokens_of(grid, t, out) for t, out in zip((dx, dB, dC), outs))
        dz = None if dz is None else _tokens_of(grid, dz, ctx.dz_out)
        return dx, ddt, dA, dB, dC, dD, dz, dinitial_states, *6 * [None]


def _states_before_chunks(
    B: Tensor, x: Tensor, steps: Tensor, dA_cumsum: Tensor, initial_states: Tensor | None,
    grid: ChunkGrid, kernels: SimpleNamespace, return_final_states: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Rounded, as they are multiplied; and the states after documents."""
    added = kernels._chunk_state_fwd(B, x, steps, dA_cumsum, states_in_fp32=True)
    return pass_states_fwd(
        added, dA_cumsum, grid, initial_states, x.dtype, return_final_states=return_final_states
    )


def _row_of(grid: ChunkGrid, tokens: Tensor) -> Tensor:
    return copy_rows(tokens, grid.sources)[None]


def _tokens_of(grid: ChunkGrid, row: Tensor, out: GradientPart | None = None) -> Tensor:
    memory = None if out is None else out.allocate().view(-1, *row.shape[2:])
    return copy_rows(row[0], grid.slots, memory)
