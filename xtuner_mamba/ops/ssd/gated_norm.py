"""Gate and norm of Mamba-2 from the kernels of mamba_ssm, one call each."""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.ops.parts import GradientPart
from xtuner_mamba.ops.ssd.mamba_ssm import MAX_NUMBERS
from xtuner_mamba.ops.triton_support import with_unit_stride


class GatedRmsNormFunction(torch.autograd.Function):
    """As mamba_ssm's own, but for where the gradient of the gate is written."""

    @staticmethod
    def forward(
        ctx, x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int,
        norm_before_gate: bool, kernels: SimpleNamespace, dz_out: GradientPart | None,
    ) -> Tensor:  # fmt: skip
        y = x.new_empty(x.shape)
        x, z = (with_unit_stride(t.flatten(0, -2)) for t in (x, z))
        weight = weight.contiguous()
        settings = dict(group_size=group_size, norm_before_gate=norm_before_gate, is_rms_norm=True)
        _, _, rstd = kernels._layer_norm_fwd(
            _within_reach(x), weight, None, eps, z=_within_reach(z), out=y.flatten(0, -2),
            **settings,
        )  # fmt: skip
        ctx.save_for_backward(x, z, weight, rstd)
        ctx.eps, ctx.settings, ctx.kernels, ctx.dz_out = eps, settings, kernels, dz_out
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight, rstd = ctx.saved_tensors
        dz = dy.new_empty(dy.shape) if ctx.dz_out is None else ctx.dz_out.allocate()
        dz_rows = dz.flatten(0, -2)
        written = dz_rows if _is_within_reach(dz_rows) else dz_rows.new_empty(dz_rows.shape)
        dy_rows = with_unit_stride(dy.flatten(0, -2))
        dx, dweight, _, _ = ctx.kernels._layer_norm_bwd(
            _within_reach(dy_rows), _within_reach(x), weight, None, ctx.eps, None, rstd,
            z=_within_reach(z), dz=written, **ctx.settings,
        )  # fmt: skip
        if written is not dz_rows:
            dz_rows.copy_(written)
        return dx.view(dy.shape), dz, dweight, None, None, None, None, None


def _within_reach(rows: Tensor) -> Tensor:
    """Copy rows that lie apart if the kernels, which count to 32 bits, would miss the last."""
    return rows if _is_within_reach(rows) else rows.contiguous()


def _is_within_reach(rows: Tensor) -> bool:
    return (len(rows) - 1) * rows.stride(0) + rows.shape[1] <= MAX_NUMBERS
