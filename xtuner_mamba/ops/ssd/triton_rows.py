"""Triton kernel that lays tokens into chunks and takes them out again, each moved once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtuner_mamba.ops.triton_support import next_power_of_2, with_unit_stride

_MAX_BLOCK = 4096


def copy_rows(source: Tensor, places: Tensor) -> Tensor:
    """Copy rows of a tensor, in the order of their places.

    Args:
        source: ``(rows, ...)``.
        places: Of the rows wanted, int64, ``(wanted,)``; -1 is a row of zeros.

    Returns:
        ``(wanted, ...)``.
    """
    rows = with_unit_stride(source.flatten(1))
    dim = rows.shape[1]
    block = min(next_power_of_2(dim), _MAX_BLOCK)
    shape = len(places), *source.shape[1:]
    target = torch.empty(shape, dtype=source.dtype, device=source.device)
    _copy_rows_kernel[(len(places),)](
        rows, target, places, rows.stride(0), dim, BLOCK=block, num_warps=4 if block > 512 else 1
    )
    return target


@triton.jit
def _copy_rows_kernel(source, target, places, stride, dim, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    i_source = tl.load(places + i_row)
    for i_d in range(0, dim, BLOCK):
        o_d = i_d + tl.arange(0, BLOCK)
        m_d = o_d < dim
        p_source = source + i_source * stride + o_d
        b_row = tl.load(p_source, mask=m_d & (i_source >= 0), other=0.0)
        tl.store(target + i_row * dim + o_d, b_row, mask=m_d)
