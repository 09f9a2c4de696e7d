"""Sum of a residual stream and of what a layer adds to it, in another dtype.

PyTorch adds tensors of two dtypes element by element; this kernel moves whole vectors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.ops.triton_support import cdiv, check_triton_takes

_BLOCK = 4096
# elements in whose multiples a size must come to be masked by whole vectors
_VECTOR = 16


def add_to_residual(residual: Tensor, update: Tensor) -> Tensor:
    """Add on a GPU, as ``residual + update`` would.

    Args:
        residual: ``(batch, seqlen, hidden)``, in the wider dtype.
        update: ``(batch, seqlen, hidden)``.

    Returns:
        The sum in the dtype of ``residual``. Differentiable in both.

    Raises:
        ValueError: The shapes differ, or the kernel does not take a dtype.
        RuntimeError: They are not on a GPU, and Triton does not interpret.
    """
    if residual.shape != update.shape:
        raise ValueError(
            f"update must have the shape of residual, {tuple(residual.shape)}, got "
            f"{tuple(update.shape)}"
        )
    for tensor in (residual, update):
        check_triton_takes(tensor, "add them in plain PyTorch")
    # kernels are launched on the current device, which need not be that of residual
    with torch.cuda.device_of(residual):
        return AddToResidualFunction.apply(residual, update)


class AddToResidualFunction(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx, residual, update):
        ctx.update_dtype = update.dtype
        residual, update = residual.contiguous(), update.contiguous()
        total = torch.empty_like(residual)
        size = residual.numel()
        vector = 1 if size % _VECTOR else _VECTOR
        _add_kernel[(cdiv(size, _BLOCK),)](
            residual, update, total, size // vector, VECTOR=vector, BLOCK=_BLOCK, num_warps=8
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal):
        return dtotal, dtotal.to(ctx.update_dtype)


# changes from step to step: a kernel for each of its divisors would be compiled in turn
@triton.jit(do_not_specialize=["num_vectors"])
def _add_kernel(residual, update, result, num_vectors, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_vectors.to(tl.int64) * VECTOR
    b_residual = tl.load(residual + offsets, mask=mask)
    b_update = tl.load(update + offsets, mask=mask)
    tl.store(result + offsets, b_residual.to(tl.float32) + b_update.to(tl.float32), mask=mask)
