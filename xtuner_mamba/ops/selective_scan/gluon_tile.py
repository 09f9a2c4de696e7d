"""Layouts, staging and arithmetic that the Gluon kernels share.

A tile is ``(16, warps, parts, channels)``: a thread owns all 16 states of one or two channels, so
that a sum over states stays in its registers. The channels of a warp are cut into parts; lanes of
part ``i`` hold state ``n ^ 4 i`` where the tile says ``n``. With four parts :func:`sum_channels`
finds what a lane keeps and what it hands over in fixed registers.

Tokens come through rings in shared memory that ``cp.async`` fills a tile of tokens ahead: plain
loads would be moved next to their use by the assembler, and wait there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

DSTATE = gl.constexpr(16)
LANES = gl.constexpr(32)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)

# Triton 3.6 and 3.7 know the barrier by its first name
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.constexpr_function
def tile_layout(WARPS, PARTS, CHANNELS):
    """Return the layout of a tile ``(16, WARPS, PARTS, 32 CHANNELS / PARTS)``."""
    return gl.BlockedLayout(
        [16, 1, 1, CHANNELS], [1, 1, PARTS, 32 // PARTS], [1, WARPS, 1, 1], [3, 2, 1, 0]
    )


@gluon.constexpr_function
def ring_layout(RANK):
    """Return the layout of one slot of a ring, of ``RANK`` dimensions."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(RANK))[::-1])


@gluon.jit
def tile_offsets(
    TILE: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, CHANNELS: gl.constexpr
):
    """Return the states ``(16, 1, parts, 1)`` and the channels ``(warps, parts, channels)``."""
    PART: gl.constexpr = LANES * CHANNELS // PARTS
    ROW: gl.constexpr = gl.SliceLayout(0, TILE)
    FLAT: gl.constexpr = gl.SliceLayout(3, TILE)
    o_n = gl.arange(0, DSTATE, layout=gl.SliceLayout(1, gl.SliceLayout(2, FLAT)))
    o_n = gl.expand_dims(gl.expand_dims(gl.expand_dims(o_n, 1), 2), 3)
    i_part_n = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(1, FLAT)))
    i_part_n = gl.expand_dims(gl.expand_dims(gl.expand_dims(i_part_n, 0), 1), 3)

    i_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROW)))
    i_part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROW)))
    o_d = gl.arange(0, PART, layout=gl.SliceLayout(0, gl.SliceLayout(1, ROW)))
    o_d = gl.expand_dims(gl.expand_dims(o_d, 0), 1)
    o_d += gl.expand_dims(gl.expand_dims(i_part, 0), 2) * PART
    o_d += gl.expand_dims(gl.expand_dims(i_warp, 1), 2) * (LANES * CHANNELS)
    # so written that the compiler sees what differs by a constant
    return o_n % 4 + (o_n // 4 ^ i_part_n) * 4, o_d


@gluon.jit
def stage_rows(
    ring,
    i_slot,
    p_rows,
    stride,
    num_rows,
    TOKENS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Copy the first ``num_rows`` rows of 16-bit channels into a slot, 16 bytes at a time."""
    o = gl.arange(0, TOKENS * BLOCK_D, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    o_t = o // BLOCK_D
    async_copy.async_copy_global_to_shared(
        ring.index(i_slot), p_rows + (o_t * stride + o % BLOCK_D), mask=o_t < num_rows
    )


@gluon.jit
def stage_weights(
    ring, i_slot, p_rows, num_rows, TOKENS: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr
):
    """Copy rows of B or C into a slot, once for every part, in the order of the part's states."""
    o = gl.arange(0, TOKENS * PARTS * 16, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
    o_t = o // (PARTS * 16)
    # a part's order moves groups of four states as a whole
    o_n = ((o // 4 % 4) ^ (o // 16 % PARTS)) * 4 + o % 4
    async_copy.async_copy_global_to_shared(
        ring.index(i_slot), p_rows + (o_t * 32 + o_n), mask=o_t < num_rows
    )


@gluon.jit
def stage_states(
    ring,
    i_slot,
    p_states,
    stride: gl.constexpr,
    first,
    end,
    GROUPS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Copy the states ``(16, BLOCK_D)`` before groups ``first`` to ``end`` into a slot.

    Those of two groups begin ``stride`` numbers apart.
    """
    o = gl.arange(0, GROUPS * 16 * BLOCK_D, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
    i_group = o // (16 * BLOCK_D)
    async_copy.async_copy_global_to_shared(
        ring.index(i_slot),
        p_states + (i_group * stride + o % (16 * BLOCK_D)),
        mask=(i_group >= first) & (i_group < end),
    )


@gluon.jit
def read_channels(rows, i_row, TILE: gl.constexpr):
    """Read a row ``(warps, turns, channels)`` from a ring, as float32."""
    return rows.index(i_row).load(gl.SliceLayout(0, TILE)).to(gl.float32)


@gluon.jit
def read_states(rows, i_row, TILE: gl.constexpr):
    """Read B or C of a token from a ring, ``(16, 1, turns, 1)``."""
    b_n = rows.index(i_row).permute((1, 0)).load(gl.SliceLayout(1, gl.SliceLayout(3, TILE)))
    return gl.expand_dims(gl.expand_dims(b_n, 1), 3)


@gluon.jit
def load_states(states, i_seq, o_h, dim: gl.constexpr):
    """Load the states of a document, zeros if there are none for any."""
    b_h = gl.full(o_h.shape, 0.0, gl.float32, layout=o_h.type.layout)
    if states is not None:
        b_h = gl.load(states + i_seq.to(gl.int64) * 16 * dim + o_h).to(gl.float32)
    return b_h


@gluon.jit
def cross_boundary(
    b_h, i_seq, is_boundary, STEP: gl.constexpr, ends, starts, o_h, dim: gl.constexpr
):
    """Between two documents store what one ends with and load what the next one starts from.

    A branch: what one ends with, be it NaN, must not meet the next one in any sum or product.
    """
    if is_boundary:
        if ends is not None:
            gl.store(ends + i_seq.to(gl.int64) * 16 * dim + o_h, b_h)
        i_seq += STEP
        b_h = load_states(starts, i_seq, o_h, dim)
    return b_h, i_seq


@gluon.jit
def sum_states(b_v):
    """Sum a tile over its states, in four chains: half the rounding of one."""
    ROW: gl.constexpr = gl.SliceLayout(0, b_v.type.layout)
    b_v = gl.reshape(b_v, (4, 4, b_v.shape[1], b_v.shape[2], b_v.shape[3]))
    return gl.convert_layout(gl.sum(gl.sum(b_v, 0), 0), ROW, assert_trivial=True)


@gluon.jit
def exp2(b_v):
    """Return 2^v from the special-function unit."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_v], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(b_v):
    """Return 1 / v from the special-function unit."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_v], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def sigmoid(b_v):
    """Return 1 / (1 + exp(-v))."""
    return reciprocal(1.0 + exp2(b_v * -LOG2_E))


@gluon.jit
def step_size(b_v, SOFTPLUS: gl.constexpr):
    """Return the step size that v stands for, over ln 2, and what its slope is made of."""
    b_w = b_v * LOG2_E
    b_exp = b_w
    b_step = b_w
    if SOFTPLUS:
        # a hardware logarithm of 1 + exp(v) would keep half of the digits of a small step
        b_exp = exp2(-gl.abs(b_w))
        # log2(1 + e) / e on [0, 1], so fitted that the logarithm is good to 3e-8
        b_log = -0.042566992342472076 + b_exp * 0.007549165282398462
        b_log = 0.11285607516765594 + b_exp * b_log
        b_log = -0.1971188634634018 + b_exp * b_log
        b_log = 0.2756413519382477 + b_exp * b_log
        b_log = -0.35840845108032227 + b_exp * b_log
        b_log = 0.48069295287132263 + b_exp * b_log
        b_log = -0.7213401794433594 + b_exp * b_log
        b_log = 1.4426950216293335 + b_exp * b_log
        b_step = gl.maximum(b_w, 0.0) + b_exp * b_log
    return b_step, b_exp


@gluon.jit
def step_slope(b_v, b_exp, SOFTPLUS: gl.constexpr):
    """Return the derivative of the step size in v."""
    b_slope = gl.full(b_v.shape, 1.0, gl.float32, layout=b_v.type.layout)
    if SOFTPLUS:
        b_slope = gl.where(b_v > 0, b_slope, b_exp) * reciprocal(1.0 + b_exp)
    return b_slope


@gluon.jit
def sum_channels(b_v, WARPS: gl.constexpr):
    """Sum a tile ``(16, warps, 4, channels)`` over a warp's channels, up to two neighbour lanes.

    Lanes end up with different states: a lane hands half of its values to the lane whose number
    differs in one bit, and adds that lane's other half to its own. Lanes 2 n and 2 n + 1 end up
    with two halves of the sum of state n.

    Returns:
        ``(warps * 32,)``, a number for every lane.
    """
    if b_v.shape[3] == 16:
        b_v, b_w = gl.split(gl.reshape(b_v, (16, WARPS, 4, 8, 2)))
        b_v += b_w
    # these lanes hold the states in an order in which the same registers are to be kept
    b_v, b_w = _halves(b_v, WARPS)
    b_v += _from_lane(b_w, "shfl.sync.bfly.b32 $0, $1, 16, 31, -1;")
    b_v, b_w = _halves(b_v, WARPS)
    b_v += _from_lane(b_w, "shfl.sync.bfly.b32 $0, $1, 8, 31, -1;")
    b_v, b_w = _halves(b_v, WARPS)
    b_v = _exchange(b_v, b_w, 4)
    b_v, b_w = _halves(b_v, WARPS)
    b_v = _exchange(b_v, b_w, 2)
    return gl.reshape(b_v, (WARPS * 32,))


@gluon.jit
def stack(b_rows, N: gl.constexpr):
    """Lay 4 or 8 rows of the same shape ``(n,)`` on top of each other."""
    if N == 4:
        b_rows = gl.join(gl.join(b_rows[0], b_rows[2]), gl.join(b_rows[1], b_rows[3]))
        b_rows = gl.permute(b_rows, (1, 2, 0))
    else:
        b_even = gl.join(gl.join(b_rows[0], b_rows[4]), gl.join(b_rows[2], b_rows[6]))
        b_odd = gl.join(gl.join(b_rows[1], b_rows[5]), gl.join(b_rows[3], b_rows[7]))
        b_rows = gl.permute(gl.join(b_even, b_odd), (1, 2, 3, 0))
    return gl.reshape(b_rows, (N, b_rows.shape[-1]))


@gluon.jit
def _halves(b_v, WARPS: gl.constexpr):
    b_v = gl.reshape(b_v, (2, b_v.shape[0] // 2, WARPS, 4, 8))
    return gl.split(gl.permute(b_v, (1, 2, 3, 4, 0)))


@gluon.jit
def _from_lane(b_v, SHUFFLE: gl.constexpr):
    return gl.inline_asm_elementwise(SHUFFLE, "=f,f", [b_v], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _exchange(b_low, b_high, BIT: gl.constexpr):
    """Keep the upper values in lanes with the bit set, the lower in others; add the partner's."""
    if BIT == 4:
        b_sum = gl.inline_asm_elementwise(
            _exchange_asm(4), "=f,f,f", [b_low, b_high], dtype=gl.float32, is_pure=True, pack=1
        )
    else:
        b_sum = gl.inline_asm_elementwise(
            _exchange_asm(2), "=f,f,f", [b_low, b_high], dtype=gl.float32, is_pure=True, pack=1
        )
    return b_sum


@gluon.constexpr_function
def _exchange_asm(bit):
    return (
        "{ .reg .b32 lane; .reg .pred upper; .reg .f32 kept, given, taken;"
        f" mov.u32 lane, %laneid; and.b32 lane, lane, {bit}; setp.ne.u32 upper, lane, 0;"
        " selp.f32 kept, $2, $1, upper; selp.f32 given, $1, $2, upper;"
        f" shfl.sync.bfly.b32 taken, given, {bit}, 31, -1; add.f32 $0, kept, taken; }}"
    )


@gluon.jit
def store_sums(sums, p_rows, num_rows, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Add the sums of all warps that :func:`sum_channels` left for a tile of tokens; store them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, WARPS, 1, 2], [2, 1, 16, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]
    )
    TERMS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    terms = sums._reinterpret(gl.float32, [TOKENS, WARPS, 16, 2], ring_layout(4))
    b_sum = gl.sum(gl.sum(terms.load(LAYOUT), 3), 1)
    o_t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, TERMS)), 1)
    o_n = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, TERMS)), 0)
    gl.store(p_rows + (o_t * 32 + o_n), b_sum, mask=(o_t < num_rows) & (o_n < 16))
