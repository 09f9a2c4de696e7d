"""Triton kernels for the logarithms of decays: step sizes into chunks, and their gradients out.

mamba_ssm's own clamp step sizes once more, by a maximum that turns NaN into 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtuner_mamba.ops.ssd.chunk_grid import ChunkGrid
from xtuner_mamba.ops.triton_support import cdiv, next_power_of_2, with_unit_stride

# numbers that a program has under way
_BLOCK = 2048


def decays_fwd(dt: Tensor, A: Tensor, grid: ChunkGrid) -> tuple[Tensor, Tensor]:
    """Lay step sizes into chunks, and sum the logarithms of decays from the start of each.

    Args:
        dt: Step sizes, final, ``(total, nheads)``.
        A: Decay rates, ``(nheads,)``.
        grid: Where the chunks are.

    Returns:
        Step sizes, 0 in gaps, and the sums of ``dt A``, each float32,
        ``(1, nheads, chunks, chunk_size)``.
    """
    dt, A = with_unit_stride(dt), A.contiguous()
    nheads, num_chunks = len(A), len(grid.chunk_order)
    steps = dt.new_empty(1, nheads, num_chunks, grid.chunk_size, dtype=torch.float32)
    dA_cumsum = torch.empty_like(steps)
    programs, sizes = _programs(nheads, grid)
    _decays_fwd_kernel[programs](
        dt, A, grid.sources, steps, dA_cumsum, dt.stride(0), num_chunks, nheads, **sizes
    )
    return steps, dA_cumsum


def decays_bwd(
    within: Tensor,
    to_end: Tensor,
    dsums: Tensor,
    dlast: Tensor,
    dsteps: Tensor,
    steps: Tensor,
    A: Tensor,
    grid: ChunkGrid,
) -> tuple[Tensor, Tensor]:
    """Add up what reaches a decay by all ways, and hand it to the step sizes and rates.

    Args:
        within: Gradient of the single logarithms, for what tokens bring to later ones of their
            chunk, float32, shaped as ``steps``.
        to_end: For what they bring to the state after the chunk, like ``within``.
        dsums: Gradient of the sums from the start of the chunk, which bring the state before it to
            each token, like ``within``.
        dlast: Of the last of these sums, which brings that state to the end, float32,
            ``(1, nheads, chunks)``.
        dsteps: Gradient of the step sizes beside their decays, like ``within``.
        steps: See :func:`decays_fwd`, as ``A`` and ``grid``.
        A: See there.
        grid: See there.

    Returns:
        Gradients of ``dt``, float32, ``(total, nheads)``, and of ``A``, ``(nheads,)``.
    """
    incoming = [t.contiguous() for t in (within, to_end, dsums, dlast, dsteps)]
    nheads, num_chunks = steps.shape[1:3]
    ddt = steps.new_empty(len(grid.slots), nheads)
    # a number for each program, to be summed in a fixed order
    dA = steps.new_empty(nheads, num_chunks)
    programs, sizes = _programs(nheads, grid)
    _decays_bwd_kernel[programs](
        *incoming, steps, A.contiguous(), grid.sources, ddt, dA, num_chunks, nheads, **sizes
    )
    return ddt, dA.sum(-1).to(A.dtype)


def _programs(nheads: int, grid: ChunkGrid) -> tuple[tuple[int, int], dict[str, int]]:
    heads = min(next_power_of_2(nheads), max(_BLOCK // grid.chunk_size, 1))
    sizes = {"CHUNK": grid.chunk_size, "HEADS": heads}
    return (len(grid.chunk_order), cdiv(nheads, heads)), sizes


# changes from step to step: a kernel for each of its divisors would be compiled in turn
@triton.jit(do_not_specialize=["num_chunks"])
def _decays_fwd_kernel(
    dt, A, sources, steps, dA_cumsum, stride_dt, num_chunks, nheads,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    i_chunk = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    o_c = tl.arange(0, CHUNK)[None, :]
    m_h = o_h < nheads
    o_t = tl.load(sources + i_chunk * CHUNK + o_c)
    b_dt = tl.load(dt + o_t * stride_dt + o_h, mask=m_h & (o_t >= 0), other=0.0).to(tl.float32)
    b_A = tl.load(A + o_h, mask=m_h, other=0.0).to(tl.float32)
    o = (o_h * num_chunks + i_chunk) * CHUNK + o_c
    tl.store(steps + o, b_dt, mask=m_h)
    tl.store(dA_cumsum + o, tl.cumsum(b_dt * b_A, 1), mask=m_h)


@triton.jit(do_not_specialize=["num_chunks"])
def _decays_bwd_kernel(
    within, to_end, dsums, dlast, dsteps, steps, A, sources, ddt, dA, num_chunks, nheads,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    i_chunk = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    m_h = o_h < nheads
    o_c = tl.arange(0, CHUNK)[None, :]
    o_row = o_h * num_chunks + i_chunk
    o = o_row[:, None] * CHUNK + o_c
    m = m_h[:, None]
    # a decay acts on all that comes after it in the chunk, and on the state after that
    b_ddA = tl.cumsum(tl.load(dsums + o, mask=m, other=0.0), 1, reverse=True)
    b_ddA += tl.load(dlast + o_row, mask=m_h, other=0.0)[:, None]
    b_ddA += tl.load(within + o, mask=m, other=0.0)
    b_ddA += tl.load(to_end + o, mask=m, other=0.0)
    b_A = tl.load(A + o_h, mask=m_h, other=0.0).to(tl.float32)[:, None]
    b_ddt = b_ddA * b_A + tl.load(dsteps + o, mask=m, other=0.0)
    o_t = tl.load(sources + i_chunk * CHUNK + o_c)
    tl.store(ddt + o_t * nheads + o_h[:, None], b_ddt, mask=m & (o_t >= 0))
    b_steps = tl.load(steps + o, mask=m, other=0.0)
    tl.store(dA + o_row, tl.sum(b_ddA * b_steps, 1), mask=m_h)
