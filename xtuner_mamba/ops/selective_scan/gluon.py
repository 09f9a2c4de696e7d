"""Selective scan over packed documents: the Gluon kernels as an autograd function."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.ops.selective_scan.gluon_bwd import _scan_bwd
from xtuner_mamba.ops.selective_scan.gluon_fwd import _scan_fwd
from xtuner_mamba.ops.selective_scan.gluon_support import why_not_gluon


def selective_scan_gluon(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor, dt_softplus: bool,
    *, return_final_states: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.selective_scan`; the rows are laid end to end."""
    reason = why_not_gluon(x, dt, A, z, len(cu_seqlens) - 1)
    if reason is not None:
        raise ValueError(f"{reason} with impl='gluon'; take impl='triton'")
    return SelectiveScanFunction.apply(
        x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus, return_final_states
    )


class SelectiveScanFunction(torch.autograd.Function):
    """Saves the inputs only; the backward runs the states once more."""

    @staticmethod
    def forward(
        ctx, x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus,
        return_final_states,
    ):  # fmt: skip
        x, dt, z = _aligned(x), _aligned(dt), _aligned(z)
        ctx.BC_dtypes = B.dtype, C.dtype
        # the layout of the kernels: B and C side by side, states with the channels innermost
        BC = torch.cat((B, C), 1).float()
        A = A.t().contiguous()
        if initial_states is not None:
            initial_states = initial_states.mT.contiguous()
        # long documents first, so that none starts when all others are done
        order = cu_seqlens.diff().argsort(descending=True, stable=True)

        args = x, dt, A, BC, D, z, dt_bias, initial_states, cu_seqlens, order
        y, final_states = _scan_fwd(*args, dt_softplus, return_final_states=return_final_states)
        ctx.save_for_backward(*args)
        ctx.dt_softplus = dt_softplus
        ctx.set_materialize_grads(False)
        return y, None if final_states is None else final_states.mT.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal_states):
        # read once: activation checkpointing lets a tensor be unpacked a single time
        x, _, _, _, D, _, dt_bias, initial_states, *_ = args = ctx.saved_tensors
        if dy is None:
            dy = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        if dfinal_states is not None:
            dfinal_states = dfinal_states.mT.contiguous()
        dx, ddt, dA, dBC, dD, dz, ddt_bias, dinitial_states = _scan_bwd(
            *args, ctx.dt_softplus, _aligned(dy), dfinal_states, needs_dz=ctx.needs_input_grad[6]
        )
        dB, dC = (d.to(dtype) for d, dtype in zip(dBC.chunk(2, 1), ctx.BC_dtypes))
        if dinitial_states is not None:
            dinitial_states = dinitial_states.mT.to(initial_states.dtype)
        return (
            dx, ddt, dA.t(), dB, dC, _like(dD, D), dz, _like(ddt_bias, dt_bias), dinitial_states,
            None, None, None,
        )  # fmt: skip


def _aligned(rows: Tensor | None) -> Tensor | None:
    """Copy rows only where they could not be read 16 bytes at a time."""
    if rows is None:
        return None
    in_place = rows.stride(1) == 1 and rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows if in_place else rows.clone(memory_format=torch.contiguous_format)


def _like(gradient: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.to(tensor.dtype)
