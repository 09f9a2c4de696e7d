"""Triton kernel that adds up the gradients of the logarithms of decays, in one pass over each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtuner_mamba.ops.triton_support import cdiv

# chunks of a head that a program takes
_ROWS = 8


def add_decays(within: Tensor, to_end: Tensor, dsums: Tensor, dlast: Tensor) -> Tensor:
    """Add up what reaches a decay by all ways.

    Args:
        within: From tokens to later ones of their chunk, float32,
            ``(1, nheads, chunks, chunk_size)``.
        to_end: From tokens to the state after the chunk, shaped as ``within``.
        dsums: Gradient of the sums from the start of the chunk, which bring the state before it to
            each token, shaped as ``within``.
        dlast: Of the last of these sums, which brings that state to the end,
            ``(1, nheads, chunks)``.

    Returns:
        Gradients of the single logarithms, shaped as ``within``.
    """
    within, to_end, dsums, dlast = (t.contiguous() for t in (within, to_end, dsums, dlast))
    ddA = torch.empty_like(within)
    num_rows, chunk_size = dlast.numel(), within.shape[-1]
    _add_decays_kernel[(cdiv(num_rows, _ROWS),)](
        within, to_end, dsums, dlast, ddA, num_rows, ROWS=_ROWS, CHUNK=chunk_size, num_warps=2
    )
    return ddA


# changes from step to step: a kernel for each of its divisors would be compiled in turn
@triton.jit(do_not_specialize=["num_rows"])
def _add_decays_kernel(
    within, to_end, dsums, dlast, ddA, num_rows, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < num_rows
    o = o_row[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    # a decay acts on all that comes after it in the chunk, and on the state after that
    b_sums = tl.load(dsums + o, mask=m_row[:, None], other=0.0)
    b_ddA = tl.cumsum(b_sums, 1, reverse=True)
    b_ddA += tl.load(dlast + o_row, mask=m_row, other=0.0)[:, None]
    b_ddA += tl.load(within + o, mask=m_row[:, None], other=0.0)
    b_ddA += tl.load(to_end + o, mask=m_row[:, None], other=0.0)
    tl.store(ddA + o, b_ddA, mask=m_row[:, None])
