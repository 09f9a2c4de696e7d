"""Causal depthwise conv1d over packed documents: the forward kernels.

A program walks ``block_t`` tokens of the row, whatever documents they belong to.
"""
# ruff: noqa: RUF005
# Triton knows no starred tuples

import triton
import triton.language as tl
from torch import Tensor

from xtuner_mamba.ops.causal_conv1d.triton_window import (
    convolve,
    first_window,
    load_filter,
    load_window,
)
from xtuner_mamba.ops.triton_math import silu
from xtuner_mamba.ops.triton_support import cdiv, next_power_of_2

# rows whose loads are under way together
GROUP = 8


# these change from step to step: a kernel for each of their divisors would be compiled in turn
@triton.jit(do_not_specialize=["total", "block_t"])
def _conv_fwd_kernel(
    x, weight, bias, initial_states, cu_seqlens, seq_idx, y,
    total, block_t, stride_x: tl.constexpr, dim: tl.constexpr,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    num_blocks: tl.constexpr = (dim + BLOCK_D - 1) // BLOCK_D
    o_d = tl.program_id(0) % num_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < dim
    first = tl.program_id(0) // num_blocks * block_t
    num_tokens = tl.minimum(block_t, total - first)
    p_x = x + first.to(tl.int64) * stride_x + o_d
    p_y = y + first.to(tl.int64) * dim + o_d

    b_taps, b_bias = load_filter(weight, bias, o_d, m_d, WIDTH)
    i_seq = tl.load(seq_idx + first)
    b_window = load_window(
        x, initial_states, cu_seqlens, i_seq, first, stride_x, dim, o_d, m_d, WIDTH
    )
    for i_group in range(0, num_tokens, GROUP):
        # all rows of a group are on their way before the first is needed; their strides are
        # constants, so that each is an offset in an instruction and no address
        b_xs = ()
        for i in tl.static_range(GROUP):
            m_t = m_d & (i_group + i < num_tokens)
            b_x = tl.load(p_x + i * stride_x, mask=m_t, other=0.0)
            b_xs = b_xs + (b_x.to(tl.float32),)
        # most groups lie within one document, and need not ask at every token
        i_last = tl.load(seq_idx + first + tl.minimum(i_group + GROUP, num_tokens) - 1)
        if (i_last == i_seq) & (i_group + GROUP <= num_tokens):
            b_window, i_seq = _walk_group(
                b_xs, b_window, b_taps, b_bias, p_y, seq_idx + first, i_seq, initial_states,
                i_group, num_tokens, dim, o_d, m_d, WIDTH, SILU, GROUP, False,
            )  # fmt: skip
        else:
            b_window, i_seq = _walk_group(
                b_xs, b_window, b_taps, b_bias, p_y, seq_idx + first, i_seq, initial_states,
                i_group, num_tokens, dim, o_d, m_d, WIDTH, SILU, GROUP, True,
            )  # fmt: skip
        p_x += GROUP * stride_x
        p_y += GROUP * dim


@triton.jit
def _walk_group(
    b_xs, b_window, b_taps, b_bias, p_y, seq_idx, i_seq, initial_states,
    i_group, num_tokens, dim: tl.constexpr, o_d, m_d,
    WIDTH: tl.constexpr, SILU: tl.constexpr, GROUP: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Store the results of ``GROUP`` tokens; return the next one's window, and the last's document.

    ``EDGES`` asks at every token where documents begin and the program's own tokens end.
    """
    for i in tl.static_range(GROUP):
        i_t = i_group + i
        m_t = m_d
        if EDGES:
            m_t = m_d & (i_t < num_tokens)
            i_next = tl.load(seq_idx + i_t, mask=i_t < num_tokens, other=i_seq)
            if i_next != i_seq:
                b_window = first_window(initial_states, i_next, dim, o_d, m_d, WIDTH)
                i_seq = i_next
        b_inputs = (b_xs[i],) + b_window
        b_y = convolve(b_inputs, b_taps, b_bias, WIDTH)
        if SILU:
            b_y = silu(b_y)
        tl.store(p_y + i * dim, b_y, mask=m_t)
        b_window = b_inputs[:-1]
    return b_window, i_seq


@triton.jit
def _conv_final_states_kernel(
    x, initial_states, cu_seqlens, final_states, stride_x, dim,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(dim, BLOCK_D)
    o_d = tl.program_id(0) % num_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    i_seq = tl.program_id(0) // num_blocks
    end = tl.load(cu_seqlens + i_seq + 1).to(tl.int64)
    b_window = load_window(
        x, initial_states, cu_seqlens, i_seq, end, stride_x, dim, o_d, o_d < dim, WIDTH
    )
    for i in tl.static_range(WIDTH - 1):
        p_x = final_states + (i_seq.to(tl.int64) * dim + o_d) * (WIDTH - 1) + (WIDTH - 2 - i)
        tl.store(p_x, b_window[i], mask=o_d < dim)


def tokens_of_a_program(total: int) -> int:
    """Return how many tokens of a row a program walks: fewer in a short row, to fill the GPU."""
    return min(128, max(16, next_power_of_2(total) // 512))


def _conv_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor | None,
    cu_seqlens: Tensor, seq_idx: Tensor, activation: str | None, y: Tensor,
    *, return_final_states: bool,
) -> Tensor | None:  # fmt: skip
    """Launch the forward: write y, return the final states."""
    (total, dim), width, num_seqs = x.shape, weight.shape[1], len(cu_seqlens) - 1
    block_t, block_d = tokens_of_a_program(total), 512
    num_blocks = cdiv(dim, block_d)
    _conv_fwd_kernel[(num_blocks * cdiv(total, block_t),)](
        x, weight, bias, initial_states, cu_seqlens, seq_idx, y,
        total, block_t, stride_x=x.stride(0), dim=dim,
        WIDTH=width, SILU=activation == "silu", BLOCK_D=block_d, GROUP=GROUP, num_warps=4,
    )  # fmt: skip
    if not return_final_states:
        return None
    final_states = x.new_empty(num_seqs, dim, width - 1)
    _conv_final_states_kernel[(num_blocks * num_seqs,)](
        x, initial_states, cu_seqlens, final_states, x.stride(0), dim,
        WIDTH=width, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return final_states
