"""Causal depthwise conv1d over packed documents on the CPU: the backward kernel.

The gradient of a row is complete when ``width - 1`` tokens more have added to it. The rows that a
chunk leaves incomplete lead the next one, as they do in the forward.
"""

import torch
from numba import njit
from torch import Tensor

from xtuner_mamba.ops.causal_conv1d.cpu_fwd import convolve, kernel_inputs, move_rows_up
from xtuner_mamba.ops.cpu_math import CALLED, silu_slope
from xtuner_mamba.ops.cpu_support import (
    LANES,
    as_rows,
    compile_kernel,
    load_rows,
    run_blocks,
    state_rows,
    store_rows,
    zeros,
)


@compile_kernel
def _conv_bwd_kernel(
    block, dim, x, weight, bias, initial_states, cu_seqlens, width, has_silu, chunk,
    dy, dfinal_states, dx, dweight, dbias, dinitial_states,
):  # fmt: skip
    first = block * LANES
    lanes = min(LANES, dim - first)
    taps, offset = zeros(width, x[0]), zeros(1, x[0])
    load_rows(taps, weight, 0, width, first, lanes)
    load_rows(offset, bias, 0, 1, first, lanes)
    num_leading = width - 1
    led, dled = zeros(num_leading + chunk, x[0]), zeros(num_leading + chunk, x[0])
    ys, dys, dfinals = zeros(chunk, x[0]), zeros(chunk, x[0]), zeros(num_leading, x[0])
    # sums over a chunk go into those over all: one sum of thousands of terms would lose digits
    dtaps_chunk, doffset_chunk = zeros(width, x[0]), zeros(1, x[0])
    dtaps_all, doffset_all = zeros(width, x[0]), zeros(1, x[0])
    for i_seq in range(len(cu_seqlens) - 1):
        start, end = cu_seqlens[i_seq], cu_seqlens[i_seq + 1]
        led[:num_leading] = 0
        dled[:num_leading] = 0
        if len(initial_states[0]):
            load_rows(led, initial_states, i_seq * num_leading, num_leading, first, lanes)
        for begin in range(start, end, chunk):
            steps = min(chunk, end - begin)
            load_rows(led[num_leading:], x, begin, steps, first, lanes)
            load_rows(dys, dy, begin, steps, first, lanes)
            if has_silu:
                convolve(ys, led, taps, offset, steps)
                for i in range(steps):
                    for d in range(LANES):
                        dys[i, d] *= silu_slope(ys[i, d])
            dled[num_leading:] = 0
            dtaps_chunk[:] = 0
            doffset_chunk[:] = 0
            for i in range(steps):
                for k in range(width):
                    for d in range(LANES):
                        dled[i + k, d] += taps[k, d] * dys[i, d]
                        dtaps_chunk[k, d] += led[i + k, d] * dys[i, d]
                for d in range(LANES):
                    doffset_chunk[0, d] += dys[i, d]
            dtaps_all += dtaps_chunk
            doffset_all += doffset_chunk
            _store_led(
                dx, dinitial_states, start, i_seq, num_leading, begin - start, steps, first, lanes,
                dled,
            )  # fmt: skip
            move_rows_up(led, steps, num_leading)
            move_rows_up(dled, steps, num_leading)
        # the last inputs are the final state, too
        if len(dfinal_states[0]):
            load_rows(dfinals, dfinal_states, i_seq * num_leading, num_leading, first, lanes)
            for i in range(num_leading):
                for d in range(LANES):
                    dled[i, d] += dfinals[i, d]
        _store_led(
            dx, dinitial_states, start, i_seq, num_leading, end - start, num_leading, first, lanes,
            dled,
        )  # fmt: skip
    store_rows(dweight, 0, width, first, lanes, dtaps_all)
    store_rows(dbias, 0, 1, first, lanes, doffset_all)


@njit(**CALLED)
def _store_led(
    dx, dinitial_states, start, i_seq, num_leading, position, count, first, lanes, dled
):  # fmt: skip
    """Store gradients of a document's led rows, those from ``position`` on.

    The first ``num_leading`` of them are its initial state, the others its tokens.
    """
    num_states = min(max(num_leading - position, 0), count)
    if len(dinitial_states[0]):
        i_row = i_seq * num_leading + position
        store_rows(dinitial_states, i_row, num_states, first, lanes, dled)
    i_row = start + position + num_states - num_leading
    store_rows(dx, i_row, count - num_states, first, lanes, dled[num_states:])


def conv_bwd(
    dy: Tensor, dfinal_states: Tensor | None,
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor | None,
    cu_seqlens: Tensor, activation: str | None, chunk: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Run the backward kernel: dx, dweight, dbias and dinitial_states."""
    dim, width = weight.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    dx = torch.empty(len(x), dim, dtype=dtype)
    dweight, dbias = torch.empty(width, dim, dtype=dtype), torch.empty(1, dim, dtype=dtype)
    dinitial_states = None
    if initial_states is not None:
        dinitial_states = torch.empty(len(initial_states) * (width - 1), dim, dtype=dtype)
    outputs = (dx, dweight, dbias, dinitial_states)
    run_blocks(
        _conv_bwd_kernel, dim,
        *kernel_inputs(x, weight, bias, initial_states, cu_seqlens, activation, chunk),
        as_rows(dy, dtype), as_rows(state_rows(dfinal_states), dtype),
        *(as_rows(t, dtype) for t in outputs),
    )  # fmt: skip
    if dinitial_states is not None:
        dinitial_states = dinitial_states.view(len(initial_states), width - 1, dim).mT
    grads = (dx, dweight.mT, dbias[0], dinitial_states)
    inputs = (x, weight, bias, initial_states)
    return tuple(None if t is None else grad.to(t.dtype) for t, grad in zip(inputs, grads))
