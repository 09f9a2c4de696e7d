"""Selective scan over packed documents on the CPU: the forward kernel.

A kernel walks all tokens of a block of channels, document by document, chunk by chunk. The rows of
a chunk are copied before its recurrence, when those of the next are put on their way.
"""

import math

from numba import njit
from torch import Tensor

from xtuner_mamba.ops.cpu_math import INLINED, exp2, silu, softplus
from xtuner_mamba.ops.cpu_support import (
    LANES,
    as_rows,
    compile_kernel,
    load_rows,
    prefetch_row,
    run_blocks,
    state_rows,
    store_rows,
    zeros,
)


@compile_kernel
def _scan_fwd_kernel(
    block, dim, x, dt, A, log2_decay, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus,
    chunk, y, final_states, chunk_states,
):  # fmt: skip
    dstate = B.shape[1]
    first = block * LANES
    lanes = min(LANES, dim - first)
    decay, h = zeros(dstate, B), zeros(dstate, B)
    skip, bias = zeros(1, B), zeros(1, B)
    xs, vs, dts, us, zs, ys = (
        zeros(chunk, B), zeros(chunk, B), zeros(chunk, B),
        zeros(chunk, B), zeros(chunk, B), zeros(chunk, B),
    )  # fmt: skip
    load_rows(decay, log2_decay, 0, dstate, first, lanes)
    load_rows(skip, D, 0, 1, first, lanes)
    load_rows(bias, dt_bias, 0, 1, first, lanes)
    i_chunk = 0
    for i_seq in range(len(cu_seqlens) - 1):
        start, end = cu_seqlens[i_seq], cu_seqlens[i_seq + 1]
        h[:] = 0
        if len(initial_states[0]):
            load_rows(h, initial_states, i_seq * dstate, dstate, first, lanes)
        for begin in range(start, end, chunk):
            steps = min(chunk, end - begin)
            if begin > start:
                store_rows(chunk_states, i_chunk * dstate, dstate, first, lanes, h)
                i_chunk += 1
            load_rows(xs, x, begin, steps, first, lanes)
            load_rows(vs, dt, begin, steps, first, lanes)
            to_step_sizes(dts, vs, bias, steps, dt_softplus)
            for i in range(steps):
                # while the recurrence computes
                prefetch_row(z, begin + i, first)
                prefetch_row(y, begin + i, first)
                prefetch_row(x, begin + steps + i, first)
                prefetch_row(dt, begin + steps + i, first)
                for d in range(LANES):
                    us[i, d] = dts[i, d] * xs[i, d]
                    ys[i, d] = skip[0, d] * xs[i, d]
                for n in range(dstate):
                    b, c = B[begin + i, n], C[begin + i, n]
                    for d in range(LANES):
                        state = exp2(dts[i, d] * decay[n, d]) * h[n, d] + us[i, d] * b
                        h[n, d] = state
                        ys[i, d] += state * c
            if len(z[0]):
                load_rows(zs, z, begin, steps, first, lanes)
                for i in range(steps):
                    for d in range(LANES):
                        ys[i, d] *= silu(zs[i, d])
            store_rows(y, begin, steps, first, lanes, ys)
        if len(final_states[0]):
            store_rows(final_states, i_seq * dstate, dstate, first, lanes, h)


@njit(**INLINED)
def to_step_sizes(dts, vs, bias, steps, dt_softplus):
    """Add the bias to ``vs`` and write the step sizes that they stand for to ``dts``."""
    for i in range(steps):
        for d in range(LANES):
            vs[i, d] += bias[0, d]
            dts[i, d] = vs[i, d]
    if dt_softplus:
        for i in range(steps):
            for d in range(LANES):
                dts[i, d] = softplus(vs[i, d])


def kernel_inputs(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor, dt_softplus: bool,
    chunk: int,
) -> tuple:  # fmt: skip
    """Return the arguments that both kernels begin with, in the dtype of A."""
    log2_decay = A.double() * math.log2(math.e)
    D, dt_bias = (A.new_zeros(len(A)) if t is None else t for t in (D, dt_bias))
    B, C = (t.detach().to(A.dtype).contiguous().numpy() for t in (B, C))
    x, dt, A_t, log2_decay, D, z, dt_bias, initial_states = (
        as_rows(t, A.dtype)
        for t in (x, dt, A.mT, log2_decay.mT, D[None], z, dt_bias[None], state_rows(initial_states))
    )
    return (
        x, dt, A_t, log2_decay, B, C, D, z, dt_bias, initial_states, cu_seqlens.numpy(),
        dt_softplus, chunk,
    )  # fmt: skip


def scan_fwd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor, dt_softplus: bool,
    chunk: int, *, return_final_states: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Run the forward kernel: y, the final states if asked for, and what the backward wants.

    The last are states before all chunks but a document's first, ``(num_chunks * dstate, dim)``.
    """
    (dim, dstate), num_seqs = A.shape, len(cu_seqlens) - 1
    num_chunks = int((cu_seqlens.diff() - 1).div(chunk, rounding_mode="floor").sum())
    y = A.new_empty(x.shape)
    chunk_states = A.new_empty(num_chunks * dstate, dim)
    final_states = A.new_empty(num_seqs * dstate, dim) if return_final_states else None
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus, chunk)
    outputs = (as_rows(t, A.dtype) for t in (y, final_states, chunk_states))
    run_blocks(_scan_fwd_kernel, dim, *kernel_inputs(*inputs), *outputs)
    if final_states is not None:
        final_states = final_states.view(num_seqs, dstate, dim).mT
    return y.to(x.dtype), final_states, chunk_states
