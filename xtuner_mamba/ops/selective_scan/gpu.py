"""Selective scan over packed documents: a family of GPU kernels as an autograd function."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.ops.halves import GradientHalf
from xtuner_mamba.ops.selective_scan.chunks import (
    adjoints_after_chunks,
    schedule_documents,
    states_before_chunks,
)
from xtuner_mamba.ops.selective_scan.recomputation import is_backward_next


class Kernels(NamedTuple):
    """What a family brings. A is ``(dstate, dim)``, B and C side by side, states ``(…, dim)``."""

    prepare: Callable
    """Return rows ``(total, dim)`` as the kernels read them, copied only where need be."""
    forward: Callable
    """Return y and the final states if asked for, and what the backward is to be given, or None."""
    backward: Callable
    """Write dz and y, return dx, ddt, dA, dBC, dD, ddt_bias and dinitial_states."""


def scan_on_gpu(
    kernels: Kernels, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor,
    dt_softplus: bool, *, return_final_states: bool,
    out_proj: tuple[Tensor | None, Tensor | None], dz_out: GradientHalf | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.selective_scan`; the rows are laid end to end."""
    # kernels are launched on the current device, which need not be that of x
    with torch.cuda.device_of(x):
        return SelectiveScanFunction.apply(
            kernels, x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus,
            *out_proj, return_final_states, dz_out,
        )  # fmt: skip


class SelectiveScanFunction(torch.autograd.Function):
    """Saves the inputs, the states before the chunks of long documents, and what kernels keep.

    What a linear layer that follows multiplies is the backward's to make: its kernels run through
    the states anyway.
    """

    @staticmethod
    def forward(
        ctx, kernels, x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus,
        out_weight, out_bias, return_final_states, dz_out,
    ):  # fmt: skip
        x, dt, z = kernels.prepare(x), kernels.prepare(dt), kernels.prepare(z)
        ctx.BC_dtypes = B.dtype, C.dtype
        ctx.initial_dtype = None if initial_states is None else initial_states.dtype
        # the layout of the kernels: B and C side by side, states with the channels innermost
        BC = torch.cat((B, C), 1).float()
        A = A.t().contiguous()
        if initial_states is not None:
            initial_states = initial_states.mT.contiguous()
        schedule = schedule_documents(cu_seqlens, x.shape[1])
        chunks = schedule.chunks
        if chunks is not None:
            initial_states = states_before_chunks(
                x, dt, A, BC, dt_bias, initial_states, chunks, dt_softplus
            )

        args = x, dt, A, BC, D, z, dt_bias, initial_states
        y, final_states, kept = kernels.forward(
            *args, schedule, dt_softplus,
            # nobody reads what is recomputed
            needs_y=out_weight is None or not is_backward_next(),
            return_final_states=return_final_states,
            needs_backward=any(ctx.needs_input_grad),
            backward_follows=is_backward_next(),
        )  # fmt: skip
        if y is None:
            y = x.new_empty(len(x), len(out_weight))
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
        ctx.dz_out = dz_out
        ctx.set_materialize_grads(False)
        return y, final_states

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dfinal_states):
        # read once: activation checkpointing lets a tensor be unpacked a single time
        *args, out_weight, kept, _ = ctx.saved_tensors
        kept = kept if kept.ndim == 3 else None
        x, dt, A, BC, D, z, dt_bias, _ = args
        chunks = ctx.schedule.chunks
        if dout is None:
            dy = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        else:
            dy = ctx.kernels.prepare(dout if out_weight is None else dout @ out_weight)
        if dfinal_states is not None:
            dfinal_states = dfinal_states.mT.contiguous()
        if chunks is not None:
            dfinal_states = adjoints_after_chunks(
                dy, dt, A, BC, z, dt_bias, dfinal_states, chunks, ctx.dt_softplus
            )
        _, _, _, needs_dA, needs_dB, needs_dC, _, needs_dz, *_ = ctx.needs_input_grad
        needs_dweight, needs_dbias = (
            needed and dout is not None for needed in ctx.needs_input_grad[12:14]
        )
        dz = _allocate_dz(z, ctx.dz_out) if needs_dz else None
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_dweight else None
        dx, ddt, dA, dBC, dD, ddt_bias, dinitial_states = ctx.kernels.backward(
            *args, ctx.schedule, ctx.dt_softplus, kept, dy, dfinal_states, dz, y,
            needs_dA=needs_dA, needs_dBC=needs_dB or needs_dC,
        )  # fmt: skip
        dweight = dout.t() @ y if needs_dweight else None
        dbias = dout.sum(0) if needs_dbias else None
        dB = dC = None
        if dBC is not None:
            dB, dC = (d.to(dtype) for d, dtype in zip(dBC.chunk(2, 1), ctx.BC_dtypes))
        dA = None if dA is None else dA.t()
        dD = None if D is None else dD.to(D.dtype)
        ddt_bias = None if dt_bias is None else ddt_bias.to(dt_bias.dtype)
        if ctx.initial_dtype is None:
            dinitial_states = None
        else:
            if chunks is not None:
                dinitial_states = dinitial_states[chunks.cu_chunks[:-1]]
            dinitial_states = dinitial_states.mT.to(ctx.initial_dtype)
        return (
            None, dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states, None, None,
            dweight, dbias, None, None,
        )  # fmt: skip


def _allocate_dz(z: Tensor, dz_out: GradientHalf | None) -> Tensor:
    """Return memory for the gradient of z, ``(total, dim)``."""
    if dz_out is None:
        return torch.empty(z.shape, dtype=z.dtype, device=z.device)
    return dz_out.allocate().view(z.shape)
