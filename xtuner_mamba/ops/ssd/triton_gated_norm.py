"""Gate and norm of tokens that stand in chunks: Triton kernels as an autograd function.

The forward takes the tokens out of their chunks as it reads them, the backward lays their gradients
in again. With g = y silu(z), or g = y where the norm comes before the gate,

    n = g / sqrt(mean(g^2) + eps)        out = weight n, or weight n silu(z)

Dimensions beside those of the op:
    slots: places of tokens in all chunks
    dim:   nheads * headdim
    size:  channels of a group, dim / ngroups
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.ops.parts import GradientPart
from xtuner_mamba.ops.ssd.chunk_grid import ChunkGrid
from xtuner_mamba.ops.ssd.gated_norm import GatedNorm
from xtuner_mamba.ops.triton_math import sigmoid, silu
from xtuner_mamba.ops.triton_support import cdiv, next_power_of_2, with_unit_stride

# slots that a program of the backward sums the gradient of the weight over
_BLOCK_T = 32


def gate_and_norm(
    y: Tensor,
    z: Tensor,
    norm: GatedNorm,
    grid: ChunkGrid,
    ngroups: int,
    dz_out: GradientPart | None,
) -> Tensor:
    """Gate and norm tokens, and take them out of their chunks.

    Args:
        y: Tokens in their chunks, ``(1, slots, nheads, headdim)``.
        z: Gate, ``(total, nheads, headdim)``.
        norm: The norm.
        grid: Where the tokens stand.
        ngroups: Groups of channels, each with a mean square of its own.
        dz_out: Where the backward writes the gradient of ``z``.

    Returns:
        ``(total, nheads, headdim)`` in the dtype of ``y``, rounded once.
    """
    return GatedNormFunction.apply(
        y, z, norm.weight, norm.eps, norm.before_gate, grid, ngroups, dz_out
    )


class GatedNormFunction(torch.autograd.Function):
    """Saves its inputs, and a scale for each token and group."""

    @staticmethod
    def forward(ctx, y, z, weight, eps, before_gate, grid, ngroups, dz_out):
        out = z.new_empty(z.shape, dtype=y.dtype)
        y, gates, weight = y.contiguous(), with_unit_stride(z.flatten(1)), weight.contiguous()
        scales = _gated_norm_fwd(
            y[0].flatten(1), gates, weight, eps, before_gate, grid, ngroups, out
        )
        ctx.save_for_backward(y, gates, weight, scales)
        ctx.before_gate, ctx.grid, ctx.dz_out = before_gate, grid, dz_out
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        y, gates, weight, scales = ctx.saved_tensors
        if ctx.dz_out is None:
            dz = gates.new_empty(dout.shape)
        else:
            dz = ctx.dz_out.allocate().view(dout.shape)
        dy = torch.empty_like(y)
        dweight = _gated_norm_bwd(
            with_unit_stride(dout.flatten(1)), y[0].flatten(1), gates, weight, scales,
            ctx.before_gate, ctx.grid, dy, dz.flatten(1),
        )  # fmt: skip
        return dy, dz, dweight, None, None, None, None, None


@triton.jit
def _gated_norm_fwd_kernel(
    y, z, weight, slots, out, scales, stride_z, dim, size, eps,
    BEFORE_GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    i_group = tl.program_id(1)
    o_size = tl.arange(0, BLOCK)
    m = o_size < size
    o_d = i_group * size + o_size
    b_x = tl.load(y + tl.load(slots + i_t) * dim + o_d, mask=m, other=0.0).to(tl.float32)
    b_gate = silu(tl.load(z + i_t * stride_z + o_d, mask=m, other=0.0).to(tl.float32))
    if not BEFORE_GATE:
        b_x *= b_gate
    b_scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(b_x * b_x, 0) / size + eps))
    tl.store(scales + i_t * tl.num_programs(1) + i_group, b_scale)
    b_out = b_x * b_scale * tl.load(weight + o_d, mask=m, other=0.0).to(tl.float32)
    if BEFORE_GATE:
        b_out *= b_gate
    tl.store(out + i_t * dim + o_d, b_out, mask=m)


# changes from step to step: a kernel for each of its divisors would be compiled in turn
@triton.jit(do_not_specialize=["num_slots"])
def _gated_norm_bwd_kernel(
    dout, y, z, weight, scales, sources, dy, dz, dweights, stride_dout, stride_z, stride_dz,
    num_slots, dim, size,
    BEFORE_GATE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_block = tl.program_id(0).to(tl.int64)
    i_group = tl.program_id(1)
    o_size = tl.arange(0, BLOCK)
    m = o_size < size
    o_d = i_group * size + o_size
    b_dw = tl.zeros((BLOCK,), dtype=tl.float32)
    for i_slot in range(i_block * BLOCK_T, tl.minimum((i_block + 1) * BLOCK_T, num_slots)):
        i_t = tl.load(sources + i_slot)
        # a gap has no token, and a gradient of zero
        m_t = m & (i_t >= 0)
        b_y = tl.load(y + i_slot * dim + o_d, mask=m_t, other=0.0).to(tl.float32)
        b_z = tl.load(z + i_t * stride_z + o_d, mask=m_t, other=0.0).to(tl.float32)
        b_dout = tl.load(dout + i_t * stride_dout + o_d, mask=m_t, other=0.0).to(tl.float32)
        p_scale = scales + i_t * tl.num_programs(1) + i_group
        b_scale = tl.load(p_scale, mask=i_t >= 0, other=0.0)
        # from a cache, at every token: it would take 16 of the registers
        b_w = tl.load(weight + o_d, mask=m, other=0.0).to(tl.float32)
        b_sigmoid = sigmoid(b_z)
        b_gate = b_z * b_sigmoid
        if BEFORE_GATE:
            b_normed = b_y * b_scale
            b_dgate = b_dout * b_w * b_normed
            b_dout *= b_gate
        else:
            b_normed = b_y * b_gate * b_scale
        b_dw += b_dout * b_normed
        b_dnormed = b_dout * b_w
        b_dy = b_scale * (b_dnormed - b_normed * (tl.sum(b_dnormed * b_normed, 0) / size))
        if not BEFORE_GATE:
            b_dgate = b_dy * b_y
            b_dy *= b_gate
        b_dz = b_dgate * b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))
        tl.store(dy + i_slot * dim + o_d, b_dy, mask=m)
        tl.store(dz + i_t * stride_dz + o_d, b_dz, mask=m_t)
    tl.store(dweights + i_block * dim + o_d, b_dw, mask=m)


def _gated_norm_fwd(
    y: Tensor, z: Tensor, weight: Tensor, eps: float, before_gate: bool, grid: ChunkGrid,
    ngroups: int, out: Tensor,
) -> Tensor:  # fmt: skip
    """Launch the forward: write out, return the scales of tokens and groups."""
    total, dim = z.shape
    size = dim // ngroups
    scales = torch.empty((total, ngroups), dtype=torch.float32, device=y.device)
    block, num_warps = _block_and_warps(size)
    _gated_norm_fwd_kernel[(total, ngroups)](
        y, z, weight, grid.slots, out, scales, z.stride(0), dim, size, eps,
        BEFORE_GATE=before_gate, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    return scales


def _gated_norm_bwd(
    dout: Tensor, y: Tensor, z: Tensor, weight: Tensor, scales: Tensor, before_gate: bool,
    grid: ChunkGrid, dy: Tensor, dz: Tensor,
) -> Tensor:  # fmt: skip
    """Launch the backward: write dy and dz, return dweight.

    Temporary: the weight's gradient of every ``_BLOCK_T`` slots, in float32, summed in a fixed
    order: ``(slots / _BLOCK_T, dim)``.
    """
    (num_slots, dim), ngroups = y.shape, scales.shape[1]
    num_blocks = cdiv(num_slots, _BLOCK_T)
    dweights = torch.empty((num_blocks, dim), dtype=torch.float32, device=y.device)
    block, num_warps = _block_and_warps(dim // ngroups)
    # 128 registers a thread let 16 warps run on a processor, of which some read while others wait
    # for each other's sums
    _gated_norm_bwd_kernel[(num_blocks, ngroups)](
        dout, y, z, weight, scales, grid.sources, dy, dz, dweights,
        dout.stride(0), z.stride(0), dz.stride(0), num_slots, dim, dim // ngroups,
        BEFORE_GATE=before_gate, BLOCK_T=_BLOCK_T, BLOCK=block, num_warps=num_warps, maxnreg=128,
    )  # fmt: skip
    return dweights.sum(0).to(weight.dtype)


def _block_and_warps(size: int) -> tuple[int, int]:
    block = next_power_of_2(size)
    # 16 numbers a thread
    return block, min(max(block // 512, 1), 16)
