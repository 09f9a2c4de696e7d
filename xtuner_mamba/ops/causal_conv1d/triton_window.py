"""The inputs that a token's taps read, kept in registers while a kernel walks along the row.

A window is a tuple of the ``WIDTH - 1`` inputs before a token, the newest first. Where it would
reach back over the document's first token it holds the initial state, or zero.
"""
# ruff: noqa: RUF005
# Triton knows no starred tuples

import triton
import triton.language as tl


@triton.jit
def load_filter(weight, bias, o_d, m_d, WIDTH: tl.constexpr):
    """Return the taps, the newest token's first, and the bias."""
    b_taps = ()
    for i in tl.static_range(WIDTH):
        p_tap = weight + o_d * WIDTH + (WIDTH - 1 - i)
        b_taps = b_taps + (tl.load(p_tap, mask=m_d, other=0.0).to(tl.float32),)
    b_bias = tl.zeros(o_d.shape, dtype=tl.float32)
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    return b_taps, b_bias


@triton.jit
def first_window(initial_states, i_seq, dim, o_d, m_d, WIDTH: tl.constexpr):
    """Return the window of the first token of document ``i_seq``."""
    b_window = ()
    for i in tl.static_range(WIDTH - 1):
        b_x = tl.zeros(o_d.shape, dtype=tl.float32)
        if initial_states is not None:
            p_x = initial_states + (i_seq.to(tl.int64) * dim + o_d) * (WIDTH - 1) + (WIDTH - 2 - i)
            b_x = tl.load(p_x, mask=m_d, other=0.0).to(tl.float32)
        b_window = b_window + (b_x,)
    return b_window


@triton.jit
def load_window(
    x, initial_states, cu_seqlens, i_seq, i_t, stride_x, dim, o_d, m_d, WIDTH: tl.constexpr
):
    """Return the window of token ``i_t`` of document ``i_seq``."""
    position = (i_t - tl.load(cu_seqlens + i_seq)).to(tl.int32)
    p_x = x + i_t.to(tl.int64) * stride_x + o_d
    b_window = ()
    for i in tl.static_range(WIDTH - 1):
        m_inside = i < position
        b_x = tl.load(p_x - (i + 1) * stride_x, mask=m_d & m_inside, other=0.0).to(tl.float32)
        if initial_states is not None:
            # the state's last column is the input just before the document
            p_state = initial_states + (i_seq.to(tl.int64) * dim + o_d) * (WIDTH - 1)
            p_state += WIDTH - 2 - i + position
            b_state = tl.load(p_state, mask=m_d & (i >= position), other=0.0).to(tl.float32)
            b_x = tl.where(m_inside, b_x, b_state)
        b_window = b_window + (b_x,)
    return b_window


@triton.jit
def convolve(b_inputs, b_taps, b_bias, WIDTH: tl.constexpr):
    """Return the filter's answer to a token and its window, before the activation."""
    b_y = b_bias
    for i in tl.static_range(WIDTH - 1, -1, -1):
        b_y += b_taps[i] * b_inputs[i]
    return b_y
