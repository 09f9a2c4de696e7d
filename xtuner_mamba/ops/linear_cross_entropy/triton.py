"""Cross entropy of a linear head, a slice of tokens at a time: the Triton kernel and its function.

The gradients are computed in the forward, where a slice of the logits is at hand, and scaled in
the backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.layout import IGNORE_INDEX
from xtuner_mamba.ops.triton_support import cdiv, check_triton_takes, next_power_of_2

# logits of a slice: fewer slices round the weight's gradient less often and read it less often
_MAX_SLICE_BYTES = 2**30


def linear_cross_entropy_triton(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """See :func:`xtuner_mamba.ops.linear_cross_entropy`."""
    check_triton_takes(x, "take impl='reference'")
    # kernels are launched on the current device, which need not be that of x
    with torch.cuda.device_of(x):
        return LinearCrossEntropyFunction.apply(x, weight, targets, torch.is_grad_enabled())


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Saves the gradients of the sum, in float32 that of the weight."""

    @staticmethod
    def forward(ctx, x, weight, targets, needs_grad):
        needs_dx, needs_dweight = (needs_grad and needs for needs in ctx.needs_input_grad[:2])
        loss, dx, dweight = _linear_cross_entropy_fwd(
            x, weight, targets, needs_dx=needs_dx, needs_dweight=needs_dweight
        )
        ctx.save_for_backward(dx, dweight)
        ctx.dtype = x.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        dx, dweight = (
            None if d is None else _scale(d, dloss, ctx.dtype) for d in ctx.saved_tensors
        )
        return dx, dweight, None, None


def _scale(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in float32 in one pass: a product of 16 bits would round the factor too."""
    return torch.mul(gradient, factor[None], out=gradient.new_empty(gradient.shape, dtype=dtype))


@triton.jit
def _cross_entropy_kernel(
    logits, targets, losses, vocab: tl.constexpr,
    IGNORE: tl.constexpr, NEEDS_GRAD: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0)
    p_logits = logits + i_t.to(tl.int64) * vocab
    i_target = tl.load(targets + i_t)
    if i_target == IGNORE:
        # filled, not multiplied by 0: what stands there may be NaN
        tl.store(losses + i_t, 0.0)
        if NEEDS_GRAD:
            for i_v in range(0, vocab, BLOCK_V):
                o_v = i_v + tl.arange(0, BLOCK_V)
                b_zero = tl.zeros((BLOCK_V,), dtype=logits.dtype.element_ty)
                tl.store(p_logits + o_v, b_zero, mask=o_v < vocab)
    else:
        b_max, b_sum = float("-inf"), 0.0
        for i_v in range(0, vocab, BLOCK_V):
            o_v = i_v + tl.arange(0, BLOCK_V)
            b_v = tl.load(p_logits + o_v, mask=o_v < vocab, other=float("-inf")).to(tl.float32)
            b_new = tl.maximum(b_max, tl.max(b_v, 0))
            b_sum = b_sum * tl.exp(b_max - b_new) + tl.sum(tl.exp(b_v - b_new), 0)
            b_max = b_new
        b_log_sum = tl.log(b_sum)
        b_target = tl.load(p_logits + i_target).to(tl.float32)
        tl.store(losses + i_t, b_log_sum - (b_target - b_max))
        if NEEDS_GRAD:
            for i_v in range(0, vocab, BLOCK_V):
                o_v = i_v + tl.arange(0, BLOCK_V)
                m_v = o_v < vocab
                b_v = tl.load(p_logits + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
                b_grad = tl.exp(b_v - b_max) / b_sum - tl.where(o_v == i_target, 1.0, 0.0)
                tl.store(p_logits + o_v, b_grad, mask=m_v)


def _linear_cross_entropy_fwd(
    x: Tensor, weight: Tensor, targets: Tensor, *, needs_dx: bool, needs_dweight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    total, vocab = len(x), len(weight)
    losses = torch.empty(total, dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if needs_dx else None
    dweight = torch.zeros_like(weight, dtype=torch.float32) if needs_dweight else None
    num_slices = cdiv(total * vocab * x.element_size(), _MAX_SLICE_BYTES)
    # slices of about one size, none too short to fill the GPU
    slice_t = cdiv(total, num_slices)
    for first in range(0, total, slice_t):
        rows = slice(first, min(first + slice_t, total))
        logits = x[rows] @ weight.t()
        _cross_entropy_kernel[(len(logits),)](
            # a constant, so that rows of a multiple of 8 are known to be that of whole vectors
            logits, targets[rows], losses[rows], vocab=vocab,
            IGNORE=IGNORE_INDEX, NEEDS_GRAD=needs_dx or needs_dweight,
            BLOCK_V=min(4096, next_power_of_2(vocab)), num_warps=8,
        )  # fmt: skip
        if needs_dx:
            torch.mm(logits, weight, out=dx[rows])
        if needs_dweight:
            dweight += logits.t() @ x[rows]
        # else the next slice is made before this one goes
        del logits
    return losses.sum(), dx, dweight
