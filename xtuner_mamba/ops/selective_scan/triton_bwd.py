"""Selective scan over packed documents: the backward kernel.

With g[t] the gradient at the ungated output and dh[t] the one at the state,

    dh[t] = C[t] g[t] + c[t + 1]              c[t] = exp(dt[t] A) dh[t]
    dA   += dt[t] c[t] h[t - 1]               ddt[t] = sum_n A c[t] h[t - 1] + x[t] sum_n B[t] dh[t]

so both h[t - 1] and dh[t] are needed at once, from opposite ends. The forward left h every
``CHUNK`` tokens. Chunk by chunk from a document's end, a program first runs h through the chunk
and writes it down every ``SUB`` tokens; then, ``SUB`` tokens at a time, it runs h forward once
more, into registers, and dh backward.
"""
# ruff: noqa: RUF005
# Triton knows no starred tuples

import triton
import triton.language as tl
from torch import Tensor

from xtuner_mamba.ops.selective_scan.chunks import Schedule
from xtuner_mamba.ops.selective_scan.gpu_layout import GradientParts
from xtuner_mamba.ops.selective_scan.triton_fwd import CHUNK
from xtuner_mamba.ops.selective_scan.triton_tile import (
    channel_sum_offsets,
    decay,
    next_state,
    sum_channels,
    sum_states,
)
from xtuner_mamba.ops.triton_math import add_compensated, sigmoid, step_size
from xtuner_mamba.ops.triton_support import cdiv, next_power_of_2

# programs of 32 channels: enough to fill a large GPU several times, few enough to bound the
# scratch memory of all of them together
_MAX_PROGRAMS = 8192


# these change from step to step: a kernel for each of their divisors would be compiled in turn
@triton.jit(do_not_specialize=["total", "num_seqs", "num_groups"])
def _scan_bwd_kernel(
    x, dt, A, BC, D, z, dt_bias, initial_states, cu_seqlens, order,
    chunk_states, dy, dfinal_states,
    dx, ddt, dA, dBC, dD, dz, y, ddt_bias, dinitial_states, sub_states,
    stride_x, stride_dt, stride_z, stride_dy, stride_dz,
    total, dim, num_seqs, num_groups, unknown_one,
    SOFTPLUS: tl.constexpr, DSTATE: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(dim, BLOCK_D)
    i_block = tl.program_id(0) % num_blocks
    i_group = tl.program_id(0) // num_blocks

    o_n = tl.arange(0, BLOCK_N)
    o_d = i_block * BLOCK_D + tl.arange(0, BLOCK_D)
    m_n, m_d = o_n < DSTATE, o_d < dim
    m_h = m_n[:, None] & m_d[None, :]
    # the hint hides that rows are aligned: wider accesses would part a channel's states
    o_h = tl.multiple_of(o_n[:, None] * dim + o_d[None, :], (1, 1))
    o_sum, m_sum = channel_sum_offsets(i_block, total, dim, DSTATE, BLOCK_N, BLOCK_D)
    p_sub = sub_states + tl.program_id(0).to(tl.int64) * (CHUNK // SUB * BLOCK_N * BLOCK_D)
    p_sub += tl.multiple_of(o_n[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], (1, 1))

    b_A = tl.load(A + o_h, mask=m_h, other=0.0)
    b_D = tl.zeros((BLOCK_D,), dtype=tl.float32)
    if D is not None:
        b_D = tl.load(D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_bias = tl.zeros((BLOCK_D,), dtype=tl.float32)
    if dt_bias is not None:
        b_bias = tl.load(dt_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_dD, b_dD_rest = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    b_dbias, b_dbias_rest = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)

    # longest first, and every group takes its documents in the same order each time
    for i_order in range(i_group, num_seqs, num_groups):
        i_seq = tl.load(order + i_order)
        start = tl.load(cu_seqlens + i_seq).to(tl.int64)
        end = tl.load(cu_seqlens + i_seq + 1).to(tl.int64)
        b_carry = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
        if dfinal_states is not None:
            b_carry = tl.load(dfinal_states + i_seq * DSTATE * dim + o_h, mask=m_h, other=0.0)

        num_chunks = tl.cdiv(end - start, CHUNK)
        for i_done in range(0, num_chunks):
            i_chunk = num_chunks - 1 - i_done
            first = start + i_chunk * CHUNK
            num_tokens = tl.minimum(CHUNK, end - first).to(tl.int32)
            p_h = chunk_states + (start // CHUNK + i_chunk - 1) * DSTATE * dim + o_h
            b_h = tl.load(p_h, mask=m_h & (i_chunk > 0), other=0.0)
            if initial_states is not None:
                p_h = initial_states + i_seq * DSTATE * dim + o_h
                b_h0 = tl.load(p_h, mask=m_h & (i_chunk == 0), other=0.0).to(tl.float32)
                b_h = tl.where(i_chunk == 0, b_h0, b_h)

            strides = (stride_x, stride_dt, stride_dy)
            p_rows = (
                x + first * stride_x + o_d,
                dt + first * stride_dt + o_d,
                dy + first * stride_dy + o_d,
            )
            if z is not None:
                strides = strides + (stride_z,)
                p_rows = p_rows + (z + first * stride_z + o_d,)
            p_BC = BC + first * 2 * DSTATE + o_n
            p_dx, p_ddt, p_dz, p_dBC = dx + first * dim + o_d, ddt + first * dim + o_d, dz, dBC
            p_y = y
            if dz is not None:
                p_dz += first * stride_dz + o_d
            if y is not None:
                p_y += first * dim + o_d
            if dBC is not None:
                p_dBC += first * 2 * DSTATE + o_sum

            b_h = _write_sub_states(
                b_h, p_sub, p_rows[:2], strides[:2], p_BC, b_A, b_bias, m_d, m_n, num_tokens,
                SOFTPLUS, DSTATE, SUB,
            )  # fmt: skip
            # another thread may read what this one wrote
            tl.debug_barrier()
            num_subs = tl.cdiv(num_tokens, SUB)
            b_rows = _load_rows(p_rows, strides, m_d, (num_subs - 1) * SUB, num_tokens, SUB)
            b_BC = _load_BC(p_BC, m_n, (num_subs - 1) * SUB, num_tokens, DSTATE)
            b_dA = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
            for i_done_sub in range(0, num_subs):
                first_row = (num_subs - 1 - i_done_sub) * SUB
                b_hs, b_tokens, b_BC, b_dD_sub = _sub_fwd(
                    b_h, b_rows, b_BC, p_BC, p_dz, p_y, p_dBC, b_A, b_D, b_bias, m_d, m_n, m_sum,
                    stride_dz, dim, first_row, num_tokens, SOFTPLUS, DSTATE, SUB,
                )  # fmt: skip
                # what the next round needs is on its way during this round's second half
                next_row = tl.maximum(first_row - SUB, 0)
                b_rows = _load_rows(p_rows, strides, m_d, next_row, num_tokens, SUB)
                b_carry, b_dA, b_dbias_sub, b_h, b_BC = _sub_bwd(
                    b_carry, b_dA, b_hs, b_tokens, b_BC, p_BC,
                    p_sub + next_row // SUB * (BLOCK_N * BLOCK_D), p_dx, p_ddt, p_dBC, b_A, b_D,
                    m_d, m_n, m_sum, dim, first_row, next_row, num_tokens, unknown_one, DSTATE, SUB,
                )  # fmt: skip
                b_dD, b_dD_rest = add_compensated(b_dD, b_dD_rest, b_dD_sub)
                b_dbias, b_dbias_rest = add_compensated(b_dbias, b_dbias_rest, b_dbias_sub)
            if dA is not None:
                # chunk by chunk: one long sum would round more, a second one needs registers
                p_dA = dA + i_group.to(tl.int64) * DSTATE * dim + o_h
                tl.store(p_dA, tl.load(p_dA, mask=m_h, other=0.0) + b_dA, mask=m_h)
            tl.debug_barrier()

        if dinitial_states is not None:
            tl.store(dinitial_states + i_seq * DSTATE * dim + o_h, b_carry, mask=m_h)

    if dD is not None:
        tl.store(dD + i_group.to(tl.int64) * dim + o_d, b_dD, mask=m_d)
    if ddt_bias is not None:
        tl.store(ddt_bias + i_group.to(tl.int64) * dim + o_d, b_dbias, mask=m_d)


@triton.jit
def _load_rows(p_rows, strides, m_d, first, num_tokens, SUB: tl.constexpr):
    """Load a row of every tensor for ``SUB`` tokens, past the last token that one's again."""
    b_rows = ()
    for i in tl.static_range(SUB):
        i_t = tl.minimum(first + i, num_tokens - 1)
        b_row = ()
        for j in tl.static_range(len(p_rows)):
            b_row = b_row + (tl.load(p_rows[j] + i_t * strides[j], mask=m_d, other=0.0),)
        b_rows = b_rows + (b_row,)
    return b_rows


@triton.jit
def _load_BC(p_BC, m_n, i_t, num_tokens, DSTATE: tl.constexpr):
    p_BC += tl.minimum(i_t, num_tokens - 1) * 2 * DSTATE
    return tl.load(p_BC, mask=m_n, other=0.0), tl.load(p_BC + DSTATE, mask=m_n, other=0.0)


@triton.jit
def _write_sub_states(
    b_h, p_sub, p_rows, strides, p_BC, b_A, b_bias, m_d, m_n, num_tokens,
    SOFTPLUS: tl.constexpr, DSTATE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Run h through a chunk, write it down before every ``SUB`` tokens, return the last of these.

    Loads stand before the store that precedes their use: the compiler moves none over a store,
    and would otherwise issue each just where it is needed.
    """
    num_subs = tl.cdiv(num_tokens, SUB)
    b_rows = _load_rows(p_rows, strides, m_d, 0, num_tokens, SUB)
    b_Bs = _load_rows((p_BC,), (2 * DSTATE,), m_n, 0, num_tokens, SUB)
    for i_sub in range(0, num_subs - 1):
        b_next_rows = _load_rows(p_rows, strides, m_d, (i_sub + 1) * SUB, num_tokens, SUB)
        b_next_Bs = _load_rows((p_BC,), (2 * DSTATE,), m_n, (i_sub + 1) * SUB, num_tokens, SUB)
        tl.store(p_sub + i_sub * (b_h.shape[0] * b_h.shape[1]), b_h)
        for i in tl.static_range(SUB):
            b_x = b_rows[i][0].to(tl.float32)
            b_dt, _ = step_size(b_rows[i][1].to(tl.float32) + b_bias, SOFTPLUS)
            b_h = next_state(b_h, b_A, b_dt, b_x, b_Bs[i][0])
        b_rows = b_next_rows
        b_Bs = b_next_Bs
    return b_h


@triton.jit
def _sub_fwd(
    b_h, b_rows, b_BC, p_BC, p_dz, p_y, p_dBC, b_A, b_D, b_bias, m_d, m_n, m_sum, stride_dz, dim,
    first, num_tokens, SOFTPLUS: tl.constexpr, DSTATE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Run h through ``SUB`` tokens; store dz, y and dC.

    Tokens past the chunk's end get a step size and a gradient of 0.

    Returns:
        The state before each token; x, dt, the slope of dt and g of each token; B and C of the
        last; dD.
    """
    b_dD = tl.zeros(b_D.shape, dtype=tl.float32)
    b_hs = ()
    b_tokens = ()
    for i in tl.static_range(SUB):
        i_t = first + i
        b_B, b_C = b_BC
        b_x = b_rows[i][0].to(tl.float32)
        b_dt, b_slope = step_size(b_rows[i][1].to(tl.float32) + b_bias, SOFTPLUS)
        b_dt = tl.where(i_t < num_tokens, b_dt, 0.0)
        b_g = tl.where(i_t < num_tokens, b_rows[i][2].to(tl.float32), 0.0)
        b_hs = b_hs + (b_h,)
        b_h = next_state(b_h, b_A, b_dt, b_x, b_B)
        if i < SUB - 1:
            b_BC = _load_BC(p_BC, m_n, i_t + 1, num_tokens, DSTATE)
        m_t = m_d & (i_t < num_tokens)
        if (p_dz is not None) or (p_y is not None):
            b_y = sum_states(b_h * b_C[:, None]) + b_D * b_x
        if len(b_rows[i]) == 4:
            b_z = b_rows[i][3].to(tl.float32)
            b_gate = sigmoid(b_z)
            if p_dz is not None:
                b_dz = b_g * b_y * b_gate * (1.0 + b_z * (1.0 - b_gate))
                tl.store(p_dz + i_t * stride_dz, b_dz, mask=m_t)
            if p_y is not None:
                b_y *= b_z * b_gate
            b_g *= b_z * b_gate
        if p_y is not None:
            tl.store(p_y + i_t * dim, b_y, mask=m_t)
        b_dD += b_g * b_x
        b_tokens = b_tokens + ((b_x, b_dt, b_slope, b_g),)
        if p_dBC is not None:
            b_dC = sum_channels(b_h * b_g[None, :])
            tl.store(p_dBC + i_t * 2 * DSTATE + DSTATE, b_dC, mask=m_sum & (i_t < num_tokens))
    return b_hs, b_tokens, b_BC, b_dD


@triton.jit
def _sub_bwd(
    b_carry, b_dA, b_hs, b_tokens, b_BC, p_BC, p_next_h, p_dx, p_ddt, p_dBC, b_A, b_D,
    m_d, m_n, m_sum, dim, first, next_first, num_tokens, unknown_one,
    DSTATE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Run dh back through ``SUB`` tokens; store dx, ddt and dB.

    Returns:
        c of the first token; dA; the gradient of the bias of dt; of the ``SUB`` tokens to come
        next the state before them, and B and C of the first.
    """
    b_dbias = tl.zeros(b_D.shape, dtype=tl.float32)
    for i in tl.static_range(SUB - 1, -1, -1):
        i_t = first + i
        b_B, b_C = b_BC
        b_x, b_dt, b_slope, b_g = b_tokens[i]

        b_dh = b_C[:, None] * b_g[None, :] + b_carry
        b_du = sum_states(b_B[:, None] * b_dh)
        # with a plain dt the compiler would keep the decays of _sub_fwd, and run out of registers
        b_carry = decay(b_A, b_dt * unknown_one) * b_dh
        b_ch = b_carry * b_hs[i]
        b_ddt = (sum_states(b_A * b_ch) + b_x * b_du) * b_slope
        b_dA += b_dt[None, :] * b_ch
        b_dbias += tl.where(i_t < num_tokens, b_ddt, 0.0)
        if i > 0:
            b_BC = _load_BC(p_BC, m_n, i_t - 1, num_tokens, DSTATE)
        else:
            b_BC = _load_BC(p_BC, m_n, next_first, num_tokens, DSTATE)
            b_h = tl.load(p_next_h)
        m_t = m_d & (i_t < num_tokens)
        tl.store(p_dx + i_t * dim, b_dt * b_du + b_D * b_g, mask=m_t)
        tl.store(p_ddt + i_t * dim, b_ddt, mask=m_t)
        if p_dBC is not None:
            b_dB = sum_channels(b_dh * (b_dt * b_x)[None, :])
            tl.store(p_dBC + i_t * 2 * DSTATE, b_dB, mask=m_sum & (i_t < num_tokens))
    return b_carry, b_dA, b_dbias, b_h, b_BC


def _scan_bwd(
    x: Tensor, dt: Tensor, A: Tensor, BC: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, schedule: Schedule,
    dt_softplus: bool, chunk_states: Tensor, dy: Tensor, dfinal_states: Tensor | None,
    dz: Tensor | None, y: Tensor | None, *, needs_dA: bool, needs_dBC: bool,
    needs_dinitial_states: bool,
) -> tuple[Tensor, Tensor, GradientParts, Tensor | None]:  # fmt: skip
    """Launch the backward: write dz and y, return the other gradients as ``gpu.Kernels`` says.

    Temporaries, in float32: dB and dC of every 32 channels, ``(dim / 32, total, 2 dstate)``, for
    16 states as large as x; dA of every group of documents, and the states inside a chunk of every
    program, both bounded by ``_MAX_PROGRAMS``. All are summed in a fixed order.
    """
    cu_seqlens, order = schedule.cu_seqlens, schedule.order
    (total, dim), dstate, num_seqs = x.shape, A.shape[0], len(order)
    block_n = next_power_of_2(dstate)
    # SUB states of block_n numbers must fit into the registers of a thread
    sub = max(1, min(4, 64 // block_n))
    num_warps = 4
    block_d = 32 * num_warps
    num_blocks = cdiv(dim, block_d)
    num_groups = min(num_seqs, max(1, _MAX_PROGRAMS // (num_blocks * num_warps)))

    def partial(wanted: bool, *shape: int) -> Tensor | None:
        return A.new_empty(shape) if wanted else None

    dx, ddt = x.new_empty(total, dim), dt.new_empty(total, dim)
    dA = A.new_zeros(num_groups, dstate, dim) if needs_dA else None
    dBC = partial(needs_dBC, cdiv(dim, 32), total, 2 * dstate)
    dD = partial(D is not None, num_groups, dim)
    ddt_bias = partial(dt_bias is not None, num_groups, dim)
    dinitial_states = partial(needs_dinitial_states, num_seqs, dstate, dim)
    sub_states = A.new_empty(num_blocks * num_groups, CHUNK // sub, block_n, block_d)
    _scan_bwd_kernel[(num_blocks * num_groups,)](
        x, dt, A, BC, D, z, dt_bias, initial_states, cu_seqlens, order,
        chunk_states, dy, dfinal_states,
        dx, ddt, dA, dBC, dD, dz, y, ddt_bias, dinitial_states, sub_states,
        x.stride(0), dt.stride(0), 0 if z is None else z.stride(0), dy.stride(0),
        0 if dz is None else dz.stride(0),
        total, dim, num_seqs, num_groups, 1.0,
        SOFTPLUS=dt_softplus, DSTATE=dstate, CHUNK=CHUNK, SUB=sub,
        BLOCK_N=block_n, BLOCK_D=block_d, num_warps=num_warps,
    )  # fmt: skip
    return dx, ddt, GradientParts(dA, dBC, dD, ddt_bias, num_groups, dim), dinitial_states
