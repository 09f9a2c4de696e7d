"""Selective scan over packed documents: the backward's pass over the states, in Gluon.

With g the gradient at the ungated output, this kernel runs h through a document once more and
leaves dz, dC, dD, the half of dA that needs h, and for every token

    e[t] = sum_n A g[t] C[t] h[t]

to the pass over the adjoints (``gluon_bwd_adjoints.py``), which explains what becomes of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from xtuner_mamba.ops.selective_scan.gluon_tile import (
    LN_2,
    barrier,
    exp2,
    read_channels,
    read_states,
    ring_layout,
    sigmoid,
    split_bits,
    stack,
    stage_rows,
    stage_weights,
    step_size,
    store_sums,
    sum_channels,
    sum_states,
    tile_layout,
    tile_offsets,
)


# these change from step to step: a kernel for each of their divisors would be compiled in turn
@gluon.jit(do_not_specialize=["total", "num_seqs", "num_groups"])
def _scan_bwd_states_kernel(
    x, dt, A, BC, D, z, dt_bias, initial_states, cu_seqlens, order, dy,
    dz, e_high, e_low, anchors, last_times, dBC, dA, dD,
    stride_x, stride_dt, stride_z, stride_dy, dim, width, total, num_seqs, num_groups,
    SOFTPLUS: gl.constexpr, INTERVAL: gl.constexpr, TOKENS: gl.constexpr, UNROLL: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    BLOCK_D: gl.constexpr = 64 * WARPS
    TILE: gl.constexpr = tile_layout(WARPS, 4)
    ROW: gl.constexpr = gl.SliceLayout(0, TILE)
    RING: gl.constexpr = ring_layout(1)
    HALF: gl.constexpr = x.dtype.element_ty
    num_blocks = width // BLOCK_D
    i_group = gl.program_id(0) // num_blocks
    i_block = gl.program_id(0) % num_blocks
    o_block = i_block * BLOCK_D

    ring_x = gl.allocate_shared_memory(HALF, [2, TOKENS * BLOCK_D], RING)
    ring_dt = gl.allocate_shared_memory(dt.dtype.element_ty, [2, TOKENS * BLOCK_D], RING)
    ring_dy = gl.allocate_shared_memory(HALF, [2, TOKENS * BLOCK_D], RING)
    ring_B = gl.allocate_shared_memory(gl.float32, [2, TOKENS * 64], RING)
    ring_C = gl.allocate_shared_memory(gl.float32, [2, TOKENS * 64], RING)
    x_rows = ring_x._reinterpret(HALF, [2 * TOKENS, WARPS, 4, 16], ring_layout(3))
    dt_rows = ring_dt._reinterpret(dt.dtype.element_ty, [2 * TOKENS, WARPS, 4, 16], ring_layout(3))
    dy_rows = ring_dy._reinterpret(HALF, [2 * TOKENS, WARPS, 4, 16], ring_layout(3))
    B_rows = ring_B._reinterpret(gl.float32, [2 * TOKENS, 4, 16], ring_layout(2))
    C_rows = ring_C._reinterpret(gl.float32, [2 * TOKENS, 4, 16], ring_layout(2))
    sums = gl.allocate_shared_memory(gl.float32, [TOKENS, WARPS * 32], RING)
    stacked_sums = sums._reinterpret(gl.float32, [TOKENS // UNROLL, UNROLL, WARPS * 32], ring_layout(2))
    ring_z = ring_x
    z_rows = x_rows
    if z is not None:
        ring_z = gl.allocate_shared_memory(z.dtype.element_ty, [2, TOKENS * BLOCK_D], RING)
        z_rows = ring_z._reinterpret(z.dtype.element_ty, [2 * TOKENS, WARPS, 4, 16], ring_layout(3))

    o_n, o_d = tile_offsets(TILE, WARPS, 4)
    o_d += o_block
    o_h = o_n * dim + gl.expand_dims(o_d, 0)
    o_scratch = o_n * width + gl.expand_dims(o_d, 0)
    b_A = gl.load(A + o_h)
    b_D = gl.zeros([WARPS, 4, 16], gl.float32, layout=ROW)
    if D is not None:
        b_D = gl.load(D + o_d).to(gl.float32)
    b_bias = gl.zeros([WARPS, 4, 16], gl.float32, layout=ROW)
    if dt_bias is not None:
        b_bias = gl.load(dt_bias + o_d).to(gl.float32)
    p_dA = dA + i_group.to(gl.int64) * 16 * width + o_scratch
    gl.store(p_dA, gl.zeros([16, WARPS, 4, 16], gl.float32, layout=TILE))
    b_dD = gl.zeros([WARPS, 4, 16], gl.float32, layout=ROW)

    for i_order in range(i_group, num_seqs, num_groups):
        i_seq = gl.load(order + i_order).to(gl.int64)
        start = gl.load(cu_seqlens + i_seq).to(gl.int64)
        seqlen = gl.load(cu_seqlens + i_seq + 1) - start.to(gl.int32)
        p_x = x + start * stride_x + o_block
        p_dt = dt + start * stride_dt + o_block
        p_dy = dy + start * stride_dy + o_block
        p_BC = BC + start * 32
        p_z = z
        if z is not None:
            p_z = z + start * stride_z + o_block
        # the document before: other warps may still read its last tiles, and copies of no rows at
        # its end still write zeros
        async_copy.wait_group(0)
        barrier()
        for i_tile in range(2):
            _stage(
                ring_x, ring_dt, ring_z, ring_dy, ring_B, ring_C, i_tile, p_x, p_dt, p_z, p_dy, p_BC,
                stride_x, stride_dt, stride_z, stride_dy, seqlen - i_tile * TOKENS, TOKENS, BLOCK_D, WARPS,
            )  # fmt: skip
            p_x += TOKENS * stride_x
            p_dt += TOKENS * stride_dt
            p_dy += TOKENS * stride_dy
            p_BC += TOKENS * 32
            if z is not None:
                p_z += TOKENS * stride_z

        b_h = gl.zeros([16, WARPS, 4, 16], gl.float32, layout=TILE)
        if initial_states is not None:
            b_h = gl.load(initial_states + i_seq * 16 * dim + o_h).to(gl.float32)
        b_dA = gl.zeros([16, WARPS, 4, 16], gl.float32, layout=TILE)
        # time runs from -center to center in an interval: half as far from 0, half the rounding
        b_first = gl.load(dt + start * stride_dt + o_d).to(gl.float32)
        b_center = step_size(b_first + b_bias, SOFTPLUS)[0]
        b_center *= 0.5 * gl.minimum(seqlen, INTERVAL).to(gl.float32)
        b_time = -b_center
        o_t = start * dim + o_d
        p_dBC = dBC + (i_block * total + start) * 32 + 16
        for i_tile in range(0, gl.cdiv(seqlen, TOKENS)):
            first = i_tile * TOKENS
            if (first > 0) & (first % INTERVAL == 0):
                p_anchor = anchors + (start // INTERVAL + first // INTERVAL - 1) * 17 * width
                gl.store(p_anchor + o_scratch, b_h)
                gl.store(p_anchor + 16 * width + o_d, b_time)
                b_center = 0.5 * (b_time + b_center)
                b_time = -b_center
                gl.store(p_dA, gl.load(p_dA) + b_dA * LN_2)
                b_dA = gl.zeros([16, WARPS, 4, 16], gl.float32, layout=TILE)
            async_copy.wait_group(1)
            barrier()
            i_row = i_tile % 2 * TOKENS
            i_sum = 0
            num_tokens = gl.minimum(seqlen - first, TOKENS)
            b_dD_tile = gl.zeros([WARPS, 4, 16], gl.float32, layout=ROW)
            for _ in range(0, num_tokens // UNROLL):
                b_sums = ()
                for i in gl.static_range(UNROLL):
                    b_h, b_dA, b_time, b_dD_tile, b_sum = _step(
                        b_h, b_dA, b_time, b_dD_tile, b_A, b_D, b_bias,
                        x_rows, dt_rows, z_rows, dy_rows, B_rows, C_rows, i_row + i,
                        dz, e_high, e_low, o_t + i * dim, SOFTPLUS, TILE, WARPS,
                    )  # fmt: skip
                    b_sums = b_sums + (b_sum,)
                # one store, since each to the same buffer waits for all warps
                stacked_sums.index(i_sum // UNROLL).store(stack(b_sums, UNROLL))
                i_row += UNROLL
                i_sum += UNROLL
                o_t += UNROLL * dim
            for _ in range(0, num_tokens % UNROLL):
                b_h, b_dA, b_time, b_dD_tile, b_sum = _step(
                    b_h, b_dA, b_time, b_dD_tile, b_A, b_D, b_bias,
                    x_rows, dt_rows, z_rows, dy_rows, B_rows, C_rows, i_row,
                    dz, e_high, e_low, o_t, SOFTPLUS, TILE, WARPS,
                )  # fmt: skip
                sums.index(i_sum).store(b_sum)
                i_row += 1
                i_sum += 1
                o_t += dim
            b_dD += b_dD_tile
            barrier()
            store_sums(sums, p_dBC, num_tokens, TOKENS, WARPS)
            p_dBC += TOKENS * 32
            _stage(
                ring_x, ring_dt, ring_z, ring_dy, ring_B, ring_C, i_tile % 2, p_x, p_dt, p_z, p_dy, p_BC,
                stride_x, stride_dt, stride_z, stride_dy, seqlen - first - 2 * TOKENS, TOKENS, BLOCK_D, WARPS,
            )  # fmt: skip
            p_x += TOKENS * stride_x
            p_dt += TOKENS * stride_dt
            p_dy += TOKENS * stride_dy
            p_BC += TOKENS * 32
            if z is not None:
                p_z += TOKENS * stride_z
        gl.store(last_times + i_seq * width + o_d, b_time)
        gl.store(p_dA, gl.load(p_dA) + b_dA * LN_2)
    if dD is not None:
        gl.store(dD + i_group.to(gl.int64) * width + o_d, b_dD)


@gluon.jit
def _stage(
    ring_x, ring_dt, ring_z, ring_dy, ring_B, ring_C, i_slot, p_x, p_dt, p_z, p_dy, p_BC,
    stride_x, stride_dt, stride_z, stride_dy, num_rows,
    TOKENS: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start the copies of a tile of tokens."""
    stage_rows(ring_x, i_slot, p_x, stride_x, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_rows(ring_dt, i_slot, p_dt, stride_dt, num_rows, TOKENS, BLOCK_D, WARPS)
    if p_z is not None:
        stage_rows(ring_z, i_slot, p_z, stride_z, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_rows(ring_dy, i_slot, p_dy, stride_dy, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_weights(ring_B, i_slot, p_BC, num_rows, TOKENS, 4, WARPS)
    stage_weights(ring_C, i_slot, p_BC + 16, num_rows, TOKENS, 4, WARPS)
    async_copy.commit_group()


@gluon.jit
def _step(
    b_h, b_dA, b_time, b_dD, b_A, b_D, b_bias,
    x_rows, dt_rows, z_rows, dy_rows, B_rows, C_rows, i_row, dz, e_high, e_low, o_t,
    SOFTPLUS: gl.constexpr, TILE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Run h, dA, the time and dD through a token; store dz and e; add up dC."""
    b_x = read_channels(x_rows, i_row, TILE)
    b_dt = step_size(read_channels(dt_rows, i_row, TILE) + b_bias, SOFTPLUS)[0]
    b_g = read_channels(dy_rows, i_row, TILE)
    b_u = b_dt * LN_2 * b_x
    b_time += b_dt
    b_decay = exp2(gl.expand_dims(b_dt, 0) * b_A)
    b_h = b_decay * b_h + gl.expand_dims(b_u, 0) * read_states(B_rows, i_row, TILE)
    b_w = b_h * read_states(C_rows, i_row, TILE)
    if dz is not None:
        b_z = read_channels(z_rows, i_row, TILE)
        b_gate = sigmoid(b_z)
        b_y = sum_states(b_w) + b_D * b_x
        b_dz = b_g * b_y * (b_gate + b_z * b_gate * (1.0 - b_gate))
        gl.store(dz + o_t, b_dz.to(dz.dtype.element_ty))
        b_g *= b_z * b_gate
    b_high, b_low = split_bits(b_g * sum_states(b_w * b_A))
    gl.store(e_high + o_t, b_high)
    gl.store(e_low + o_t, b_low)
    b_dA += gl.expand_dims(b_time * b_g, 0) * b_w
    b_dD += b_g * b_x
    b_sum = sum_channels(b_h * gl.expand_dims(b_g, 0), WARPS)
    return b_h, b_dA, b_time, b_dD, b_sum
