"""Selective scan over packed documents: the backward's pass over the adjoints, in Gluon.

With g[t] the gradient at the ungated output, u[t] = dt[t] x[t] and dh[t] the gradient at h[t],

    dh[t] = C[t] g[t] + c[t + 1]          c[t] = exp(dt[t] A) dh[t]
    ddt[t] = sum_n A q[t] + x[t] sum_n B[t] dh[t]          dA = sum_t dt[t] q[t]

where q[t] = c[t] h[t - 1] seems to need h and dh at once, from opposite ends of a document. But

    q[t] - q[t + 1] = g[t] C[t] h[t] - u[t] B[t] dh[t]

has a term of h and a term of dh, and both gradients need sums of q only. So each pass sums its own
terms: ``sum_n A q[t]`` is a running sum of ``e[t] - u[t] sum_n A B[t] dh[t]``, and by parts

    sum_t dt[t] q[t] = sum_t T[t] (q[t] - q[t + 1]) + T[end] q[end + 1] - T[before] q[first]

with T[t] the time, the sum of dt up to t. The two sums over a long stretch are far larger than
their difference; hence anchors, tokens for which the first pass left h, so that q is known there
and sums and time start anew.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from xtuner_mamba.ops.selective_scan.gluon_tile import (
    LN_2,
    barrier,
    exp2,
    join_bits,
    read_channels,
    read_states,
    ring_layout,
    sigmoid,
    stack,
    stage_rows,
    stage_weights,
    step_size,
    step_slope,
    store_sums,
    sum_channels,
    sum_states,
    tile_layout,
    tile_offsets,
)


# these change from step to step: a kernel for each of their divisors would be compiled in turn
@gluon.jit(do_not_specialize=["total", "num_seqs", "num_groups"])
def _scan_bwd_adjoints_kernel(
    x, dt, A, BC, D, z, dt_bias, initial_states, cu_seqlens, order, dy, final_states, dfinal_states,
    e_high, e_low, anchors, last_times, dx, ddt, dBC, dA, ddt_bias, dinitial_states,
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
    ring_high = gl.allocate_shared_memory(gl.int16, [2, TOKENS * BLOCK_D], RING)
    ring_low = gl.allocate_shared_memory(gl.int16, [2, TOKENS * BLOCK_D], RING)
    ring_B = gl.allocate_shared_memory(gl.float32, [2, TOKENS * 64], RING)
    ring_C = gl.allocate_shared_memory(gl.float32, [2, TOKENS * 64], RING)
    x_rows = ring_x._reinterpret(HALF, [2 * TOKENS, WARPS, 4, 16], ring_layout(3))
    dt_rows = ring_dt._reinterpret(dt.dtype.element_ty, [2 * TOKENS, WARPS, 4, 16], ring_layout(3))
    dy_rows = ring_dy._reinterpret(HALF, [2 * TOKENS, WARPS, 4, 16], ring_layout(3))
    high_rows = ring_high._reinterpret(gl.int16, [2 * TOKENS, WARPS, 4, 16], ring_layout(3))
    low_rows = ring_low._reinterpret(gl.int16, [2 * TOKENS, WARPS, 4, 16], ring_layout(3))
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
    b_dbias = gl.zeros([WARPS, 4, 16], gl.float32, layout=ROW)

    for i_order in range(i_group, num_seqs, num_groups):
        i_seq = gl.load(order + i_order).to(gl.int64)
        start = gl.load(cu_seqlens + i_seq).to(gl.int64)
        seqlen = gl.load(cu_seqlens + i_seq + 1) - start.to(gl.int32)
        num_tiles = gl.cdiv(seqlen, TOKENS)
        # from the last tile to the first
        last = start + (num_tiles - 1) * TOKENS
        num_rows = seqlen - (num_tiles - 1) * TOKENS
        p_x = x + last * stride_x + o_block
        p_dt = dt + last * stride_dt + o_block
        p_dy = dy + last * stride_dy + o_block
        p_high = e_high + last * dim + o_block
        p_low = e_low + last * dim + o_block
        p_BC = BC + last * 32
        p_z = z
        if z is not None:
            p_z = z + last * stride_z + o_block
        # the document before: other warps may still read its last tiles, and copies of no rows at
        # its end still write zeros
        async_copy.wait_group(0)
        barrier()
        for i_done in range(2):
            _stage(
                ring_x, ring_dt, ring_z, ring_dy, ring_high, ring_low, ring_B, ring_C, i_done,
                p_x, p_dt, p_z, p_dy, p_high, p_low, p_BC,
                stride_x, stride_dt, stride_z, stride_dy, dim, num_rows, TOKENS, BLOCK_D, WARPS,
            )  # fmt: skip
            p_x -= TOKENS * stride_x
            p_dt -= TOKENS * stride_dt
            p_dy -= TOKENS * stride_dy
            p_high -= TOKENS * dim
            p_low -= TOKENS * dim
            p_BC -= TOKENS * 32
            if z is not None:
                p_z -= TOKENS * stride_z
            num_rows = gl.where(num_tiles > 1, TOKENS, 0)

        b_c = gl.zeros([16, WARPS, 4, 16], gl.float32, layout=TILE)
        b_dA = gl.zeros([16, WARPS, 4, 16], gl.float32, layout=TILE)
        b_Aq = gl.zeros([WARPS, 4, 16], gl.float32, layout=ROW)
        b_time = gl.load(last_times + i_seq * width + o_d)
        if dfinal_states is not None:
            b_c = gl.load(dfinal_states + i_seq * 16 * dim + o_h)
            b_dA = b_c * gl.load(final_states + i_seq * 16 * dim + o_h)
            b_Aq = sum_states(b_dA * b_A)
            b_dA *= gl.expand_dims(b_time, 0)
        o_t = (start + seqlen - 1) * dim + o_d
        p_dBC = dBC + (i_block * total + last) * 32
        for i_done in range(0, num_tiles):
            first = (num_tiles - 1 - i_done) * TOKENS
            end = first + TOKENS
            if (end < seqlen) & (end % INTERVAL == 0):
                gl.store(p_dA, gl.load(p_dA) + b_dA * LN_2)
                p_anchor = anchors + (start // INTERVAL + end // INTERVAL - 1) * 17 * width
                b_q = b_c * gl.load(p_anchor + o_scratch)
                b_Aq = sum_states(b_q * b_A)
                b_last = gl.load(p_anchor + 16 * width + o_d)
                b_dA = gl.expand_dims(b_last - b_time, 0) * b_q
                b_time = b_last
            async_copy.wait_group(1)
            barrier()
            num_tokens = gl.minimum(seqlen - first, TOKENS)
            i_sum = num_tokens - 1
            i_row = i_done % 2 * TOKENS + i_sum
            b_dbias_tile = gl.zeros([WARPS, 4, 16], gl.float32, layout=ROW)
            for _ in range(0, num_tokens % UNROLL):
                b_c, b_dA, b_Aq, b_time, b_dbias_tile, b_sum = _step(
                    b_c, b_dA, b_Aq, b_time, b_dbias_tile, b_A, b_D, b_bias,
                    x_rows, dt_rows, z_rows, dy_rows, high_rows, low_rows, B_rows, C_rows,
                    i_row, dx, ddt, o_t, z is not None, SOFTPLUS, TILE, WARPS,
                )  # fmt: skip
                sums.index(i_sum).store(b_sum)
                i_row -= 1
                i_sum -= 1
                o_t -= dim
            for _ in range(0, num_tokens // UNROLL):
                b_sums = ()
                for i in gl.static_range(UNROLL):
                    b_c, b_dA, b_Aq, b_time, b_dbias_tile, b_sum = _step(
                        b_c, b_dA, b_Aq, b_time, b_dbias_tile, b_A, b_D, b_bias,
                        x_rows, dt_rows, z_rows, dy_rows, high_rows, low_rows, B_rows, C_rows,
                        i_row - i, dx, ddt, o_t - i * dim, z is not None, SOFTPLUS, TILE, WARPS,
                    )  # fmt: skip
                    b_sums = (b_sum,) + b_sums
                # one store, since each to the same buffer waits for all warps
                stacked_sums.index(i_sum // UNROLL).store(stack(b_sums, UNROLL))
                i_row -= UNROLL
                i_sum -= UNROLL
                o_t -= UNROLL * dim
            b_dbias += b_dbias_tile
            barrier()
            store_sums(sums, p_dBC, num_tokens, TOKENS, WARPS)
            p_dBC -= TOKENS * 32
            _stage(
                ring_x, ring_dt, ring_z, ring_dy, ring_high, ring_low, ring_B, ring_C, i_done % 2,
                p_x, p_dt, p_z, p_dy, p_high, p_low, p_BC,
                stride_x, stride_dt, stride_z, stride_dy, dim, gl.where(first >= 2 * TOKENS, TOKENS, 0), TOKENS, BLOCK_D, WARPS,
            )  # fmt: skip
            p_x -= TOKENS * stride_x
            p_dt -= TOKENS * stride_dt
            p_dy -= TOKENS * stride_dy
            p_high -= TOKENS * dim
            p_low -= TOKENS * dim
            p_BC -= TOKENS * 32
            if z is not None:
                p_z -= TOKENS * stride_z
        if initial_states is not None:
            b_h = gl.load(initial_states + i_seq * 16 * dim + o_h).to(gl.float32)
            b_dA -= gl.expand_dims(b_time, 0) * (b_c * b_h)
            gl.store(dinitial_states + i_seq * 16 * dim + o_h, b_c)
        gl.store(p_dA, gl.load(p_dA) + b_dA * LN_2)
    if ddt_bias is not None:
        gl.store(ddt_bias + i_group.to(gl.int64) * width + o_d, b_dbias)


@gluon.jit
def _stage(
    ring_x, ring_dt, ring_z, ring_dy, ring_high, ring_low, ring_B, ring_C, i_slot,
    p_x, p_dt, p_z, p_dy, p_high, p_low, p_BC,
    stride_x, stride_dt, stride_z, stride_dy, dim, num_rows,
    TOKENS: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start the copies of a tile of tokens."""
    stage_rows(ring_x, i_slot, p_x, stride_x, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_rows(ring_dt, i_slot, p_dt, stride_dt, num_rows, TOKENS, BLOCK_D, WARPS)
    if p_z is not None:
        stage_rows(ring_z, i_slot, p_z, stride_z, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_rows(ring_dy, i_slot, p_dy, stride_dy, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_rows(ring_high, i_slot, p_high, dim, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_rows(ring_low, i_slot, p_low, dim, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_weights(ring_B, i_slot, p_BC, num_rows, TOKENS, 4, WARPS)
    stage_weights(ring_C, i_slot, p_BC + 16, num_rows, TOKENS, 4, WARPS)
    async_copy.commit_group()


@gluon.jit
def _step(
    b_c, b_dA, b_Aq, b_time, b_dbias, b_A, b_D, b_bias,
    x_rows, dt_rows, z_rows, dy_rows, high_rows, low_rows, B_rows, C_rows, i_row,
    dx, ddt, o_t,
    HAS_Z: gl.constexpr, SOFTPLUS: gl.constexpr, TILE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Run c, dA, sum_n A q, the time and ddt_bias through a token; store dx and ddt; add up dB."""
    ROW: gl.constexpr = gl.SliceLayout(0, TILE)
    b_x = read_channels(x_rows, i_row, TILE)
    b_v = read_channels(dt_rows, i_row, TILE) + b_bias
    b_dt, b_exp = step_size(b_v, SOFTPLUS)
    b_g = read_channels(dy_rows, i_row, TILE)
    if HAS_Z:
        b_z = read_channels(z_rows, i_row, TILE)
        b_g *= b_z * sigmoid(b_z)
    b_step = b_dt * LN_2
    b_u = b_step * b_x
    b_dh = read_states(C_rows, i_row, TILE) * gl.expand_dims(b_g, 0) + b_c
    b_v_B = read_states(B_rows, i_row, TILE) * b_dh
    b_du = sum_states(b_v_B)
    b_e = join_bits(high_rows.index(i_row).load(ROW), low_rows.index(i_row).load(ROW))
    b_Aq += b_e - b_u * sum_states(b_v_B * b_A)
    b_dA -= gl.expand_dims(b_time * b_u, 0) * b_v_B
    b_time -= b_dt
    b_c = exp2(gl.expand_dims(b_dt, 0) * b_A) * b_dh
    b_ddt = (b_du * b_x + b_Aq) * step_slope(b_v, b_exp, SOFTPLUS)
    b_dbias += b_ddt
    gl.store(dx + o_t, (b_du * b_step + b_D * b_g).to(dx.dtype.element_ty))
    gl.store(ddt + o_t, b_ddt.to(ddt.dtype.element_ty))
    b_sum = sum_channels(b_dh * gl.expand_dims(b_u, 0), WARPS)
    return b_c, b_dA, b_Aq, b_time, b_dbias, b_sum
