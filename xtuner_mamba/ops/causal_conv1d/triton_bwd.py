"""Causal depthwise conv1d over packed documents: the backward kernels.

With g[t] the gradient before the activation,

    dx[t] = sum_k weight[width - 1 - k] g[t + k]        dweight[width - 1 - k] = sum_t g[t] x[t - k]

over those k for which both tokens lie in one document. A program walks its ``block_t`` tokens and
the ``WIDTH - 1`` after them; the dx of a token is complete ``WIDTH - 1`` tokens later.
"""
# ruff: noqa: RUF005
# Triton knows no starred tuples

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtuner_mamba.ops.causal_conv1d.triton_fwd import GROUP
from xtuner_mamba.ops.causal_conv1d.triton_window import (
    convolve,
    first_window,
    load_filter,
    load_window,
)
from xtuner_mamba.ops.triton_math import add_compensated, sigmoid, sum_rows
from xtuner_mamba.ops.triton_support import cdiv


# these change from step to step: a kernel for each of their divisors would be compiled in turn
@triton.jit(do_not_specialize=["total", "block_t"])
def _conv_bwd_kernel(
    x, weight, bias, initial_states, cu_seqlens, seq_idx, dy, dy_fork, dfinal_states, dx, dfilter,
    total, block_t,
    stride_x: tl.constexpr, stride_dy: tl.constexpr, stride_dy_fork: tl.constexpr,
    stride_dx: tl.constexpr, dim: tl.constexpr,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    num_blocks: tl.constexpr = (dim + BLOCK_D - 1) // BLOCK_D
    o_d = tl.program_id(0) % num_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < dim
    i_block = tl.program_id(0) // num_blocks
    first = i_block * block_t
    num_own = tl.minimum(block_t, total - first)
    num_read = tl.minimum(num_own + WIDTH - 1, total - first)
    p_x = x + first.to(tl.int64) * stride_x + o_d
    p_dy, p_dy_fork = dy + first.to(tl.int64) * stride_dy + o_d, dy_fork
    if dy_fork is not None:
        p_dy_fork += first.to(tl.int64) * stride_dy_fork + o_d
    p_dx = dx + first.to(tl.int64) * stride_dx + o_d

    b_taps, b_bias = load_filter(weight, bias, o_d, m_d, WIDTH)
    i_seq = tl.load(seq_idx + first)
    start = tl.load(cu_seqlens + i_seq)
    b_window = load_window(
        x, initial_states, cu_seqlens, i_seq, first, stride_x, dim, o_d, m_d, WIDTH
    )
    # dx, as far as it is known, of the WIDTH - 1 tokens before, the newest first
    b_dxs = _zeros(WIDTH - 1, BLOCK_D)
    # the taps, the newest token's first, then the bias; each with its compensation
    b_dfilter = _zeros(WIDTH + 1, BLOCK_D)
    b_rests = _zeros(WIDTH + 1, BLOCK_D)

    for i_group in range(0, num_own + WIDTH - 1, GROUP):
        # all rows of a group are on their way before the first is needed; their strides are
        # constants, so that each is an offset in an instruction and no address
        b_xs = ()
        b_dys = ()
        for i in tl.static_range(GROUP):
            m_t = m_d & (i_group + i < num_read)
            b_x = tl.load(p_x + i * stride_x, mask=m_t, other=0.0)
            b_dy = tl.load(p_dy + i * stride_dy, mask=m_t, other=0.0).to(tl.float32)
            if dy_fork is not None:
                p_dy_t = p_dy_fork + i * stride_dy_fork
                b_dy += tl.load(p_dy_t, mask=m_t, other=0.0).to(tl.float32)
            b_xs = b_xs + (b_x.to(tl.float32),)
            b_dys = b_dys + (b_dy,)
        # most groups lie inside one document, all their taps too, and need not ask at every token
        i_last = tl.load(seq_idx + first + tl.minimum(i_group + GROUP, num_read) - 1)
        is_inside = (i_last == i_seq) & (first + i_group - start >= WIDTH - 1)
        if is_inside & (i_group >= WIDTH - 1) & (i_group + GROUP <= num_own):
            b_window, b_dxs, b_sums, i_seq, start = _walk_group(
                b_xs, b_dys, b_window, b_dxs, b_taps, b_bias, p_dx, dfilter is not None,
                seq_idx, cu_seqlens, i_seq, start, initial_states, dfinal_states,
                first, i_group, num_own, num_read, stride_dx, dim, o_d, m_d,
                WIDTH, SILU, GROUP, False,
            )  # fmt: skip
        else:
            b_window, b_dxs, b_sums, i_seq, start = _walk_group(
                b_xs, b_dys, b_window, b_dxs, b_taps, b_bias, p_dx, dfilter is not None,
                seq_idx, cu_seqlens, i_seq, start, initial_states, dfinal_states,
                first, i_group, num_own, num_read, stride_dx, dim, o_d, m_d,
                WIDTH, SILU, GROUP, True,
            )  # fmt: skip
        p_x += GROUP * stride_x
        p_dy += GROUP * stride_dy
        if dy_fork is not None:
            p_dy_fork += GROUP * stride_dy_fork
        p_dx += GROUP * stride_dx
        if dfilter is not None:
            b_dfilter, b_rests = _add_all_compensated(b_dfilter, b_rests, b_sums, WIDTH + 1)

    if dfilter is not None:
        p_sum = dfilter + i_block.to(tl.int64) * (WIDTH + 1) * dim + o_d
        # as the filter has them, the oldest token's first
        for i in tl.static_range(WIDTH):
            tl.store(p_sum + (WIDTH - 1 - i) * dim, b_dfilter[i], mask=m_d)
        tl.store(p_sum + WIDTH * dim, b_dfilter[WIDTH], mask=m_d)


@triton.jit
def _walk_group(
    b_xs, b_dys, b_window, b_dxs, b_taps, b_bias, p_dx, WANTS_FILTER: tl.constexpr,
    seq_idx, cu_seqlens, i_seq, start, initial_states, dfinal_states,
    first, i_group, num_own, num_read, stride_dx: tl.constexpr, dim: tl.constexpr, o_d, m_d,
    WIDTH: tl.constexpr, SILU: tl.constexpr, GROUP: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Take in ``GROUP`` tokens and store the dx that they complete.

    ``EDGES`` asks at every token where documents and the program's own tokens begin and end.

    Returns the next token's window, the incomplete dx, the filter's gradient, and the last token's
    document with its start.
    """
    b_sums = _zeros(WIDTH + 1, b_bias.shape[0])
    for i in tl.static_range(GROUP):
        i_t = i_group + i
        if EDGES:
            i_next = tl.load(seq_idx + first + i_t, mask=i_t < num_read, other=i_seq)
            if i_next != i_seq:
                b_window = first_window(initial_states, i_next, dim, o_d, m_d, WIDTH)
                start = first + i_t
            i_seq = i_next
        b_inputs = (b_xs[i],) + b_window
        b_g = _before_activation(b_dys[i], b_inputs, b_taps, b_bias, SILU, WIDTH)
        if WANTS_FILTER:
            b_own = b_g
            if EDGES:
                # tokens after the block belong to the next program's sums
                b_own = tl.where(i_t < num_own, b_g, 0.0)
            b_sums = _add_filter_gradient(b_sums, b_own, b_inputs, WIDTH)
        b_dxs = _add_input_gradient(b_dxs, b_g, b_taps, first + i_t - start, WIDTH, EDGES)
        if dfinal_states is not None:
            b_dxs = _add_state_gradient(
                b_dxs, dfinal_states, cu_seqlens, i_seq, first + i_t, dim, o_d,
                m_d & (i_t < num_own), WIDTH,
            )  # fmt: skip
        m_done = m_d
        if EDGES:
            i_done = i_t - (WIDTH - 1)
            m_done = m_d & (i_done >= 0) & (i_done < num_own)
        tl.store(p_dx + (i - (WIDTH - 1)) * stride_dx, b_dxs[WIDTH - 1], mask=m_done)
        b_dxs = b_dxs[:-1]
        b_window = b_inputs[:-1]
    return b_window, b_dxs, b_sums, i_seq, start


@triton.jit
def _conv_bwd_states_kernel(
    x, weight, bias, initial_states, cu_seqlens, dy, dy_fork, dfinal_states, dinitial_states,
    stride_x, stride_dy, stride_dy_fork, dim,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(dim, BLOCK_D)
    o_d = tl.program_id(0) % num_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < dim
    i_seq = tl.program_id(0) // num_blocks
    start = tl.load(cu_seqlens + i_seq).to(tl.int64)
    end = tl.load(cu_seqlens + i_seq + 1).to(tl.int64)
    o_state = (i_seq.to(tl.int64) * dim + o_d) * (WIDTH - 1)

    b_taps, b_bias = load_filter(weight, bias, o_d, m_d, WIDTH)
    b_window = first_window(initial_states, i_seq, dim, o_d, m_d, WIDTH)
    # of the states' columns, the newest first
    b_dstates = ()
    for i in tl.static_range(WIDTH - 1):
        b_dstate = tl.zeros((BLOCK_D,), dtype=tl.float32)
        if dfinal_states is not None:
            # a document shorter than the window hands part of its initial state on
            i_column = WIDTH - 2 - i - (end - start)
            m_column = m_d & (i_column >= 0)
            b_dstate += tl.load(dfinal_states + o_state + i_column, mask=m_column, other=0.0)
        b_dstates = b_dstates + (b_dstate,)
    for i_t in tl.static_range(WIDTH - 1):
        m_t = m_d & (start + i_t < end)
        b_x = tl.load(x + (start + i_t) * stride_x + o_d, mask=m_t, other=0.0).to(tl.float32)
        b_dy = tl.load(dy + (start + i_t) * stride_dy + o_d, mask=m_t, other=0.0).to(tl.float32)
        if dy_fork is not None:
            p_dy_t = dy_fork + (start + i_t) * stride_dy_fork + o_d
            b_dy += tl.load(p_dy_t, mask=m_t, other=0.0).to(tl.float32)
        b_inputs = (b_x,) + b_window
        b_g = _before_activation(b_dy, b_inputs, b_taps, b_bias, SILU, WIDTH)
        b_added = ()
        for i in tl.static_range(WIDTH - 1):
            b_dstate = b_dstates[i]
            if i + i_t + 1 < WIDTH:
                b_dstate += tl.where(m_t, b_taps[i + i_t + 1] * b_g, 0.0)
            b_added = b_added + (b_dstate,)
        b_dstates = b_added
        b_window = b_inputs[:-1]
    for i in tl.static_range(WIDTH - 1):
        tl.store(dinitial_states + o_state + (WIDTH - 2 - i), b_dstates[i], mask=m_d)


@triton.jit
def _before_activation(b_dy, b_inputs, b_taps, b_bias, SILU: tl.constexpr, WIDTH: tl.constexpr):
    if SILU:
        b_y = convolve(b_inputs, b_taps, b_bias, WIDTH)
        b_gate = sigmoid(b_y)
        b_dy *= b_gate
        b_dy = tl.fma(b_dy, tl.fma(-b_y, b_gate, b_y), b_dy)
    return b_dy


@triton.jit
def _add_filter_gradient(b_sums, b_g, b_inputs, WIDTH: tl.constexpr):
    b_new = ()
    for i in tl.static_range(WIDTH):
        b_new = b_new + (b_sums[i] + b_g * b_inputs[i],)
    return b_new + (b_sums[WIDTH] + b_g,)


@triton.jit
def _add_input_gradient(b_dxs, b_g, b_taps, position, WIDTH: tl.constexpr, EDGES: tl.constexpr):
    """Return dx of a token and of the ``WIDTH - 1`` before, as far as this token adds to it.

    Multiply-adds are named as such, here and for g: left to the compiler, some would be rounded in
    another way where nobody asks for the filter's gradient.
    """
    b_new = (b_taps[0] * b_g,)
    for i in tl.static_range(1, WIDTH):
        b_dx = tl.fma(b_taps[i], b_g, b_dxs[i - 1])
        if EDGES:
            # chosen, not multiplied by 0: the token before may be another document's
            b_dx = tl.where(position >= i, b_dx, b_dxs[i - 1])
        b_new = b_new + (b_dx,)
    return b_new


@triton.jit
def _add_state_gradient(
    b_dxs, dfinal_states, cu_seqlens, i_seq, i_t, dim, o_d, m_d, WIDTH: tl.constexpr
):
    """Add what reaches a document's last ``WIDTH - 1`` tokens through its final state."""
    end = tl.load(cu_seqlens + i_seq + 1)
    i_column = WIDTH - 1 - (end - i_t)
    p_state = dfinal_states + (i_seq.to(tl.int64) * dim + o_d) * (WIDTH - 1) + i_column
    b_state = tl.load(p_state, mask=m_d & (i_column >= 0), other=0.0).to(tl.float32)
    return (b_dxs[0] + b_state,) + b_dxs[1:]


@triton.jit
def _add_all_compensated(b_sums, b_rests, b_vs, NUM: tl.constexpr):
    b_new_sums = ()
    b_new_rests = ()
    for i in tl.static_range(NUM):
        b_sum, b_rest = add_compensated(b_sums[i], b_rests[i], b_vs[i])
        b_new_sums = b_new_sums + (b_sum,)
        b_new_rests = b_new_rests + (b_rest,)
    return b_new_sums, b_new_rests


@triton.jit
def _zeros(NUM: tl.constexpr, BLOCK_D: tl.constexpr):
    b_zeros = ()
    for _ in tl.static_range(NUM):
        b_zeros = b_zeros + (tl.zeros((BLOCK_D,), dtype=tl.float32),)
    return b_zeros


# changes from step to step: a kernel for each of its divisors would be compiled in turn
@triton.jit(do_not_specialize=["num_parts"])
def _sum_filter_kernel(
    dfilter, dweight, dbias, num_parts,
    dim: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the filter's gradient over the parts; launched once where PyTorch would be thrice."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_k, o_d = o // dim, o % dim
    b_sum = sum_rows(dfilter + o, o_k <= WIDTH, num_parts, (WIDTH + 1) * dim, ROWS)
    if dweight is not None:
        tl.store(dweight + o_d * WIDTH + o_k, b_sum, mask=o_k < WIDTH)
    if dbias is not None:
        tl.store(dbias + o_d, b_sum, mask=o_k == WIDTH)


# that an H200 runs at once, 8 in each of 132 multiprocessors, four times over
_PROGRAMS = 4 * 1056


def tokens_of_a_program(total: int, num_blocks: int) -> int:
    """Return how many tokens to walk, in whole groups: few rows of sums, and few started twice."""
    share = cdiv(total * num_blocks, _PROGRAMS)
    return min(256, max(16, cdiv(share, GROUP) * GROUP))


def _conv_bwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor | None,
    cu_seqlens: Tensor, seq_idx: Tensor, activation: str | None,
    dy: Tensor, dy_fork: Tensor | None, dfinal_states: Tensor | None, dx: Tensor,
    dweight: Tensor | None, dbias: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Launch the backward: write dx, dweight and dbias, return dinitial_states.

    The gradient of the result is dy or, unrounded, the sum of dy and dy_fork.

    Temporary: the filter's gradient of every ``block_t`` tokens, in float32, summed in a fixed
    order: ``(total / block_t, width + 1, dim)``.
    """
    (total, dim), width, num_seqs = x.shape, weight.shape[1], len(cu_seqlens) - 1
    block_d, num_warps = 128, 2
    num_blocks = cdiv(dim, block_d)
    block_t = tokens_of_a_program(total, num_blocks)
    num_parts = cdiv(total, block_t)
    dfilter = dinitial_states = None
    if not (dweight is None and dbias is None):
        dfilter = torch.empty((num_parts, width + 1, dim), dtype=torch.float32, device=x.device)
    silu = activation == "silu"
    stride_dy_fork = 0 if dy_fork is None else dy_fork.stride(0)
    _conv_bwd_kernel[(num_blocks * num_parts,)](
        x, weight, bias, initial_states, cu_seqlens, seq_idx, dy, dy_fork, dfinal_states, dx,
        dfilter, total, block_t,
        stride_x=x.stride(0), stride_dy=dy.stride(0), stride_dy_fork=stride_dy_fork,
        stride_dx=dx.stride(0), dim=dim,
        WIDTH=width, SILU=silu, BLOCK_D=block_d, GROUP=GROUP, num_warps=num_warps,
    )  # fmt: skip
    if dfilter is not None:
        _sum_filter_kernel[(cdiv((width + 1) * dim, 32),)](
            dfilter, dweight, dbias, num_parts,
            dim=dim, WIDTH=width, ROWS=32, BLOCK=32, num_warps=1,
        )  # fmt: skip
    if initial_states is not None:
        dinitial_states = torch.empty_like(initial_states)
        _conv_bwd_states_kernel[(num_blocks * num_seqs,)](
            x, weight, bias, initial_states, cu_seqlens, dy, dy_fork, dfinal_states,
            dinitial_states, x.stride(0), dy.stride(0), stride_dy_fork, dim,
            WIDTH=width, SILU=silu, BLOCK_D=block_d, num_warps=num_warps,
        )  # fmt: skip
    return dinitial_states
