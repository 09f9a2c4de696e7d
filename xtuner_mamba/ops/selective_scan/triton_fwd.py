"""Selective scan over packed documents: the forward kernel.

A program walks one document for ``BLOCK_D`` channels. Its state is a tile ``(dstate, dim)`` whose
lanes run along the channels, so that a thread owns all states of its channels and the sum over
states stays in its registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from xtuner_mamba.ops.selective_scan.chunks import Schedule
from xtuner_mamba.ops.selective_scan.triton_tile import next_state, sum_states
from xtuner_mamba.ops.triton_math import silu, step_size
from xtuner_mamba.ops.triton_support import cdiv, next_power_of_2

# tokens between two states that the forward keeps for the backward
CHUNK = 64


@triton.jit
def _scan_fwd_kernel(
    x, dt, A, BC, D, z, dt_bias, initial_states, cu_seqlens, order,
    y, final_states, chunk_states,
    stride_x, stride_dt, stride_z, dim,
    SOFTPLUS: tl.constexpr, DSTATE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(dim, BLOCK_D)
    i_seq = tl.load(order + tl.program_id(0) // num_blocks)
    start = tl.load(cu_seqlens + i_seq).to(tl.int64)
    end = tl.load(cu_seqlens + i_seq + 1).to(tl.int64)

    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.program_id(0) % num_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    m_n, m_d = o_n < DSTATE, o_d < dim
    m_h = m_n[:, None] & m_d[None, :]
    # the hint hides that rows are aligned: wider accesses would part a channel's states
    o_h = tl.multiple_of(o_n[:, None] * dim + o_d[None, :], (1, VECTOR))

    b_A = tl.load(A + o_h, mask=m_h, other=0.0)
    if D is not None:
        b_D = tl.load(D + o_d, mask=m_d, other=0.0).to(tl.float32)
    if dt_bias is not None:
        b_bias = tl.load(dt_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_h = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    if initial_states is not None:
        p_initial = initial_states + i_seq * DSTATE * dim + o_h
        b_h = tl.load(p_initial, mask=m_h, other=0.0).to(tl.float32)

    for i_chunk in range(0, tl.cdiv(end - start, CHUNK)):
        first = start + i_chunk * CHUNK
        if chunk_states is not None:
            # the state before chunk 0 is known, so that one slot per full chunk of the row is
            # enough: 0, 1 for lengths [130, 10], whatever else lies in the row
            i_slot = start // CHUNK + i_chunk - 1
            p_h = chunk_states + i_slot * DSTATE * dim + o_h
            tl.store(p_h, b_h, mask=m_h & (i_chunk > 0))
        p_x, p_dt = x + first * stride_x + o_d, dt + first * stride_dt + o_d
        p_BC = BC + first * 2 * DSTATE + o_n
        if y is not None:
            p_y = y + first * dim + o_d
        if z is not None:
            p_z = z + first * stride_z + o_d
        num_tokens = tl.minimum(CHUNK, end - first).to(tl.int32)
        for i_t in tl.range(0, num_tokens, num_stages=NUM_STAGES):
            b_x = tl.load(p_x + i_t * stride_x, mask=m_d, other=0.0).to(tl.float32)
            b_dt = tl.load(p_dt + i_t * stride_dt, mask=m_d, other=0.0).to(tl.float32)
            b_B = tl.load(p_BC + i_t * 2 * DSTATE, mask=m_n, other=0.0)
            if dt_bias is not None:
                b_dt += b_bias
            b_dt, _ = step_size(b_dt, SOFTPLUS)
            b_h = next_state(b_h, b_A, b_dt, b_x, b_B)
            if y is not None:
                b_C = tl.load(p_BC + i_t * 2 * DSTATE + DSTATE, mask=m_n, other=0.0)
                b_y = sum_states(b_h * b_C[:, None])
                if D is not None:
                    b_y += b_D * b_x
                if z is not None:
                    b_z = tl.load(p_z + i_t * stride_z, mask=m_d, other=0.0).to(tl.float32)
                    b_y *= silu(b_z)
                tl.store(p_y + i_t * dim, b_y, mask=m_d)

    if final_states is not None:
        tl.store(final_states + i_seq * DSTATE * dim + o_h, b_h, mask=m_h)


def _scan_fwd(
    x: Tensor, dt: Tensor, A: Tensor, BC: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, schedule: Schedule,
    dt_softplus: bool, y: Tensor | None, *, return_final_states: bool, needs_backward: bool,
    backward_follows: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Launch the forward: write y, return final states and those before chunks.

    The chunk states are what the backward starts from, as large as ``x`` in float32 by
    ``dstate / CHUNK``; A, B and C come as ``gpu.Kernels`` says.
    """
    cu_seqlens, order = schedule.cu_seqlens, schedule.order
    (total, dim), dstate, num_seqs = x.shape, A.shape[0], len(order)
    final_states = chunk_states = None
    if return_final_states:
        final_states = A.new_empty(num_seqs, dstate, dim)
    if needs_backward:
        chunk_states = A.new_empty(total // CHUNK, dstate, dim)

    block_n = next_power_of_2(dstate)
    shape = {"VECTOR": 1, "BLOCK_D": 128}
    if x.element_size() == 2 and block_n <= 16:
        # two channels a thread are the 4 bytes that a copy to shared memory takes at least; 128
        # registers let four programs run on a multiprocessor, where Triton's choice lets two
        shape = {"VECTOR": 2, "BLOCK_D": 256, "maxnreg": 128}
    _scan_fwd_kernel[(cdiv(dim, shape["BLOCK_D"]) * num_seqs,)](
        x, dt, A, BC, D, z, dt_bias, initial_states, cu_seqlens, order,
        y, final_states, chunk_states,
        x.stride(0), dt.stride(0), 0 if z is None else z.stride(0), dim,
        SOFTPLUS=dt_softplus, DSTATE=dstate, CHUNK=CHUNK,
        BLOCK_N=block_n, NUM_STAGES=4, num_warps=4, **shape,
    )  # fmt: skip
    return final_states, chunk_states
