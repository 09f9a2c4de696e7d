"""Selective scan over packed documents: the Triton kernels as an autograd function."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.ops.selective_scan.triton_bwd import _scan_bwd
from xtuner_mamba.ops.selective_scan.triton_fwd import _scan_fwd
from xtuner_mamba.ops.triton_support import check_triton_takes, with_unit_stride


def selective_scan_triton(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor, dt_softplus: bool,
    *, return_final_states: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.selective_scan`; the rows are laid end to end."""
    check_triton_takes(x, "take impl='cpu' or impl='reference'")
    # kernels are launched on the current device, which need not be that of x
    with torch.cuda.device_of(x):
        return SelectiveScanFunction.apply(
            x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus,
            return_final_states,
        )  # fmt: skip


class SelectiveScanFunction(torch.autograd.Function):
    """Saves the inputs and the state every ``CHUNK`` tokens; all other states are recomputed."""

    @staticmethod
    def forward(
        ctx, x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus,
        return_final_states,
    ):  # fmt: skip
        x, dt, z = with_unit_stride(x), with_unit_stride(dt), with_unit_stride(z)
        ctx.BC_dtypes = B.dtype, C.dtype
        # the layout of the kernels: B and C side by side, states with the channels innermost
        BC = torch.cat((B, C), 1).float()
        A = A.t().contiguous()
        if initial_states is not None:
            initial_states = initial_states.mT.contiguous()
        # long documents first, so that none starts when all others are done
        order = cu_seqlens.diff().argsort(descending=True, stable=True)

        args = x, dt, A, BC, D, z, dt_bias, initial_states, cu_seqlens, order
        y, final_states, chunk_states = _scan_fwd(
            *args, dt_softplus,
            return_final_states=return_final_states,
            keep_chunk_states=any(ctx.needs_input_grad),
        )  # fmt: skip
        ctx.save_for_backward(*args, chunk_states)
        ctx.dt_softplus = dt_softplus
        ctx.set_materialize_grads(False)
        return y, None if final_states is None else final_states.mT.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal_states):
        x, _, _, _, D, _, dt_bias, initial_states, *_ = args = ctx.saved_tensors
        if dy is None:
            dy = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        if dfinal_states is not None:
            dfinal_states = dfinal_states.mT.contiguous()
        _, _, needs_dA, needs_dB, needs_dC, _, needs_dz, *_ = ctx.needs_input_grad
        dx, ddt, dA, dBC, dD, dz, ddt_bias, dinitial_states = _scan_bwd(
            *args[:-1], ctx.dt_softplus, args[-1], with_unit_stride(dy), dfinal_states,
            needs_dA=needs_dA, needs_dBC=needs_dB or needs_dC, needs_dz=needs_dz,
        )  # fmt: skip
        dB = dC = None
        if dBC is not None:
            dB, dC = (d.to(dtype) for d, dtype in zip(dBC.chunk(2, 1), ctx.BC_dtypes))
        dA = None if dA is None else dA.t()
        dD = None if D is None else dD.to(D.dtype)
        ddt_bias = None if dt_bias is None else ddt_bias.to(dt_bias.dtype)
        if initial_states is not None:
            dinitial_states = dinitial_states.mT.to(initial_states.dtype)
        return dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states, None, None, None
