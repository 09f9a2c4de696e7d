"""Selective scan over packed documents: the plain Triton kernels, for any GPU."""

from torch import Tensor

from xtuner_mamba.ops.selective_scan.gpu import Kernels, scan_on_gpu
from xtuner_mamba.ops.selective_scan.triton_bwd import _scan_bwd
from xtuner_mamba.ops.selective_scan.triton_fwd import _scan_fwd
from xtuner_mamba.ops.triton_support import check_triton_takes, with_unit_stride

_KERNELS = Kernels(with_unit_stride, _scan_fwd, _scan_bwd)


def selective_scan_triton(x: Tensor, *args, **options):
    """See :func:`xtuner_mamba.ops.selective_scan`."""
    check_triton_takes(x, "take impl='cpu' or impl='reference'")
    return scan_on_gpu(_KERNELS, x, *args, **options)
