"""Causal depthwise conv1d over packed documents: the Triton kernels as an autograd function."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.layout import derived_from
from xtuner_mamba.ops.causal_conv1d.triton_bwd import _conv_bwd
from xtuner_mamba.ops.causal_conv1d.triton_fwd import _conv_fwd
from xtuner_mamba.ops.parts import GradientPart
from xtuner_mamba.ops.triton_support import check_triton_takes, with_unit_stride


def causal_conv1d_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor | None,
    cu_seqlens: Tensor, activation: str | None, *, return_final_states: bool,
    dx_out: GradientPart | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.causal_conv1d`."""
    check_triton_takes(x, "take impl='reference'")
    # kernels are launched on the current device, which need not be that of x
    with torch.cuda.device_of(x):
        return CausalConv1dFunction.apply(
            x, weight, bias, initial_states, cu_seqlens, activation, return_final_states, dx_out
        )


class CausalConv1dFunction(torch.autograd.Function):
    """Saves the inputs; what stands before the activation is recomputed."""

    @staticmethod
    def forward(
        ctx, x, weight, bias, initial_states, cu_seqlens, activation, return_final_states, dx_out
    ):
        # the rows are laid end to end here, where autograd notes down no views
        ctx.shape = x.shape
        x = with_unit_stride(x.flatten(0, 1))
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        if initial_states is not None:
            initial_states = initial_states.contiguous()
        args = x, weight, bias, initial_states, cu_seqlens, _documents_of(cu_seqlens, len(x))
        y = x.new_empty(ctx.shape)
        final_states = _conv_fwd(*args, activation, y, return_final_states=return_final_states)
        ctx.save_for_backward(*args)
        ctx.activation, ctx.dx_out = activation, dx_out
        ctx.set_materialize_grads(False)
        # not detached: PyTorch then lets nobody change the one in place and read the other
        return y, y.view_as(y), final_states

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dy_fork, dfinal_states):
        x, weight, bias, *_ = args = ctx.saved_tensors
        if dy is None:
            dy, dy_fork = dy_fork, None
        if dy is None:
            dy = torch.zeros(ctx.shape, dtype=x.dtype, device=x.device)
        dy = with_unit_stride(dy.flatten(0, 1))
        if dy_fork is not None:
            dy_fork = with_unit_stride(dy_fork.flatten(0, 1))
        if dfinal_states is not None:
            dfinal_states = dfinal_states.contiguous()
        needs_dx, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
        if needs_dx and ctx.dx_out is not None:
            dx = ctx.dx_out.allocate()
        else:
            dx = x.new_empty(ctx.shape)
        dweight = torch.empty_like(weight) if needs_dweight else None
        dbias = torch.empty_like(bias) if needs_dbias else None
        dinitial_states = _conv_bwd(
            *args, ctx.activation, dy, dy_fork, dfinal_states, dx.view(x.shape), dweight, dbias
        )
        return dx, dweight, dbias, dinitial_states, *4 * [None]


def _documents_of(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return the document of every token, int32, ``(total,)``; made once for a tensor."""
    known = derived_from(cu_seqlens)
    if "seq_idx" not in known:
        docs = torch.arange(len(cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)
        # output_size spares the host the wait for the sum of the lengths
        known["seq_idx"] = docs.repeat_interleave(cu_seqlens.diff(), output_size=total)
    return known["seq_idx"]
