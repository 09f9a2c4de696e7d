"""Selective scan over packed documents: the Gluon kernels, for 16-bit inputs on a Hopper GPU."""

import torch
from torch import Tensor

from xtuner_mamba.ops.selective_scan.gluon_bwd import _scan_bwd
from xtuner_mamba.ops.selective_scan.gluon_fwd import _scan_fwd
from xtuner_mamba.ops.selective_scan.gluon_support import why_not_gluon
from xtuner_mamba.ops.selective_scan.gpu import Kernels, scan_on_gpu


def selective_scan_gluon(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor, dt_softplus: bool,
    **options,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.selective_scan`."""
    reason = why_not_gluon(x, dt, A, z)
    if reason is not None:
        raise ValueError(f"{reason} with impl='gluon'; take impl='triton'")
    return scan_on_gpu(
        _KERNELS, x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus,
        **options,
    )  # fmt: skip


def _aligned(rows: Tensor) -> Tensor:
    """Copy rows only where they could not be read 16 bytes at a time."""
    in_place = rows.stride(1) == 1 and rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows if in_place else rows.clone(memory_format=torch.contiguous_format)


_KERNELS = Kernels(_aligned, _scan_fwd, _scan_bwd)
