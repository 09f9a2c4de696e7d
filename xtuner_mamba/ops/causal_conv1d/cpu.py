"""Causal depthwise conv1d over packed documents on the CPU: compiled kernels, and autograd."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.ops.causal_conv1d.cpu_bwd import conv_bwd
from xtuner_mamba.ops.causal_conv1d.cpu_fwd import conv_fwd
from xtuner_mamba.ops.cpu_support import check_cpu_takes
from xtuner_mamba.ops.parts import GradientPart

# tokens whose rows a kernel holds at a time
_CHUNK = 64


def causal_conv1d_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor | None,
    cu_seqlens: Tensor, activation: str | None, *, return_final_states: bool,
    dx_out: GradientPart | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.causal_conv1d`; ``dx_out`` is not made use of."""
    check_cpu_takes(x)
    y, final_states = CausalConv1dFunction.apply(
        x.flatten(0, 1), weight, bias, initial_states, cu_seqlens, activation, return_final_states
    )
    y = y.view(x.shape)
    return y, y, final_states


class CausalConv1dFunction(torch.autograd.Function):
    """Saves the inputs; what stands before the activation is recomputed."""

    @staticmethod
    def forward(ctx, *args):
        *inputs, activation, return_final_states = args
        ctx.save_for_backward(*inputs)
        ctx.options = activation, _CHUNK
        return conv_fwd(*inputs, *ctx.options, return_final_states=return_final_states)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal_states):
        grads = conv_bwd(dy, dfinal_states, *ctx.saved_tensors, *ctx.options)
        return *grads, None, None, None
