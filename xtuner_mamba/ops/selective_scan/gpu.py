"""Selective scan over packed documents: a family of GPU kernels as an autograd function."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.ops.parts import GradientPart
from xtuner_mamba.ops.selective_scan.chunks import (
    adjoints_after_chunks,
    schedule_documents,
    states_before_chunks,
)
from xtuner_mamba.ops.selective_scan.gpu_layout import lay_out_weights, sum_gradients
from xtuner_mamba.ops.selective_scan.recomputation import is_backward_next


class Kernels(NamedTuple):
    """What a family brings. A is ``(dstate, dim)``, B and C side by side, states ``(…, dim)``."""

    prepare: Callable
    """Return rows ``(total, dim)`` as the kernels read them, copied only where need be."""
    forward: Callable
    """Write y, return the final states if asked for, and what the backward is to be given."""
    backward: Callable
    """Write dz and y, return dx, ddt, the parts of other gradients and dinitial_states."""


def scan_on_gpu(
    kernels: Kernels, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor,
    dt_softplus: bool, *, A_is_log: bool, return_final_states: bool,
    out_proj: tuple[Tensor | None, Tensor | None], dz_out: GradientPart | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.selective_scan`."""
    # kernels are launched on the current device, which need not be that of x
    with torch.cuda.device_of(x):
        return SelectiveScanFunction.apply(
            kernels, x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus,
            *out_proj, A_is_log, return_final_states, dz_out,
        )  # fmt: skip


class SelectiveScanFunction(torch.autograd.Function):
    """Saves the inputs, the states before the chunks of long documents, and what kernels keep.

    What a linear layer that follows multiplies is the backward's to make: its kernels run through
    the states anyway.
    """

    @staticmethod
    def forward(
        ctx, kernels, x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus,
        out_weight, out_bias, A_is_log, return_final_states, dz_out,
    ):  # fmt: skip
        # the rows are laid end to end here, where autograd notes down no views
        ctx.rows, ctx.BC_dtypes = x.shape[:2], (B.dtype, C.dtype)
        x, dt, B, C = x.flatten(0, 1), dt.flatten(0, 1), B.flatten(0, 1), C.flatten(0, 1)
        x, dt = kernels.prepare(x), kernels.prepare(dt)
        if z is not None:
            z = kernels.prepare(z.flatten(0, 1))
        # read channel by channel
        D, dt_bias = (None if t is None else t.contiguous() for t in (D, dt_bias))
        A, BC = lay_out_weights(A, B, C, A_is_log=A_is_log)
        ctx.initial_dtype = None if initial_states is None else initial_states.dtype
        if initial_states is not None:
            initial_states = initial_states.mT.contiguous()
        schedule = schedule_documents(cu_seqlens, x.shape[1])
        chunks = schedule.chunks
        if chunks is not None:
            initial_states = states_before_chunks(
                x, dt, A, BC, dt_bias, initial_states, chunks, dt_softplus
            )

        args = x, dt, A, BC, D, z, dt_bias, initial_states
        # nobody reads what is recomputed
        needs_y = out_weight is None or not is_backward_next()
        # a tensor of its own, and no view of the rows: somebody may want to write into it
        y = x.new_empty(*ctx.rows, x.shape[1]) if needs_y else None
        final_states, kept = kernels.forward(
            *args, schedule, dt_softplus, y,
            return_final_states=return_final_states,
            needs_backward=any(ctx.needs_input_grad),
            backward_follows=is_backward_next(),
        )  # fmt: skip
        if y is None:
            y = x.new_empty(*ctx.rows, len(out_weight))
        elif out_weight is not None:
            y = F.linear(y, out_weight, out_bias)
        if final_states is not None:
            if chunks is not None:
                final_states = final_states[chunks.last]
            final_states = final_states.mT.contiguous()
        # never None: a checkpoint must find as many tensors in the run that keeps something
        kept = A.new_empty(0) if kept is None else kept
        # the boundaries, too: autograd notices if somebody has written into them
        ctx.save_for_backward(*args, out_weight, kept, schedule.cu_seqlens)
        ctx.kernels, ctx.schedule, ctx.dt_softplus = kernels, schedule, dt_softplus
        ctx.A_is_log, ctx.dz_out = A_is_log, dz_out
        ctx.set_materialize_grads(False)
        return y, final_states

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dfinal_states):
        # read once: activation checkpointing lets a tensor be unpacked a single time
        *args, out_weight, kept, _ = ctx.saved_tensors
        kept = kept if kept.ndim > 1 else None
        x, dt, A, BC, D, z, dt_bias, _ = args
        chunks = ctx.schedule.chunks
        if dout is None:
            dy = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        else:
            dout = dout.flatten(0, 1)
            dy = ctx.kernels.prepare(dout if out_weight is None else dout @ out_weight)
        if dfinal_states is not None:
            dfinal_states = dfinal_states.mT.contiguous()
        if chunks is not None:
            dfinal_states = adjoints_after_chunks(
                dy, dt, A, BC, z, dt_bias, dfinal_states, chunks, ctx.dt_softplus
            )
        _, _, _, needs_dA, needs_dB, needs_dC, _, needs_dz, _, needs_dinitial_states, *_ = (
            ctx.needs_input_grad
        )
        needs_dweight, needs_dbias = (
            needed and dout is not None for needed in ctx.needs_input_grad[12:14]
        )
        dz = _allocate_dz(z, ctx.dz_out) if needs_dz else None
        y = x.new_empty(x.shape) if needs_dweight else None
        dx, ddt, parts, dinitial_states = ctx.kernels.backward(
            *args, ctx.schedule, ctx.dt_softplus, kept, dy, dfinal_states, dz, y,
            needs_dA=needs_dA, needs_dBC=needs_dB or needs_dC,
            needs_dinitial_states=needs_dinitial_states,
        )  # fmt: skip
        dweight = dout.t() @ y if needs_dweight else None
        dbias = dout.sum(0) if needs_dbias else None
        dA = A.new_empty(A.shape[::-1]) if needs_dA else None
        dB, dC = (
            A.new_empty((*ctx.rows, A.shape[0]), dtype=dtype) if needed else None
            for needed, dtype in zip((needs_dB, needs_dC), ctx.BC_dtypes)
        )
        dD, ddt_bias = (None if t is None else torch.empty_like(t) for t in (D, dt_bias))
        sum_gradients(parts, A, dA, dB, dC, dD, ddt_bias, A_is_log=ctx.A_is_log)
        if needs_dinitial_states:
            if chunks is not None:
                dinitial_states = dinitial_states[chunks.cu_chunks[:-1]]
            dinitial_states = dinitial_states.mT.to(ctx.initial_dtype)
        dx, ddt = dx.view(*ctx.rows, -1), ddt.view(*ctx.rows, -1)
        if dz is not None:
            dz = dz.view(*ctx.rows, -1)
        return (
            None, dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states, None, None,
            dweight, dbias, None, None, None,
        )  # fmt: skip


def _allocate_dz(z: Tensor, dz_out: GradientPart | None) -> Tensor:
    """Return memory for the gradient of z, ``(total, dim)``."""
    if dz_out is None:
        return z.new_empty(z.shape)
    return dz_out.allocate().view(z.shape)
