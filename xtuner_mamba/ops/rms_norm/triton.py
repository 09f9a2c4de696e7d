"""RMS norm at the head of a residual block: the Triton kernels as an autograd function."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.ops.triton_support import (
    cdiv,
    check_triton_takes,
    next_power_of_2,
    with_unit_stride,
)

# tokens that a program of the backward sums the gradient of the weight over
_BLOCK_T = 32


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, residual_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See :func:`xtuner_mamba.ops.rms_norm`."""
    for tensor in (x, weight):
        check_triton_takes(tensor, "take impl='reference'")
    # kernels are launched on the current device, which need not be that of x
    with torch.cuda.device_of(x):
        return RmsNormFunction.apply(x, weight, eps, dtype, residual_dtype)


class RmsNormFunction(torch.autograd.Function):
    """Saves x as it was rounded, and a scale for each token."""

    @staticmethod
    def forward(ctx, x, weight, eps, dtype, residual_dtype):
        # laid end to end here, where autograd notes down no views
        rows = with_unit_stride(x.reshape(-1, x.shape[-1]))
        weight = weight.contiguous()
        y, rounded, scales, residual = _norm_fwd(rows, weight, eps, dtype, residual_dtype)
        ctx.save_for_backward(rounded, scales, weight)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.set_materialize_grads(False)
        return y.view(x.shape), x if residual is rows else residual.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dresidual):
        rounded, scales, weight = ctx.saved_tensors
        if dy is None:
            dx = None if dresidual is None else dresidual.to(ctx.x_dtype)
            return dx, None, None, None, None
        dy = with_unit_stride(dy.reshape(rounded.shape))
        if dresidual is not None:
            dresidual = with_unit_stride(dresidual.reshape(rounded.shape))
        dx, dweight = _norm_bwd(dy, dresidual, rounded, scales, weight, ctx.x_dtype)
        return dx.view(ctx.x_shape), dweight, None, None, None


@triton.jit
def _norm_fwd_kernel(
    x, weight, y, rounded, scales, residual, stride_x, dim, eps,
    ROUND: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < dim
    o_y = i_t * dim + o_d
    b_x = tl.load(x + i_t * stride_x + o_d, mask=m_d, other=0.0)
    if HAS_RESIDUAL:
        tl.store(residual + o_y, b_x, mask=m_d)
    b_rounded = b_x.to(rounded.dtype.element_ty)
    if ROUND:
        tl.store(rounded + o_y, b_rounded, mask=m_d)
    b_x = b_rounded.to(tl.float32)
    b_scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(b_x * b_x, 0) / dim + eps))
    tl.store(scales + i_t, b_scale)
    b_normed = (b_x * b_scale).to(rounded.dtype.element_ty).to(tl.float32)
    b_w = tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    tl.store(y + o_y, b_w * b_normed, mask=m_d)


# changes from step to step: a kernel for each of its divisors would be compiled in turn
@triton.jit(do_not_specialize=["total"])
def _norm_bwd_kernel(
    dy, dresidual, rounded, scales, weight, dx, dweights, stride_dy, stride_dresidual,
    stride_rounded, total, dim,
    HAS_DRESIDUAL: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < dim
    b_w = tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_dw = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for i_t in range(first, tl.minimum(first + BLOCK_T, total)):
        b_x = tl.load(rounded + i_t * stride_rounded + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_dy = tl.load(dy + i_t * stride_dy + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_scale = tl.load(scales + i_t)
        b_normed = b_x * b_scale
        b_dw += b_dy * b_normed.to(rounded.dtype.element_ty).to(tl.float32)
        b_dnormed = b_dy * b_w
        b_dx = b_scale * (b_dnormed - b_normed * (tl.sum(b_dnormed * b_normed, 0) / dim))
        if HAS_DRESIDUAL:
            p_dresidual = dresidual + i_t * stride_dresidual + o_d
            b_dx += tl.load(p_dresidual, mask=m_d, other=0.0).to(tl.float32)
        tl.store(dx + i_t * dim + o_d, b_dx, mask=m_d)
    tl.store(dweights + tl.program_id(0) * dim + o_d, b_dw, mask=m_d)


def _norm_fwd(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, residual_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, dim = x.shape
    # what needs no rounding is handed on without a copy
    rounded = x if dtype == x.dtype else torch.empty((total, dim), dtype=dtype, device=x.device)
    residual = x
    if residual_dtype != x.dtype:
        residual = torch.empty((total, dim), dtype=residual_dtype, device=x.device)
    y_dtype = torch.promote_types(dtype, weight.dtype)
    y = torch.empty((total, dim), dtype=y_dtype, device=x.device)
    scales = torch.empty(total, dtype=torch.float32, device=x.device)
    _norm_fwd_kernel[(total,)](
        x, weight, y, rounded, scales, residual, x.stride(0), dim, eps,
        ROUND=rounded is not x, HAS_RESIDUAL=residual is not x,
        BLOCK_D=next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return y, rounded, scales, residual


def _norm_bwd(
    dy: Tensor, dresidual: Tensor | None, rounded: Tensor, scales: Tensor, weight: Tensor,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total, dim = rounded.shape
    num_blocks = cdiv(total, _BLOCK_T)
    dx = torch.empty((total, dim), dtype=x_dtype, device=dy.device)
    dweights = torch.empty((num_blocks, dim), dtype=torch.float32, device=dy.device)
    _norm_bwd_kernel[(num_blocks,)](
        dy, dresidual, rounded, scales, weight, dx, dweights, dy.stride(0),
        0 if dresidual is None else dresidual.stride(0), rounded.stride(0), total, dim,
        HAS_DRESIDUAL=dresidual is not None,
        BLOCK_D=next_power_of_2(dim), BLOCK_T=_BLOCK_T, num_warps=8,
    )  # fmt: skip
    return dx, dweights.sum(0).to(weight.dtype)
