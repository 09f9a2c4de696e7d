"""Selective scan over packed documents on the CPU: compiled kernels as an autograd function."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.ops.cpu_support import check_cpu_takes
from xtuner_mamba.ops.selective_scan.cpu_bwd import scan_bwd
from xtuner_mamba.ops.selective_scan.cpu_fwd import scan_fwd

# tokens of a document from one saved state to the next
_CHUNK = 64


def selective_scan_cpu(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor, dt_softplus: bool,
    *, return_final_states: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.selective_scan`; the rows are laid end to end."""
    check_cpu_takes(x)
    return SelectiveScanFunction.apply(
        x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus, return_final_states
    )


class SelectiveScanFunction(torch.autograd.Function):
    """Saves the inputs and a state every few tokens; the states between are recomputed."""

    @staticmethod
    def forward(ctx, *args):
        *inputs, dt_softplus, return_final_states = args
        y, final_states, chunk_states = scan_fwd(
            *inputs, dt_softplus, _CHUNK, return_final_states=return_final_states
        )
        ctx.save_for_backward(*inputs, chunk_states)
        ctx.options = dt_softplus, _CHUNK
        return y, final_states

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal_states):
        *inputs, chunk_states = ctx.saved_tensors
        grads = scan_bwd(dy, dfinal_states, *inputs, *ctx.options, chunk_states)
        return *grads, None, None, None
