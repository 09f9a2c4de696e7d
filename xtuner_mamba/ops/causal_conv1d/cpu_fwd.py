"""Causal depthwise conv1d over packed documents on the CPU: the forward kernel.

A kernel walks all tokens of a block of channels, document by document, chunk by chunk. The rows of
a chunk are led by the ``width - 1`` before them: of the chunk before, or of the initial state.
"""

import torch
from numba import njit
from torch import Tensor

from xtuner_mamba.ops.cpu_math import CALLED, silu
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
def _conv_fwd_kernel(
    block, dim, x, weight, bias, initial_states, cu_seqlens, width, has_silu, chunk,
    y, final_states,
):  # fmt: skip
    first = block * LANES
    lanes = min(LANES, dim - first)
    taps, offset = zeros(width, y[0]), zeros(1, y[0])
    load_rows(taps, weight, 0, width, first, lanes)
    load_rows(offset, bias, 0, 1, first, lanes)
    num_leading = width - 1
    led, ys = zeros(num_leading + chunk, y[0]), zeros(chunk, y[0])
    for i_seq in range(len(cu_seqlens) - 1):
        start, end = cu_seqlens[i_seq], cu_seqlens[i_seq + 1]
        led[:num_leading] = 0
        if len(initial_states[0]):
            load_rows(led, initial_states, i_seq * num_leading, num_leading, first, lanes)
        for begin in range(start, end, chunk):
            steps = min(chunk, end - begin)
            load_rows(led[num_leading:], x, begin, steps, first, lanes)
            convolve(ys, led, taps, offset, steps)
            for i in range(steps):
                # while the activation computes
                prefetch_row(y, begin + i, first)
                prefetch_row(x, begin + steps + i, first)
                if has_silu:
                    for d in range(LANES):
                        ys[i, d] = silu(ys[i, d])
            store_rows(y, begin, steps, first, lanes, ys)
            move_rows_up(led, steps, num_leading)
        if len(final_states[0]):
            store_rows(final_states, i_seq * num_leading, num_leading, first, lanes, led)


@njit(**CALLED)
def convolve(ys, led, taps, offset, steps):
    """Write the filter's answers, before the activation, to ``ys``."""
    for i in range(steps):
        for d in range(LANES):
            ys[i, d] = offset[0, d]
        for k in range(len(taps)):
            for d in range(LANES):
                ys[i, d] += taps[k, d] * led[i + k, d]


@njit(**CALLED)
def move_rows_up(tile, steps, count):
    """Copy ``count`` rows from row ``steps`` on to the top; they may overlap."""
    for i in range(count):
        for d in range(LANES):
            tile[i, d] = tile[steps + i, d]


def kernel_inputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor | None,
    cu_seqlens: Tensor, activation: str | None, chunk: int,
) -> tuple:  # fmt: skip
    """Return the arguments that both kernels begin with, in the dtype that sums are taken in."""
    dim, width = weight.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    bias = x.new_zeros(dim) if bias is None else bias
    return (
        as_rows(x, dtype), as_rows(weight.mT, dtype), as_rows(bias[None], dtype),
        as_rows(state_rows(initial_states), dtype), cu_seqlens.numpy(), width,
        activation == "silu", chunk,
    )  # fmt: skip


def conv_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor | None,
    cu_seqlens: Tensor, activation: str | None, chunk: int, *, return_final_states: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run the forward kernel: y and, if asked for, the final states."""
    (total, dim), num_leading, num_seqs = x.shape, weight.shape[1] - 1, len(cu_seqlens) - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty(total, dim, dtype=dtype)
    final_states = None
    if return_final_states:
        final_states = torch.empty(num_seqs * num_leading, dim, dtype=dtype)
    run_blocks(
        _conv_fwd_kernel, dim,
        *kernel_inputs(x, weight, bias, initial_states, cu_seqlens, activation, chunk),
        as_rows(y, dtype), as_rows(final_states, dtype),
    )  # fmt: skip
    if final_states is not None:
        final_states = final_states.view(num_seqs, num_leading, dim).mT.to(x.dtype)
    return y.to(x.dtype), final_states
