"""Triton kernel that lays tokens into chunks and takes them out again, each moved once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtuner_mamba.ops.triton_support import cdiv, next_power_of_2, with_unit_stride

# numbers that a program has under way
_BLOCK = 4096


def copy_rows(source: Tensor, places: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy rows of a tensor, in the order of their places.

    Args:
        source: ``(rows, ...)``.
        places: Of the rows wanted, int64, ``(wanted,)``; -1 is a row of zeros.
        out: Written and returned, ``(wanted, ...)``, the numbers of a row next to each other.
    """
    rows = with_unit_stride(source.flatten(1))
    if out is None:
        shape = len(places), *source.shape[1:]
        out = torch.empty(shape, dtype=source.dtype, device=source.device)
    target = out.view(len(places), -1)
    dim = rows.shape[1]
    block = min(next_power_of_2(dim), _BLOCK)
    # of narrow rows a program takes several
    num_rows = _BLOCK // block
    _copy_rows_kernel[(cdiv(len(places), num_rows),)](
        rows, target, places, len(places), rows.stride(0), target.stride(0), dim,
        ROWS=num_rows, BLOCK=block,
    )  # fmt: skip
    return out


# changes from step to step: a kernel for each of its divisors would be compiled in turn
@triton.jit(do_not_specialize=["num_rows"])
def _copy_rows_kernel(
    source, target, places, num_rows, stride_source, stride_target, dim,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < num_rows
    o_source = tl.load(places + o_row, mask=m_row, other=-1)
    p_source = source + o_source[:, None] * stride_source
    p_target = target + o_row[:, None] * stride_target
    for i_d in range(0, dim, BLOCK):
        o_d = i_d + tl.arange(0, BLOCK)[None, :]
        m = m_row[:, None] & (o_d < dim)
        b_rows = tl.load(p_source + o_d, mask=m & (o_source >= 0)[:, None], other=0.0)
        tl.store(p_target + o_d, b_rows, mask=m)
