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
    ahead = getattr(x, "_normed_ahead", None)
    if ahead is not None:
        del x._normed_ahead
        if ahead.key != _key(x, weight, eps, dtype) or residual_dtype != x.dtype:
            ahead = None
    # kernels are launched on the current device, which need not be that of x
    with torch.cuda.device_of(x):
        return RmsNormFunction.apply(x, weight, eps, dtype, residual_dtype, ahead)


def add_before_norm_triton(
    x: Tensor, update: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """See :func:`xtuner_mamba.ops.add_before_norm`."""
    for tensor in (x, update, weight):
        check_triton_takes(tensor, "add and norm in plain PyTorch")
    ahead = NormAhead()
    with torch.cuda.device_of(x):
        total = AddBeforeNormFunction.apply(x, update, weight, eps, dtype, ahead)
    ahead.key = _key(total, weight, eps, dtype)
    total._normed_ahead = ahead
    return total


class NormAhead:
    """What a sum and the norm behind it, two nodes of autograd, hand each other.

    The norm finds it at the sum, as an attribute, and takes it if nothing has changed since.
    """

    key: tuple
    y: Tensor
    rounded: Tensor
    scales: Tensor
    update_dtype: torch.dtype
    dx: Tensor | None = None
    """Gradient that the norm's backward has returned, and whose rounding for the update it is."""
    dupdate: Tensor | None = None


def _key(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple:
    versions = None if x.is_inference() else (x._version, weight._version)
    return id(weight), versions, eps, dtype


class AddBeforeNormFunction(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx, x, update, weight, eps, dtype, ahead):
        ahead.y, ahead.rounded, ahead.scales, total = _norm_fwd(
            _rows_of(x), weight.contiguous(), eps, dtype, x.dtype, _rows_of(update), x.shape
        )
        ahead.update_dtype = update.dtype
        ctx.ahead, ctx.x_dtype = ahead, x.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal):
        ahead = ctx.ahead
        # the very tensor: somebody else's share, or a hook, would have made another
        is_all = dtotal is ahead.dx and dtotal._version == 0
        dupdate = ahead.dupdate if is_all else dtotal.to(ahead.update_dtype)
        ahead.dx = ahead.dupdate = None
        return dtotal, dupdate, None, None, None, None


class RmsNormFunction(torch.autograd.Function):
    """Saves what is normed as it was rounded, and a scale for each token."""

    @staticmethod
    def forward(ctx, x, weight, eps, dtype, residual_dtype, ahead):
        residual = x
        if ahead is None:
            # laid end to end here, where autograd notes down no views
            rows = _rows_of(x)
            y, rounded, scales, made = _norm_fwd(
                rows, weight.contiguous(), eps, dtype, residual_dtype, None, x.shape
            )
            residual = x if made is rows else made
        else:
            y, rounded, scales = ahead.y, ahead.rounded, ahead.scales
            ahead.y = ahead.rounded = ahead.scales = None
        # of one shape, ahead or not: a checkpoint compares those of its two runs
        ctx.save_for_backward(_rows_of(rounded), scales, weight)
        ctx.shape, ctx.x_dtype, ctx.ahead = x.shape, x.dtype, ahead
        ctx.set_materialize_grads(False)
        return y, residual

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dresidual):
        if dy is None:
            dx = None if dresidual is None else dresidual.to(ctx.x_dtype)
            return dx, None, None, None, None, None
        rounded, scales, weight = ctx.saved_tensors
        ahead = ctx.ahead
        dx, dweight, dupdate = _norm_bwd(
            _rows_of(dy), None if dresidual is None else _rows_of(dresidual), rounded,
            scales, weight.contiguous(), ctx.x_dtype, None if ahead is None else ahead.update_dtype,
        )  # fmt: skip
        dx = dx.view(ctx.shape)
        if dupdate is not None:
            ahead.dx, ahead.dupdate = dx, dupdate.view(ctx.shape)
        return dx, dweight, None, None, None, None


def _rows_of(x: Tensor) -> Tensor:
    return with_unit_stride(x.reshape(-1, x.shape[-1]))


@triton.jit
def _norm_fwd_kernel(
    x, weight, update, y, rounded, scales, residual, stride_x, stride_update, dim, eps,
    ROUND: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < dim
    o_y = i_t * dim + o_d
    b_x = tl.load(x + i_t * stride_x + o_d, mask=m_d, other=0.0)
    if update is not None:
        b_update = tl.load(update + i_t * stride_update + o_d, mask=m_d, other=0.0)
        b_x = (b_x.to(tl.float32) + b_update.to(tl.float32)).to(x.dtype.element_ty)
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
    dy, dresidual, rounded, scales, weight, dx, dupdate, dweights, stride_dy, stride_dresidual,
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
        if dupdate is not None:
            tl.store(dupdate + i_t * dim + o_d, b_dx, mask=m_d)
    tl.store(dweights + tl.program_id(0) * dim + o_d, b_dw, mask=m_d)


def _norm_fwd(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, residual_dtype: torch.dtype,
    update: Tensor | None, shape: torch.Size,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the forward: y, what was normed, its scales and the residual, of that shape."""
    total, dim = x.shape
    # what needs no sum and no rounding is handed on without a copy
    residual = x
    if update is not None or residual_dtype != x.dtype:
        residual = torch.empty(shape, dtype=residual_dtype, device=x.device)
    normed = x if update is None else residual
    rounded = normed
    if not dtype == x.dtype == normed.dtype:
        rounded = torch.empty(shape, dtype=dtype, device=x.device)
    y_dtype = torch.promote_types(dtype, weight.dtype)
    y = torch.empty(shape, dtype=y_dtype, device=x.device)
    scales = torch.empty(total, dtype=torch.float32, device=x.device)
    _norm_fwd_kernel[(total,)](
        x, weight, update, y, rounded, scales, residual, x.stride(0),
        0 if update is None else update.stride(0), dim, eps,
        ROUND=rounded is not normed, HAS_RESIDUAL=residual is not x,
        BLOCK_D=next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return y, rounded, scales, residual


def _norm_bwd(
    dy: Tensor, dresidual: Tensor | None, rounded: Tensor, scales: Tensor, weight: Tensor,
    x_dtype: torch.dtype, update_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Launch the backward: gradients of x, of the weight, and of an update of another dtype."""
    total, dim = rounded.shape
    num_blocks = cdiv(total, _BLOCK_T)
    dx = torch.empty((total, dim), dtype=x_dtype, device=dy.device)
    dupdate = None
    if update_dtype not in (None, x_dtype):
        dupdate = torch.empty((total, dim), dtype=update_dtype, device=dy.device)
    dweights = torch.empty((num_blocks, dim), dtype=torch.float32, device=dy.device)
    _norm_bwd_kernel[(num_blocks,)](
        dy, dresidual, rounded, scales, weight, dx, dupdate, dweights, dy.stride(0),
        0 if dresidual is None else dresidual.stride(0), rounded.stride(0), total, dim,
        HAS_DRESIDUAL=dresidual is not None,
        BLOCK_D=next_power_of_2(dim), BLOCK_T=_BLOCK_T, num_warps=8,
    )  # fmt: skip
    return dx, dweights.sum(0).to(weight.dtype), dupdate
