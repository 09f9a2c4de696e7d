"""Selective scan over packed documents: the forward kernel in Gluon.

A program walks one document after another for ``BLOCK_D`` channels, a tile of tokens at a time:
while it works on one, the next comes into shared memory. Very short documents it walks in runs
(``chunks.Runs``), where the state is reset from one to the next. The backward runs it once more,
for the states alone.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from xtuner_mamba.ops.selective_scan.chunks import Schedule
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
    stage_rows,
    stage_weights,
    step_size,
    sum_states,
    tile_layout,
    tile_offsets,
)
from xtuner_mamba.ops.triton_support import cdiv

# tokens whose states a thread of the backward holds in registers
GROUP = 4
# of the states before groups
MAX_SCRATCH_BYTES = 2**31


# these change from step to step: a kernel for each of their divisors would be compiled in turn
@gluon.jit(do_not_specialize=["num_runs", "num_groups"])
def _scan_fwd_kernel(
    x, dt, A, BC, D, z, dt_bias, initial_states, cu_seqlens, order, cu_parts, resets,
    y, final_states, unroll_states, num_runs, num_groups,
    stride_x: gl.constexpr, stride_dt: gl.constexpr, stride_z: gl.constexpr,
    dim: gl.constexpr, width: gl.constexpr,
    SOFTPLUS: gl.constexpr, TOKENS: gl.constexpr, UNROLL: gl.constexpr, POLYNOMIAL: gl.constexpr,
    CHANNELS: gl.constexpr, WARPS: gl.constexpr, SCRATCH_D: gl.constexpr,
):  # fmt: skip
    PART: gl.constexpr = 32 * CHANNELS
    BLOCK_D: gl.constexpr = PART * WARPS
    TILE: gl.constexpr = tile_layout(WARPS, 1, CHANNELS)
    ROW: gl.constexpr = gl.SliceLayout(0, TILE)
    RING: gl.constexpr = ring_layout(1)
    num_blocks: gl.constexpr = width // BLOCK_D
    i_group = gl.program_id(0) // num_blocks
    o_block = gl.program_id(0) % num_blocks * BLOCK_D

    ring_x = gl.allocate_shared_memory(x.dtype.element_ty, [2, TOKENS * BLOCK_D], RING)
    ring_dt = gl.allocate_shared_memory(dt.dtype.element_ty, [2, TOKENS * BLOCK_D], RING)
    ring_B = gl.allocate_shared_memory(gl.float32, [2, TOKENS * 16], RING)
    ring_C = gl.allocate_shared_memory(gl.float32, [2, TOKENS * 16], RING)
    x_rows = ring_x._reinterpret(x.dtype.element_ty, [2 * TOKENS, WARPS, 1, PART], ring_layout(3))
    dt_rows = ring_dt._reinterpret(
        dt.dtype.element_ty, [2 * TOKENS, WARPS, 1, PART], ring_layout(3)
    )
    B_rows = ring_B._reinterpret(gl.float32, [2 * TOKENS, 1, 16], ring_layout(2))
    C_rows = ring_C._reinterpret(gl.float32, [2 * TOKENS, 1, 16], ring_layout(2))
    ring_z = ring_x
    z_rows = x_rows
    if z is not None:
        ring_z = gl.allocate_shared_memory(z.dtype.element_ty, [2, TOKENS * BLOCK_D], RING)
        z_rows = ring_z._reinterpret(
            z.dtype.element_ty, [2 * TOKENS, WARPS, 1, PART], ring_layout(3)
        )

    o_n, o_d = tile_offsets(TILE, WARPS, 1, CHANNELS)
    o_d += o_block
    o_h = o_n * dim + gl.expand_dims(o_d, 0)
    # block by block of the backward
    o_scratch = gl.expand_dims(o_d // SCRATCH_D * (16 * SCRATCH_D) + o_d % SCRATCH_D, 0)
    b_part = gl.expand_dims(o_d // 8 % 4, 0) + gl.zeros_like(o_n)
    b_A = gl.load(A + o_h)
    b_D = gl.zeros([WARPS, 1, PART], gl.float32, layout=ROW)
    if D is not None:
        b_D = gl.load(D + o_d).to(gl.float32)
    b_bias = gl.zeros([WARPS, 1, PART], gl.float32, layout=ROW)
    if dt_bias is not None:
        b_bias = gl.load(dt_bias + o_d).to(gl.float32)

    for i_order in range(i_group, num_runs, num_groups):
        i_run = gl.load(order + i_order)
        start = gl.load(cu_seqlens + i_run).to(gl.int64)
        seqlen = gl.load(cu_seqlens + i_run + 1) - start.to(gl.int32)
        i_seq = i_run
        if resets is not None:
            i_seq = gl.load(cu_parts + i_run)
        p_x = x + start * stride_x + o_block
        p_dt = dt + start * stride_dt + o_block
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
                ring_x, ring_dt, ring_z, ring_B, ring_C, i_tile, p_x, p_dt, p_z, p_BC,
                stride_x, stride_dt, stride_z, seqlen - i_tile * TOKENS, TOKENS, BLOCK_D, WARPS,
            )  # fmt: skip
            p_x += TOKENS * stride_x
            p_dt += TOKENS * stride_dt
            p_BC += TOKENS * 32
            if z is not None:
                p_z += TOKENS * stride_z
        b_h = load_states(initial_states, i_seq, o_h, dim)
        p_y = y
        if y is not None:
            p_y = y + start * dim + o_d
        p_states = unroll_states
        if unroll_states is not None:
            # one slot per full group of the row is enough: none is for the state before token 0
            p_states = unroll_states + start // UNROLL * 16 * width + o_scratch
        for i_tile in range(0, gl.cdiv(seqlen, TOKENS)):
            num_left = seqlen - i_tile * TOKENS
            if resets is not None:
                tile_resets = gl.load(resets + start + i_tile * TOKENS)
            async_copy.wait_group(1)
            barrier()
            i_row = i_tile % 2 * TOKENS
            num_tokens = gl.minimum(num_left, TOKENS)
            for _ in range(0, num_tokens // UNROLL):
                for i in gl.static_range(UNROLL):
                    if resets is not None:
                        b_h, i_seq = cross_boundary(
                            b_h, i_seq, tile_resets >> i & 1, 1, final_states, initial_states,
                            o_h, dim,
                        )  # fmt: skip
                    b_h, b_y = _step(
                        b_h, b_A, b_D, b_bias, x_rows, dt_rows, z_rows, B_rows, C_rows, i_row + i,
                        y is not None, z is not None, SOFTPLUS, POLYNOMIAL, TILE,
                    )  # fmt: skip
                    if y is not None:
                        gl.store(p_y + i * dim, b_y.to(y.dtype.element_ty))
                i_row += UNROLL
                if resets is not None:
                    tile_resets >>= UNROLL
                if y is not None:
                    p_y += UNROLL * dim
                if unroll_states is not None:
                    # to one address and what an instruction adds to it
                    gl.store(p_states + o_n * SCRATCH_D, _order_by_parts(b_h, b_part))
                    p_states += 16 * width
            for _ in range(0, num_tokens % UNROLL):
                if resets is not None:
                    b_h, i_seq = cross_boundary(
                        b_h, i_seq, tile_resets & 1, 1, final_states, initial_states, o_h, dim
                    )
                    tile_resets >>= 1
                b_h, b_y = _step(
                    b_h, b_A, b_D, b_bias, x_rows, dt_rows, z_rows, B_rows, C_rows, i_row,
                    y is not None, z is not None, SOFTPLUS, POLYNOMIAL, TILE,
                )  # fmt: skip
                if y is not None:
                    gl.store(p_y, b_y.to(y.dtype.element_ty))
                    p_y += dim
                i_row += 1
            barrier()
            _stage(
                ring_x, ring_dt, ring_z, ring_B, ring_C, i_tile % 2, p_x, p_dt, p_z, p_BC,
                stride_x, stride_dt, stride_z, num_left - 2 * TOKENS, TOKENS, BLOCK_D, WARPS,
            )  # fmt: skip
            p_x += TOKENS * stride_x
            p_dt += TOKENS * stride_dt
            p_BC += TOKENS * 32
            if z is not None:
                p_z += TOKENS * stride_z
        if final_states is not None:
            gl.store(final_states + i_seq.to(gl.int64) * 16 * dim + o_h, b_h)


@gluon.jit
def _stage(
    ring_x, ring_dt, ring_z, ring_B, ring_C, i_slot, p_x, p_dt, p_z, p_BC,
    stride_x: gl.constexpr, stride_dt: gl.constexpr, stride_z: gl.constexpr, num_rows,
    TOKENS: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start the copies of a tile of tokens."""
    stage_rows(ring_x, i_slot, p_x, stride_x, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_rows(ring_dt, i_slot, p_dt, stride_dt, num_rows, TOKENS, BLOCK_D, WARPS)
    if p_z is not None:
        stage_rows(ring_z, i_slot, p_z, stride_z, num_rows, TOKENS, BLOCK_D, WARPS)
    stage_weights(ring_B, i_slot, p_BC, num_rows, TOKENS, 1, WARPS)
    stage_weights(ring_C, i_slot, p_BC + 16, num_rows, TOKENS, 1, WARPS)
    async_copy.commit_group()


@gluon.jit
def _step(
    b_h, b_A, b_D, b_bias, x_rows, dt_rows, z_rows, B_rows, C_rows, i_row,
    HAS_Y: gl.constexpr, HAS_Z: gl.constexpr, SOFTPLUS: gl.constexpr, POLYNOMIAL: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Return the state after a token, and its output."""
    b_x = read_channels(x_rows, i_row, TILE)
    b_dt = step_size(read_channels(dt_rows, i_row, TILE) + b_bias, SOFTPLUS)[0]
    b_u = b_dt * LN_2 * b_x
    b_decay = _exp2_of_tile(gl.expand_dims(b_dt, 0) * b_A, POLYNOMIAL)
    # by name: the compiler would not round the same of the two products for every token
    b_h = gl.fma(b_decay, b_h, gl.expand_dims(b_u, 0) * read_states(B_rows, i_row, TILE))
    b_y = b_x
    if HAS_Y:
        b_y = sum_states(b_h * read_states(C_rows, i_row, TILE)) + b_D * b_x
    if HAS_Z:
        b_z = read_channels(z_rows, i_row, TILE)
        b_y *= b_z * sigmoid(b_z)
    return b_h, b_y


@gluon.jit
def _order_by_parts(b_h, b_part):
    """Bring the states in the order in which the backward's lanes hold them, ``n ^ 4 i``."""
    TILE: gl.constexpr = b_h.type.layout
    b_h = _swap_halves(b_h, b_part // 2 == 1, 2)
    b_h = _swap_halves(b_h, b_part % 2 == 1, 4)
    return gl.convert_layout(b_h, TILE, assert_trivial=True)


@gluon.jit
def _swap_halves(b_v, m_swap, N: gl.constexpr):
    """Swap neighbouring ``16 / N`` states where the mask says so."""
    SHAPE: gl.constexpr = b_v.shape
    b_low, b_high = gl.split(_pairs(b_v, N))
    m_low, _ = gl.split(_pairs(m_swap, N))
    b_v = gl.join(gl.where(m_low, b_high, b_low), gl.where(m_low, b_low, b_high))
    return gl.reshape(gl.permute(b_v, (0, 5, 1, 2, 3, 4)), SHAPE)


@gluon.jit
def _pairs(b_v, N: gl.constexpr):
    b_v = gl.reshape(b_v, (N // 2, 2, 16 // N, b_v.shape[1], b_v.shape[2], b_v.shape[3]))
    return gl.permute(b_v, (0, 2, 3, 4, 5, 1))


@gluon.jit
def _exp2_of_tile(b_v, POLYNOMIAL: gl.constexpr):
    if POLYNOMIAL:
        # the special-function unit is what the kernel waits for: the multipliers do 1 in 16
        CHANNELS: gl.constexpr = b_v.type.layout.size_per_thread[3]
        b_v = gl.inline_asm_elementwise(
            _exp2_asm(16 * CHANNELS, CHANNELS), _exp2_constraints(16 * CHANNELS), [b_v],
            dtype=gl.float32, is_pure=True, pack=16 * CHANNELS,
        )  # fmt: skip
    else:
        b_v = exp2(b_v)
    return b_v


@gluon.constexpr_function
def _exp2_asm(NUM_VALUES, NUM_POLYNOMIAL):
    """Write PTX for 2^v: v = whole + r, |r| <= 1/2, 2^r a polynomial that is exact at 0."""
    lines = ["{ .reg .f32 whole, r, p; .reg .b32 bits;"]
    for i in range(NUM_POLYNOMIAL):
        lines.append(f"max.f32 r, ${NUM_VALUES + i}, 0fC2FC0000;")
        # 1.5 * 2^23: its sum with v has the whole part of v in the low bits
        lines.append("add.rn.f32 whole, r, 0f4B400000; sub.rn.f32 p, whole, 0f4B400000;")
        lines.append("sub.rn.f32 r, r, p; fma.rn.f32 p, r, 0f3C1D0164, 0f3D64FE23;")
        lines.append("fma.rn.f32 p, p, r, 0f3E7601BC; fma.rn.f32 p, p, r, 0f3F317096;")
        lines.append("fma.rn.f32 p, p, r, 0f3F800000;")
        lines.append("mov.b32 bits, whole; shl.b32 bits, bits, 23;")
        lines.append(f"{{ .reg .b32 q; mov.b32 q, p; add.s32 q, q, bits; mov.b32 ${i}, q; }}")
    for i in range(NUM_POLYNOMIAL, NUM_VALUES):
        lines.append(f"ex2.approx.ftz.f32 ${i}, ${NUM_VALUES + i};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _exp2_constraints(NUM_VALUES):
    return ",".join(["=f"] * NUM_VALUES + ["f"] * NUM_VALUES)


def _scan_fwd(
    x: Tensor, dt: Tensor, A: Tensor, BC: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, schedule: Schedule,
    dt_softplus: bool, y: Tensor | None, *, return_final_states: bool, needs_backward: bool,
    backward_follows: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Launch the forward: write y, return the final states ``(num_seqs, 16, dim)``.

    The backward needs the inputs alone, and makes the states before every ``GROUP`` tokens itself.
    If it follows at once they come along, as far as they stay below ``MAX_SCRATCH_BYTES``.
    """
    total, dim = x.shape
    final_states = A.new_empty(len(schedule.order), 16, dim) if return_final_states else None
    group_states = None
    if needs_backward and backward_follows and 64 * dim * (total // GROUP) <= MAX_SCRATCH_BYTES:
        group_states = allocate_group_states(A, total, dim, dim)
    if not (y is None and final_states is None and group_states is None):
        _launch_fwd(
            x, dt, A, BC, D, z, dt_bias, initial_states, schedule, y, final_states,
            group_states, dim, dt_softplus, unroll=8 if group_states is None else GROUP,
        )  # fmt: skip
    return final_states, group_states


def allocate_group_states(A: Tensor, total: int, width: int, dim: int) -> Tensor:
    """Return memory for the states after every ``GROUP`` tokens, of ``width`` channels of ``dim``.

    ``(total // GROUP, width / block_d, 16, block_d)``, since a program of the backward reads those
    of ``block_d`` channels: all that it needs at once is in one piece.
    """
    block_d = 32 * warps_of(dim, 32)
    return A.new_empty(total // GROUP, width // block_d, 16, block_d)


def _launch_fwd(
    x: Tensor, dt: Tensor, A: Tensor, BC: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, schedule: Schedule,
    y: Tensor | None, final_states: Tensor | None, unroll_states: Tensor | None, dim: int,
    dt_softplus: bool, unroll: int,
) -> None:  # fmt: skip
    """Launch the forward for all channels or a slice of the ``dim`` that a row of memory has.

    ``y``, ``final_states`` and ``unroll_states`` are written where given; the last takes the state
    after every ``unroll`` tokens of a run, laid out as :func:`allocate_group_states` says.
    """
    width, runs = x.shape[1], schedule.runs
    num_runs = len(runs.order)
    # with one channel a thread the longest run ends sooner, with two all of them together
    channels = 1 if schedule.is_uneven else 2
    num_warps = warps_of(width, 32 * channels)
    num_blocks = width // (32 * channels * num_warps)
    num_groups = min(num_runs, cdiv(_MAX_PROGRAMS, num_blocks))
    if y is None:
        D = z = None
    _scan_fwd_kernel[(num_blocks * num_groups,)](
        x, dt, A, BC, D, z, dt_bias, initial_states, *runs, y, final_states, unroll_states,
        num_runs, num_groups,
        stride_x=x.stride(0), stride_dt=dt.stride(0), stride_z=0 if z is None else z.stride(0),
        dim=dim, width=width, SOFTPLUS=dt_softplus, TOKENS=_TOKENS[channels], UNROLL=unroll,
        POLYNOMIAL=final_states is None and unroll_states is None,
        CHANNELS=channels, WARPS=num_warps, SCRATCH_D=32 * warps_of(dim, 32),
        num_warps=num_warps, maxnreg=_REGISTERS[channels],
    )  # fmt: skip


# of a thread, and of a tile, by the channels of a thread
_REGISTERS = {1: 96, 2: 168}
_TOKENS = {1: 16, 2: 8}
# enough to fill the GPU many times over
_MAX_PROGRAMS = 16384


def warps_of(dim: int, channels: int) -> int:
    """Return the warps of a program, of which each has that many channels."""
    return next(num_warps for num_warps in (4, 2, 1) if dim % (channels * num_warps) == 0)
