"""Selective scan over packed documents: between the tensors of autograd and those of the kernels.

The kernels read A with the channels innermost and B and C side by side in float32, and leave the
gradients of all weights in parts. Each direction is one kernel here, since launching it costs a
host more time than the numbers cost the GPU.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from xtuner_mamba.ops.triton_math import sum_rows
from xtuner_mamba.ops.triton_support import cdiv, with_unit_stride


class GradientParts(NamedTuple):
    """What the kernels leave to be summed, in float32; ``None`` what is not wanted.

    The channels may have been worked on in slices of ``width``.
    """

    dA: Tensor | None
    """``(dim / width, num_groups, dstate, width)``."""
    dBC: Tensor | None
    """``(num_parts, total, 2 dstate)``."""
    dD: Tensor | None
    """``(dim / width, num_groups, width)``."""
    ddt_bias: Tensor | None
    """``(dim / width, num_groups, width)``."""
    num_groups: int
    width: int


def lay_out_weights(A: Tensor, B: Tensor, C: Tensor, *, A_is_log: bool) -> tuple[Tensor, Tensor]:
    """Return A as ``(dstate, dim)``, B and C as ``(total, 2 dstate)``, all in float32.

    Args:
        A: ``(dim, dstate)``.
        B: ``(total, dstate)``.
        C: ``(total, dstate)``.
        A_is_log: It is log(-A) that stands for A.
    """
    (dim, dstate), total = A.shape, B.shape[0]
    A, B, C = with_unit_stride(A), with_unit_stride(B), with_unit_stride(C)
    A_out, BC = A.new_empty(dstate, dim), A.new_empty(total, 2 * dstate)
    block = 1024
    _weights_kernel[(cdiv(dstate * dim, block) + cdiv(total * 2 * dstate, block),)](
        A, B, C, A_out, BC, total, A.stride(0), B.stride(0), C.stride(0),
        A_IS_LOG=A_is_log, dim=dim, DSTATE=dstate, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return A_out, BC


# changes from step to step: a kernel for each of its divisors would be compiled in turn
@triton.jit(do_not_specialize=["total"])
def _weights_kernel(
    A, B, C, A_out, BC, total, stride_A, stride_B, stride_C,
    A_IS_LOG: tl.constexpr, dim: tl.constexpr, DSTATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    num_blocks: tl.constexpr = (DSTATE * dim + BLOCK - 1) // BLOCK
    i_block = tl.program_id(0).to(tl.int64)
    if i_block < num_blocks:
        o_out = i_block * BLOCK + tl.arange(0, BLOCK)
        p_A = A + o_out % dim * stride_A + o_out // dim
        b_A = tl.load(p_A, mask=o_out < DSTATE * dim, other=0.0)
        if A_IS_LOG:
            # in float64: an error of A is the same at every token, and adds up
            b_A = -tl.exp(b_A.to(tl.float64)).to(tl.float32)
        tl.store(A_out + o_out, b_A, mask=o_out < DSTATE * dim)
    else:
        o_out = (i_block - num_blocks) * BLOCK + tl.arange(0, BLOCK)
        o_t, o_n = o_out // (2 * DSTATE), o_out % (2 * DSTATE)
        m_B, m_C = (o_t < total) & (o_n < DSTATE), (o_t < total) & (o_n >= DSTATE)
        b_B = tl.load(B + o_t * stride_B + o_n, mask=m_B, other=0.0).to(tl.float32)
        b_C = tl.load(C + o_t * stride_C + o_n - DSTATE, mask=m_C, other=0.0).to(tl.float32)
        tl.store(BC + o_out, tl.where(o_n < DSTATE, b_B, b_C), mask=o_t < total)


def sum_gradients(
    parts: GradientParts, A: Tensor, dA: Tensor | None, dB: Tensor | None, dC: Tensor | None,
    dD: Tensor | None, ddt_bias: Tensor | None, *, A_is_log: bool,
) -> None:  # fmt: skip
    """Write the sums of the parts, added up in a fixed order and rounded once.

    Args:
        parts: Of which at least those are there whose sums are wanted.
        A: As the kernels read it, ``(dstate, dim)``.
        dA: ``(dim, dstate)``.
        dB: ``(total, dstate)``.
        dC: ``(total, dstate)``.
        dD: ``(dim,)``.
        ddt_bias: ``(dim,)``.
        A_is_log: It is the gradient at log(-A) that stands for dA.
    """
    (dstate, dim), block = A.shape, 64
    num_parts, total = (0, 0) if parts.dBC is None else parts.dBC.shape[:2]
    num_blocks = cdiv(dstate * dim, block) + cdiv(dim, block) + cdiv(total * 2 * dstate, block)
    _sum_kernel[(num_blocks,)](
        parts.dA, parts.dBC, parts.dD, parts.ddt_bias, A, dA, dB, dC, dD, ddt_bias,
        total, num_parts, parts.num_groups,
        A_IS_LOG=A_is_log, dim=dim, width=parts.width, DSTATE=dstate,
        ROWS=16, BLOCK=block, num_warps=1,
    )  # fmt: skip


# these change from step to step: a kernel for each of their divisors would be compiled in turn
@triton.jit(do_not_specialize=["total", "num_parts", "num_groups"])
def _sum_kernel(
    dA_parts, dBC_parts, dD_parts, ddt_bias_parts, A, dA, dB, dC, dD, ddt_bias,
    total, num_parts, num_groups, A_IS_LOG: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
    DSTATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    num_A: tl.constexpr = (DSTATE * dim + BLOCK - 1) // BLOCK
    num_D: tl.constexpr = (dim + BLOCK - 1) // BLOCK
    i_block = tl.program_id(0).to(tl.int64)
    if i_block < num_A:
        o = i_block * BLOCK + tl.arange(0, BLOCK)
        o_n, o_d = o // dim, o % dim
        m = o < DSTATE * dim
        if dA is not None:
            p_parts = dA_parts + o_d // width * num_groups * DSTATE * width
            p_parts += o_n * width + o_d % width
            b_dA = sum_rows(p_parts, m, num_groups, DSTATE * width, ROWS)
            if A_IS_LOG:
                b_dA *= tl.load(A + o, mask=m, other=0.0)
            tl.store(dA + o_d * DSTATE + o_n, b_dA, mask=m)
    elif i_block < num_A + num_D:
        o_d = (i_block - num_A) * BLOCK + tl.arange(0, BLOCK)
        o_parts = o_d // width * num_groups * width + o_d % width
        m = o_d < dim
        if dD is not None:
            tl.store(dD + o_d, sum_rows(dD_parts + o_parts, m, num_groups, width, ROWS), mask=m)
        if ddt_bias is not None:
            b_dbias = sum_rows(ddt_bias_parts + o_parts, m, num_groups, width, ROWS)
            tl.store(ddt_bias + o_d, b_dbias, mask=m)
    elif dBC_parts is not None:
        o = (i_block - num_A - num_D) * BLOCK + tl.arange(0, BLOCK)
        o_t, o_n = o // (2 * DSTATE), o % (2 * DSTATE)
        m = o_t < total
        b_dBC = sum_rows(dBC_parts + o, m, num_parts, total * 2 * DSTATE, ROWS)
        if dB is not None:
            tl.store(dB + o_t * DSTATE + o_n, b_dBC, mask=m & (o_n < DSTATE))
        if dC is not None:
            tl.store(dC + o_t * DSTATE + o_n - DSTATE, b_dBC, mask=m & (o_n >= DSTATE))
