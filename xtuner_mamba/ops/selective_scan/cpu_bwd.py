"""Selective scan over packed documents on the CPU: the backward kernel.

A kernel goes through the chunks of a document from the last to the first. The states of a chunk
are recomputed from the one that the forward saved before it.
"""

import numpy as np
from numba import njit
from torch import Tensor

from xtuner_mamba.ops.cpu_math import INLINED, exp2, sigmoid, silu, silu_slope
from xtuner_mamba.ops.cpu_support import (
    LANES,
    as_rows,
    compile_kernel,
    count_blocks,
    load_rows,
    run_blocks,
    state_rows,
    store_rows,
    zeros,
)
from xtuner_mamba.ops.selective_scan.cpu_fwd import kernel_inputs, to_step_sizes


@compile_kernel
def _scan_bwd_kernel(
    block, dim, x, dt, A, log2_decay, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus,
    chunk, chunk_states, dy, dfinal_states,
    dx, ddt, dA, dD, dz, ddt_bias, dinitial_states, dB, dC,
):  # fmt: skip
    dstate = B.shape[1]
    first = block * LANES
    lanes = min(LANES, dim - first)
    rates, decay, skip, bias = zeros(dstate, B), zeros(dstate, B), zeros(1, B), zeros(1, B)
    load_rows(rates, A, 0, dstate, first, lanes)
    load_rows(decay, log2_decay, 0, dstate, first, lanes)
    load_rows(skip, D, 0, 1, first, lanes)
    load_rows(bias, dt_bias, 0, 1, first, lanes)
    xs, vs, dts, us, zs = (
        zeros(chunk, B), zeros(chunk, B), zeros(chunk, B), zeros(chunk, B), zeros(chunk, B)
    )  # fmt: skip
    ys, dys, dus, ddts = zeros(chunk, B), zeros(chunk, B), zeros(chunk, B), zeros(chunk, B)
    # the state before the chunk and after each token, and the factors between
    hs = np.zeros((chunk + 1, dstate, LANES), B.dtype)
    factors = np.zeros((chunk, dstate, LANES), B.dtype)
    # gradient of the state after a token, and its part that comes from later tokens
    dh, dlater = zeros(dstate, B), zeros(dstate, B)
    # sums over a chunk go into those over all: one sum of thousands of terms would lose digits
    dA_chunk, dD_chunk, dbias_chunk = zeros(dstate, B), zeros(1, B), zeros(1, B)
    dA_all, dD_all, dbias_all = zeros(dstate, B), zeros(1, B), zeros(1, B)
    i_chunk = 0
    for i_seq in range(len(cu_seqlens) - 1):
        start, end = cu_seqlens[i_seq], cu_seqlens[i_seq + 1]
        num_chunks = (end - start + chunk - 1) // chunk
        dlater[:] = 0
        if len(dfinal_states[0]):
            load_rows(dlater, dfinal_states, i_seq * dstate, dstate, first, lanes)
        for k in range(num_chunks - 1, -1, -1):
            begin = start + k * chunk
            steps = min(chunk, end - begin)
            hs[0] = 0
            if k > 0:
                load_rows(hs[0], chunk_states, (i_chunk + k - 1) * dstate, dstate, first, lanes)
            elif len(initial_states[0]):
                load_rows(hs[0], initial_states, i_seq * dstate, dstate, first, lanes)
            load_rows(xs, x, begin, steps, first, lanes)
            load_rows(vs, dt, begin, steps, first, lanes)
            load_rows(dys, dy, begin, steps, first, lanes)
            to_step_sizes(dts, vs, bias, steps, dt_softplus)
            for i in range(steps):
                for d in range(LANES):
                    us[i, d] = dts[i, d] * xs[i, d]
                    ys[i, d] = skip[0, d] * xs[i, d]
                for n in range(dstate):
                    b, c = B[begin + i, n], C[begin + i, n]
                    for d in range(LANES):
                        factor = exp2(dts[i, d] * decay[n, d])
                        state = factor * hs[i, n, d] + us[i, d] * b
                        factors[i, n, d] = factor
                        hs[i + 1, n, d] = state
                        ys[i, d] += state * c
            if len(z[0]):
                load_rows(zs, z, begin, steps, first, lanes)
                for i in range(steps):
                    for d in range(LANES):
                        ys[i, d] *= dys[i, d] * silu_slope(zs[i, d])
                        dys[i, d] *= silu(zs[i, d])
                store_rows(dz, begin, steps, first, lanes, ys)

            dA_chunk[:] = 0
            dD_chunk[:] = 0
            dbias_chunk[:] = 0
            dus[:] = 0
            ddts[:] = 0
            for i in range(steps - 1, -1, -1):
                for n in range(dstate):
                    b, c = B[begin + i, n], C[begin + i, n]
                    for d in range(LANES):
                        dafter = dlater[n, d] + dys[i, d] * c
                        dbefore = dafter * factors[i, n, d]
                        dexponent = dbefore * hs[i, n, d]
                        dh[n, d] = dafter
                        dlater[n, d] = dbefore
                        dus[i, d] += dafter * b
                        ddts[i, d] += dexponent * rates[n, d]
                        dA_chunk[n, d] += dexponent * dts[i, d]
                _dot_rows(dB[block, begin + i], dh, us, i)
                _dot_rows(dC[block, begin + i], hs[i + 1], dys, i)
            for i in range(steps):
                for d in range(LANES):
                    ddts[i, d] += dus[i, d] * xs[i, d]
                    dus[i, d] = dus[i, d] * dts[i, d] + dys[i, d] * skip[0, d]
                    dD_chunk[0, d] += dys[i, d] * xs[i, d]
                if dt_softplus:
                    for d in range(LANES):
                        ddts[i, d] *= sigmoid(vs[i, d])
                for d in range(LANES):
                    dbias_chunk[0, d] += ddts[i, d]
            store_rows(dx, begin, steps, first, lanes, dus)
            store_rows(ddt, begin, steps, first, lanes, ddts)
            dA_all += dA_chunk
            dD_all += dD_chunk
            dbias_all += dbias_chunk
        i_chunk += num_chunks - 1
        if len(dinitial_states[0]):
            store_rows(dinitial_states, i_seq * dstate, dstate, first, lanes, dlater)
    store_rows(dA, 0, dstate, first, lanes, dA_all)
    store_rows(dD, 0, 1, first, lanes, dD_all)
    store_rows(ddt_bias, 0, 1, first, lanes, dbias_all)


@njit(**INLINED | dict(fastmath={"contract", "reassoc"}))
def _dot_rows(products, tile, row, i):
    """Multiply every row of a tile with row i of another; the sums' order is the compiler's."""
    for n in range(len(tile)):
        total = row.dtype.type(0)
        for d in range(LANES):
            total += tile[n, d] * row[i, d]
        products[n] = total


def scan_bwd(
    dy: Tensor, dfinal_states: Tensor | None,
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor, dt_softplus: bool,
    chunk: int, chunk_states: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Run the backward kernel: the gradients of x to initial_states, in their order."""
    (total, dim), dstate = x.shape, A.shape[1]
    dx, ddt, dz = (None if t is None else A.new_empty(total, dim) for t in (x, dt, z))
    dA_t, dD, ddt_bias = A.new_empty(dstate, dim), A.new_empty(1, dim), A.new_empty(1, dim)
    dinitial_states = None
    if initial_states is not None:
        dinitial_states = A.new_empty(len(initial_states) * dstate, dim)
    # parts of the blocks of channels
    dB, dC = A.new_empty(2, count_blocks(dim), total, dstate)
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus, chunk)
    incoming = (as_rows(t, A.dtype) for t in (chunk_states, dy, state_rows(dfinal_states)))
    outputs = (as_rows(t, A.dtype) for t in (dx, ddt, dA_t, dD, dz, ddt_bias, dinitial_states))
    run_blocks(
        _scan_bwd_kernel, dim, *kernel_inputs(*inputs), *incoming, *outputs, dB.numpy(), dC.numpy()
    )
    if dinitial_states is not None:
        dinitial_states = dinitial_states.view(len(initial_states), dstate, dim).mT
    grads = (dx, ddt, dA_t.mT, dB.sum(0), dC.sum(0), dD[0], dz, ddt_bias[0], dinitial_states)
    return tuple(None if t is None else grad.to(t.dtype) for t, grad in zip(inputs, grads))
