"""Selective scan over packed documents: the backward kernel in Gluon.

With g the gradient at the ungated output and dh[t] that at the state h[t],

    dh[t] = C[t] g[t] + c[t + 1]          c[t] = exp(dt[t] A) dh[t]
    dA   += dt[t] c[t] h[t - 1]           ddt[t] = sum_n A c[t] h[t - 1] + x[t] sum_n B[t] dh[t]
    dB[t] = sum_d dt[t] x[t] dh[t]        dC[t] = sum_d g[t] h[t]

h[t - 1] and dh[t] meet, coming from opposite ends of a document. So the forward kernel first writes
down the states before every ``GROUP`` tokens; this one then walks from a document's end to its
start, a group at a time: h forward into registers, dh backward. An element costs three exponentials
in all, and nothing is kept between forward and backward but their inputs. In a run of very short
documents groups reach across boundaries, where h is reset going forward and c going back.
"""
# ruff: noqa: RUF005
# Triton knows no starred tuples

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from xtuner_mamba.ops.selective_scan.chunks import Schedule
from xtuner_mamba.ops.selective_scan.gluon_fwd import (
    GROUP,
    MAX_SCRATCH_BYTES,
    _launch_fwd,
    allocate_group_states,
    warps_of,
)
from xtuner_mamba.ops.selective_scan.gluon_tile import (
    LN_2,
    barrier,
    cross_boundary,
    exp2,
    load_states,
    read_channels,
    read_states,
    ring_layout,
    sigmoid,
    stack,
    stage_rows,
    stage_states,
    stage_weights,
    step_size,
    step_slope,
    store_sums,
    sum_channels,
    sum_states,
    tile_layout,
    tile_offsets,
)
from xtuner_mamba.ops.selective_scan.gpu_layout import GradientParts
from xtuner_mamba.ops.triton_math import add_compensated

# of dA, after which a sum goes to shared memory: the error of a sum grows with its length
_FLUSH_TOKENS = 64
# of the sums over documents, one for every group of them
_MAX_SUM_BYTES = 2**26


# these change from step to step: a kernel for each of their divisors would be compiled in turn
@gluon.jit(do_not_specialize=["total", "num_runs", "num_groups"])
def _scan_bwd_kernel(
    x, dt, A, BC, D, z, dt_bias, initial_states, cu_seqlens, order, cu_parts, resets,
    group_states, dy, dfinal_states, dx, ddt, dA, dBC, dD, dz, y, ddt_bias, dinitial_states,
    total, num_runs, num_groups, unknown_one,
    stride_x: gl.constexpr, stride_dt: gl.constexpr, stride_z: gl.constexpr,
    stride_dy: gl.constexpr, stride_dz: gl.constexpr, dim: gl.constexpr, width: gl.constexpr,
    SOFTPLUS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, FLUSH_TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    BLOCK_D: gl.constexpr = 32 * WARPS
    TILE: gl.constexpr = tile_layout(WARPS, 4, 1)
    ROW: gl.constexpr = gl.SliceLayout(0, TILE)
    RING: gl.constexpr = ring_layout(1)
    HALF: gl.constexpr = x.dtype.element_ty
    GROUPS: gl.constexpr = TOKENS // GROUP
    num_blocks: gl.constexpr = width // BLOCK_D
    i_group = gl.program_id(0) // num_blocks
    i_block = gl.program_id(0) % num_blocks
    o_block = i_block * BLOCK_D

    ring_x = gl.allocate_shared_memory(HALF, [2, TOKENS * BLOCK_D], RING)
    ring_dt = gl.allocate_shared_memory(dt.dtype.element_ty, [2, TOKENS * BLOCK_D], RING)
    ring_dy = gl.allocate_shared_memory(HALF, [2, TOKENS * BLOCK_D], RING)
    ring_B = gl.allocate_shared_memory(gl.float32, [2, TOKENS * 64], RING)
    ring_C = gl.allocate_shared_memory(gl.float32, [2, TOKENS * 64], RING)
    ring_h = gl.allocate_shared_memory(gl.float32, [2, GROUPS * 16 * BLOCK_D], RING)
    x_rows = ring_x._reinterpret(HALF, [2 * TOKENS, WARPS, 4, 8], ring_layout(3))
    dt_rows = ring_dt._reinterpret(dt.dtype.element_ty, [2 * TOKENS, WARPS, 4, 8], ring_layout(3))
    dy_rows = ring_dy._reinterpret(HALF, [2 * TOKENS, WARPS, 4, 8], ring_layout(3))
    B_rows = ring_B._reinterpret(gl.float32, [2 * TOKENS, 4, 16], ring_layout(2))
    C_rows = ring_C._reinterpret(gl.float32, [2 * TOKENS, 4, 16], ring_layout(2))
    h_rows = ring_h._reinterpret(gl.float32, [2 * GROUPS, 16, WARPS, 4, 8], ring_layout(4))
    sums_B = gl.allocate_shared_memory(gl.float32, [TOKENS, WARPS * 32], RING)
    sums_C = gl.allocate_shared_memory(gl.float32, [TOKENS, WARPS * 32], RING)
    stacked_B = sums_B._reinterpret(gl.float32, [GROUPS, GROUP, WARPS * 32], ring_layout(2))
    stacked_C = sums_C._reinterpret(gl.float32, [GROUPS, GROUP, WARPS * 32], ring_layout(2))
    ring_z = ring_x
    z_rows = x_rows
    if z is not None:
        ring_z = gl.allocate_shared_memory(z.dtype.element_ty, [2, TOKENS * BLOCK_D], RING)
        z_rows = ring_z._reinterpret(z.dtype.element_ty, [2 * TOKENS, WARPS, 4, 8], ring_layout(3))

    o_n, o_d = tile_offsets(TILE, WARPS, 4, 1)
    o_d += o_block
    o_h = o_n * dim + gl.expand_dims(o_d, 0)
    b_A = gl.load(A + o_h)
    b_D = gl.zeros([WARPS, 4, 8], gl.float32, layout=ROW)
    if D is not None:
        b_D = gl.load(D + o_d).to(gl.float32)
    b_bias = gl.zeros([WARPS, 4, 8], gl.float32, layout=ROW)
    if dt_bias is not None:
        b_bias = gl.load(dt_bias + o_d).to(gl.float32)
    sums_A = gl.allocate_shared_memory(gl.float32, [16, WARPS, 4, 8], ring_layout(4))
    b_dA = gl.zeros([16, WARPS, 4, 8], gl.float32, layout=TILE)
    sums_A.store(b_dA)
    b_dD = gl.zeros([WARPS, 4, 8], gl.float32, layout=ROW)
    b_dD_rest = b_dD
    b_dbias = b_dD
    b_dbias_rest = b_dD
    num_in_dA = 0

    for i_order in range(i_group, num_runs, num_groups):
        i_run = gl.load(order + i_order)
        start = gl.load(cu_seqlens + i_run).to(gl.int64)
        seqlen = gl.load(cu_seqlens + i_run + 1) - start.to(gl.int32)
        # the first document, and the one at hand, beginning with the last
        i_first = i_run
        i_seq = i_run
        if resets is not None:
            i_first = gl.load(cu_parts + i_run)
            i_seq = gl.load(cu_parts + i_run + 1) - 1
        num_tiles = gl.cdiv(seqlen, TOKENS)
        # the document before: other warps may still read its last tiles, and copies of no rows at
        # its end still write zeros
        async_copy.wait_group(0)
        barrier()
        for i_done in range(2):
            _stage(
                ring_x, ring_dt, ring_z, ring_dy, ring_B, ring_C, ring_h, i_done,
                x, dt, z, dy, BC, group_states, stride_x, stride_dt, stride_z, stride_dy, width,
                o_block, start, seqlen, num_tiles - 1 - i_done, GROUP, TOKENS, BLOCK_D, WARPS,
            )  # fmt: skip

        b_c = load_states(dfinal_states, i_seq, o_h, dim)
        p_dBC = dBC + (i_block * total + start) * 32
        for i_done in range(0, num_tiles):
            i_tile = num_tiles - 1 - i_done
            num_tokens = gl.minimum(seqlen - i_tile * TOKENS, TOKENS)
            if resets is not None:
                # those past the end are of another run
                tile_resets = gl.load(resets + start + i_tile * TOKENS) & ((1 << num_tokens) - 1)
            async_copy.wait_group(1)
            barrier()
            b_dD_tile = gl.zeros([WARPS, 4, 8], gl.float32, layout=ROW)
            b_dbias_tile = gl.zeros([WARPS, 4, 8], gl.float32, layout=ROW)
            tile_groups = gl.cdiv(num_tokens, GROUP)
            for i_sub_done in range(0, tile_groups):
                i_sub = tile_groups - 1 - i_sub_done
                i_row = i_done % 2 * TOKENS + i_sub * GROUP
                num_left = num_tokens - i_sub * GROUP
                i_t = start + i_tile * TOKENS + i_sub * GROUP
                o_t, o_dz = i_t * dim + o_d, i_t * stride_dz + o_d
                # zeros before a run's first group, of which nothing was copied
                b_h = h_rows.index(i_done % 2 * GROUPS + i_sub).load(TILE)
                if initial_states is not None:  # noqa: SIM102, since Triton decides this one
                    if i_tile + i_sub == 0:
                        b_h = load_states(initial_states, i_first, o_h, dim)
                if resets is not None:
                    group_resets = tile_resets >> i_sub * GROUP
                    # the document that reaches into the group
                    i_ahead = i_seq
                    for i in gl.static_range(GROUP):
                        i_ahead -= group_resets >> i & 1
                b_hs = ()
                b_tokens = ()
                b_sums = ()
                for i in gl.static_range(GROUP):
                    if resets is not None:
                        b_h, i_ahead = cross_boundary(
                            b_h, i_ahead, group_resets >> i & 1, 1, None, initial_states, o_h, dim
                        )
                    b_hs = b_hs + (b_h,)
                    b_h, b_token, b_dD_tile, b_sum = _step_forward(
                        b_h, b_dD_tile, b_A, b_D, b_bias, x_rows, dt_rows, z_rows, dy_rows,
                        B_rows, C_rows, i_row + i, i < num_left, dz, o_dz + i * stride_dz,
                        y, o_t + i * dim, z is not None, SOFTPLUS, TILE, WARPS,
                    )  # fmt: skip
                    b_tokens = b_tokens + (b_token,)
                    b_sums = b_sums + (b_sum,)
                # one store, since each to the same buffer waits for all warps
                stacked_C.index(i_sub).store(stack(b_sums, GROUP))
                b_sums = ()
                for i in gl.static_range(GROUP - 1, -1, -1):
                    b_c, b_dA, b_dbias_tile, b_sum = _step_backward(
                        b_c, b_dA, b_dbias_tile, b_hs[i], b_tokens[i], b_A, b_D, B_rows, C_rows,
                        i_row + i, i < num_left, unknown_one, dx, ddt, o_t + i * dim, TILE, WARPS,
                    )  # fmt: skip
                    b_sums = (b_sum,) + b_sums
                    if resets is not None:
                        b_c, i_seq = cross_boundary(
                            b_c, i_seq, group_resets >> i & 1, -1, dinitial_states, dfinal_states,
                            o_h, dim,
                        )  # fmt: skip
                stacked_B.index(i_sub).store(stack(b_sums, GROUP))
            b_dD, b_dD_rest = add_compensated(b_dD, b_dD_rest, b_dD_tile)
            b_dbias, b_dbias_rest = add_compensated(b_dbias, b_dbias_rest, b_dbias_tile)
            num_in_dA += num_tokens
            if num_in_dA >= FLUSH_TOKENS:
                sums_A.store(sums_A.load(TILE) + b_dA)
                b_dA = gl.zeros([16, WARPS, 4, 8], gl.float32, layout=TILE)
                num_in_dA = 0
            barrier()
            store_sums(sums_B, p_dBC + i_tile * TOKENS * 32, num_tokens, TOKENS, WARPS)
            store_sums(sums_C, p_dBC + i_tile * TOKENS * 32 + 16, num_tokens, TOKENS, WARPS)
            _stage(
                ring_x, ring_dt, ring_z, ring_dy, ring_B, ring_C, ring_h, i_done % 2,
                x, dt, z, dy, BC, group_states, stride_x, stride_dt, stride_z, stride_dy, width,
                o_block, start, seqlen, i_tile - 2, GROUP, TOKENS, BLOCK_D, WARPS,
            )  # fmt: skip
        if dinitial_states is not None:
            gl.store(dinitial_states + i_first.to(gl.int64) * 16 * dim + o_h, b_c)
    p_dA = dA + i_group.to(gl.int64) * 16 * width + o_n * width + gl.expand_dims(o_d, 0)
    gl.store(p_dA, (sums_A.load(TILE) + b_dA) * LN_2)
    if dD is not None:
        gl.store(dD + i_group.to(gl.int64) * width + o_d, b_dD)
    if ddt_bias is not None:
        gl.store(ddt_bias + i_group.to(gl.int64) * width + o_d, b_dbias)


@gluon.jit
def _stage(
    ring_x, ring_dt, ring_z, ring_dy, ring_B, ring_C, ring_h, i_slot,
    x, dt, z, dy, BC, group_states, stride_x: gl.constexpr, stride_dt: gl.constexpr,
    stride_z: gl.constexpr, stride_dy: gl.constexpr, width: gl.constexpr,
    o_block, start, seqlen, i_tile,
    GROUP: gl.constexpr, TOKENS: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start the copies of a tile of tokens, and of the states before its groups."""
    row = start + i_tile * TOKENS
    num_rows = gl.where(i_tile >= 0, seqlen - i_tile * TOKENS, 0)
    o_x, o_dt, o_dy = row * stride_x + o_block, row * stride_dt + o_block, row * stride_dy + o_block
    stage_rows(ring_x, i_slot, x + o_x, stride_x, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_rows(ring_dt, i_slot, dt + o_dt, stride_dt, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_rows(ring_dy, i_slot, dy + o_dy, stride_dy, num_rows, TOKENS, BLOCK_D, WARPS)
    if z is not None:
        o_z = row * stride_z + o_block
        stage_rows(ring_z, i_slot, z + o_z, stride_z, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_weights(ring_B, i_slot, BC + row * 32, num_rows, TOKENS, 4, WARPS)
    stage_weights(ring_C, i_slot, BC + row * 32 + 16, num_rows, TOKENS, 4, WARPS)
    # the first full group's state is in slot 0: none was written for the state before a document
    i_state = start // GROUP + i_tile * (TOKENS // GROUP) - 1
    stage_states(
        ring_h, i_slot, group_states + i_state * 16 * width + o_block * 16, 16 * width,
        gl.where(i_tile == 0, 1, 0), gl.cdiv(num_rows, GROUP), TOKENS // GROUP, BLOCK_D, WARPS,
    )  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def _step_forward(
    b_h, b_dD, b_A, b_D, b_bias, x_rows, dt_rows, z_rows, dy_rows, B_rows, C_rows, i_row, is_token,
    dz, o_dz, y, o_y,
    HAS_Z: gl.constexpr, SOFTPLUS: gl.constexpr, TILE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Run h through a token; store dz and y, add up dC and dD.

    A row past the document's end is zero in shared memory; its step size must be, too.

    Returns:
        The state after the token; its x, step size, slope of that and g; dD; the sums of dC.
    """
    b_x = read_channels(x_rows, i_row, TILE)
    b_v = read_channels(dt_rows, i_row, TILE) + b_bias
    b_dt, b_exp = step_size(b_v, SOFTPLUS)
    b_dt = gl.where(is_token, b_dt, 0.0)
    b_slope = gl.where(is_token, step_slope(b_v, b_exp, SOFTPLUS), 0.0)
    b_g = read_channels(dy_rows, i_row, TILE)
    b_decay = exp2(gl.expand_dims(b_dt, 0) * b_A)
    b_u = b_dt * LN_2 * b_x
    # by name: the compiler would not round the same of the two products for every token
    b_h = gl.fma(b_decay, b_h, gl.expand_dims(b_u, 0) * read_states(B_rows, i_row, TILE))
    if (dz is not None) or (y is not None):
        b_y = sum_states(b_h * read_states(C_rows, i_row, TILE)) + b_D * b_x
    if HAS_Z:
        b_z = read_channels(z_rows, i_row, TILE)
        b_gate = sigmoid(b_z)
        if dz is not None:
            b_dz = b_g * b_y * (b_gate + b_z * b_gate * (1.0 - b_gate))
            _store_token(dz, o_dz, b_dz, is_token)
        if y is not None:
            b_y *= b_z * b_gate
        b_g *= b_z * b_gate
    if y is not None:
        _store_token(y, o_y, b_y, is_token)
    b_dD += b_g * b_x
    b_sum = sum_channels(b_h * gl.expand_dims(b_g, 0), WARPS)
    return b_h, (b_x, b_dt, b_slope, b_g), b_dD, b_sum


@gluon.jit
def _step_backward(
    b_c, b_dA, b_dbias, b_h, b_token, b_A, b_D, B_rows, C_rows, i_row, is_token, unknown_one,
    dx, ddt, o_t, TILE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Run c back through a token, given the state before it; store dx and ddt.

    Returns:
        c of the token; dA over ln 2; ddt_bias; the sums of dB.
    """
    b_x, b_dt, b_slope, b_g = b_token
    b_dh = gl.fma(read_states(C_rows, i_row, TILE), gl.expand_dims(b_g, 0), b_c)
    b_du = sum_states(read_states(B_rows, i_row, TILE) * b_dh)
    # with a plain dt the compiler would keep the decays of the way forward, and lack registers
    b_c = exp2(gl.expand_dims(b_dt * unknown_one, 0) * b_A) * b_dh
    b_q = b_c * b_h
    b_dA += gl.expand_dims(b_dt, 0) * b_q
    b_ddt = (sum_states(b_A * b_q) + b_x * b_du) * b_slope
    b_dbias += b_ddt
    b_step = b_dt * LN_2
    _store_token(dx, o_t, b_step * b_du + b_D * b_g, is_token)
    _store_token(ddt, o_t, b_ddt, is_token)
    b_sum = sum_channels(b_dh * gl.expand_dims(b_step * b_x, 0), WARPS)
    return b_c, b_dA, b_dbias, b_sum


@gluon.jit
def _store_token(rows, o_t, b_v, is_token):
    mask = gl.full(b_v.shape, 1, gl.int1, layout=b_v.type.layout) & is_token
    gl.store(rows + o_t, b_v.to(rows.dtype.element_ty), mask=mask)


def _scan_bwd(
    x: Tensor, dt: Tensor, A: Tensor, BC: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, schedule: Schedule,
    dt_softplus: bool, group_states: Tensor | None, dy: Tensor, dfinal_states: Tensor | None,
    dz: Tensor | None, y: Tensor | None, *, needs_dA: bool, needs_dBC: bool,
    needs_dinitial_states: bool,
) -> tuple[Tensor, Tensor, GradientParts, Tensor | None]:  # fmt: skip
    """Launch the backward: write dz and y, return the other gradients as ``gpu.Kernels`` says.

    Temporaries, in float32: the states before every ``GROUP`` tokens, unless they are given, in
    slices of channels of at most ``MAX_SCRATCH_BYTES``; dB and dC of every block of channels, for
    16 states and 128 channels a quarter of x; dA, dD and ddt_bias of every group of documents.
    """
    (total, dim), runs = x.shape, schedule.runs
    num_warps = warps_of(dim, 32)
    block_d = 32 * num_warps
    dx, ddt = x.new_empty(total, dim), dt.new_empty(total, dim)
    dinitial_states = None
    if needs_dinitial_states:
        dinitial_states = A.new_empty(len(schedule.order), 16, dim)

    width = _slice_width(total, dim) if group_states is None else dim
    num_slices, num_blocks = dim // width, width // block_d
    num_groups = min(len(runs.order), max(1, _MAX_SUM_BYTES // (64 * width)))
    states = group_states
    if states is None:
        states = allocate_group_states(A, total, width, dim)
    dA = A.new_empty(num_slices, num_groups, 16, width)
    dBC = A.new_empty(num_slices, num_blocks, total, 32)
    dD, ddt_bias = (
        None if t is None else A.new_empty(num_slices, num_groups, width) for t in (D, dt_bias)
    )
    for i_slice in range(num_slices):
        channels = slice(i_slice * width, (i_slice + 1) * width)

        def cut(t: Tensor | None, channels: slice = channels) -> Tensor | None:
            return t if t is None or width == dim else t[..., channels]

        def part(t: Tensor | None, i_slice: int = i_slice) -> Tensor | None:
            return t if t is None or num_slices == 1 else t[i_slice]

        inputs = (
            cut(x), cut(dt), cut(A), BC, cut(D), cut(z), cut(dt_bias), cut(initial_states),
        )  # fmt: skip
        if group_states is None:
            _launch_fwd(*inputs, schedule, None, None, states, dim, dt_softplus, unroll=GROUP)
        _scan_bwd_kernel[(num_blocks * num_groups,)](
            *inputs, *runs, states, cut(dy), cut(dfinal_states),
            cut(dx), cut(ddt), part(dA), part(dBC), part(dD), cut(dz), cut(y), part(ddt_bias),
            cut(dinitial_states), total, len(runs.order), num_groups, 1.0,
            stride_x=x.stride(0), stride_dt=dt.stride(0),
            stride_z=0 if z is None else z.stride(0), stride_dy=dy.stride(0),
            stride_dz=0 if dz is None else dz.stride(0), dim=dim, width=width,
            SOFTPLUS=dt_softplus, GROUP=GROUP, TOKENS=8, FLUSH_TOKENS=_FLUSH_TOKENS,
            WARPS=num_warps, num_warps=num_warps, maxnreg=255,
        )  # fmt: skip
    parts = GradientParts(dA, dBC.flatten(0, 1), dD, ddt_bias, num_groups, width)
    return dx, ddt, parts, dinitial_states


def _slice_width(total: int, dim: int) -> int:
    """Return how many channels to work on at once: a part of them that bounds the temporaries."""
    block_d = 64 * warps_of(dim, 64)
    num_blocks = dim // block_d
    fit = max(1, MAX_SCRATCH_BYTES // (64 * block_d * max(1, total // GROUP)))
    if fit >= num_blocks:
        return dim
    return block_d * max(n for n in range(1, fit + 1) if num_blocks % n == 0)
