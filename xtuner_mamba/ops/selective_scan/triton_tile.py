"""Operations on a state tile ``(dstate, dim)``, its channels along the lanes of a warp.

A thread owns all states of its channels: a sum over states stays in its registers, one over
channels goes through the lanes.
"""

import triton
import triton.language as tl

from xtuner_mamba.ops.triton_math import LOG2_E


@triton.jit
def next_state(b_h, b_A, b_dt, b_x, b_B):
    """Return the state ``(dstate, dim)`` after a token."""
    return decay(b_A, b_dt) * b_h + (b_dt * b_x)[None, :] * b_B[:, None]


@triton.jit
def decay(b_A, b_dt):
    """Return exp(dt A)."""
    # log2(e) goes with dt: its rounding in A would be the same at every token, and add up
    return tl.exp2((b_dt * LOG2_E)[None, :] * b_A)


@triton.jit
def sum_states(b_v):
    """Sum a tile ``(dstate, dim)`` over the states, in four chains: half the rounding of one."""
    N: tl.constexpr = b_v.shape[0]
    CHAINS: tl.constexpr = min(N, 4)
    b_v = tl.reshape(b_v, (N // CHAINS, CHAINS, b_v.shape[1]))
    return tl.sum(tl.sum(b_v, 0), 0)


@triton.jit
def sum_channels(b_v):
    """Sum ``(BLOCK_N, BLOCK_D)`` over every 32 channels, the lanes of a warp.

    Lanes end up with the sums of different states. A lane hands half of its values to the lane
    whose number differs in one bit, takes that lane's values of the other half, and adds::

        lane 0: a0 b0   ->   a0 + a1
        lane 1: a1 b1   ->   b0 + b1

    then goes on with the next bit. That costs 15 exchanges for 16 states; to sum every state on
    its own would cost 80. :func:`channel_sum_offsets` says which lane holds which state.
    """
    b_v = tl.reshape(b_v, (b_v.shape[0], b_v.shape[1] // 32, 32))
    LANES: tl.constexpr = min(b_v.shape[0], 32)
    for i in tl.static_range(1, 6):
        b_v = _exchange_lanes(b_v, LANES >> i)
    # with fewer states than lanes the remaining lanes hold further terms of the same sums
    for i in tl.static_range(5):
        b_v = _add_lanes(b_v, LANES << i)
    return b_v


@triton.jit
def channel_sum_offsets(
    i_block, total, dim, DSTATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Return where sums lie in a row of ``(dim / 32, total, 2 dstate)``, and which to store."""
    LANES: tl.constexpr = min(BLOCK_N, 32)
    o_row = i_block * (BLOCK_D // 32) + tl.arange(0, BLOCK_D // 32)
    o_lane = tl.arange(0, 32)
    o_n = tl.arange(0, BLOCK_N // LANES)[:, None, None]
    o_n += (o_lane % LANES * (BLOCK_N // LANES))[None, None, :]
    m_n = (o_n < DSTATE) & (o_lane < LANES)[None, None, :] & (o_row * 32 < dim)[None, :, None]
    return o_row.to(tl.int64)[None, :, None] * total * 2 * DSTATE + o_n, m_n


@triton.jit
def _exchange_lanes(b_v, BIT: tl.constexpr):
    if BIT == 0:
        b_sum = b_v
    else:
        N: tl.constexpr = b_v.shape[0] // 2
        W: tl.constexpr = b_v.shape[1]
        b_low, b_high = tl.split(tl.permute(tl.reshape(b_v, (2, N, W, 32)), (1, 2, 3, 0)))
        i_lane = tl.broadcast_to(tl.arange(0, 32)[None, None, :], (N, W, 32))
        m_low = (i_lane & BIT) == 0
        b_taken = tl.gather(tl.where(m_low, b_high, b_low), i_lane ^ BIT, 2)
        b_sum = tl.where(m_low, b_low, b_high) + b_taken
    return b_sum


@triton.jit
def _add_lanes(b_v, BIT: tl.constexpr):
    if BIT >= 32:
        b_sum = b_v
    else:
        i_lane = tl.broadcast_to(tl.arange(0, 32)[None, None, :], b_v.shape)
        b_sum = b_v + tl.gather(b_v, i_lane ^ BIT, 2)
    return b_sum
