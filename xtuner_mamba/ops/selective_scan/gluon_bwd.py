"""Selective scan over packed documents: what launches the backward's two Gluon kernels."""

import torch
import triton
from torch import Tensor

from xtuner_mamba.ops.selective_scan.gluon_bwd_adjoints import _scan_bwd_adjoints_kernel
from xtuner_mamba.ops.selective_scan.gluon_bwd_states import _scan_bwd_states_kernel
from xtuner_mamba.ops.selective_scan.gluon_fwd import warps_of

# tokens between two anchors: half as many halve the error of dA and double the largest temporary
INTERVAL = 64
# of all temporaries that grow with the row; wide rows are worked through in slices of channels
_MAX_SCRATCH_BYTES = 2**28
# of the sums over documents, one for every group of them
_MAX_GROUP_BYTES = 2**26


def _scan_bwd(
    x: Tensor, dt: Tensor, A: Tensor, BC: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor, order: Tensor,
    dt_softplus: bool, final_states: Tensor | None, dy: Tensor, dfinal_states: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Launch the backward: dx, ddt, dA, dBC, dD, dz, ddt_bias and dinitial_states.

    What the first kernel hands to the second for every token and channel, e, lies in the memory
    that dx and ddt take up afterwards: its upper and its lower 16 bits.
    """
    (total, dim), num_seqs = x.shape, len(order)
    num_warps = warps_of(dim)
    block_d = 64 * num_warps
    dx, ddt = (torch.empty((total, dim), dtype=t.dtype, device=x.device) for t in (x, dt))
    dz = None if z is None else torch.empty((total, dim), dtype=z.dtype, device=x.device)
    e_high, e_low = dx.view(torch.int16), ddt.view(torch.int16)
    dA = torch.empty_like(A)
    dD, ddt_bias = (None if t is None else A.new_empty(dim) for t in (D, dt_bias))
    dinitial_states = None
    if initial_states is not None:
        dinitial_states = A.new_empty(num_seqs, 16, dim)

    width = _slice_width(total, dim, num_seqs, block_d)
    num_blocks = width // block_d
    num_groups = min(num_seqs, max(1, _MAX_GROUP_BYTES // (64 * width)))
    anchors = A.new_empty(total // INTERVAL, 17, width)
    last_times = A.new_empty(num_seqs, width)
    dBC_parts = A.new_empty(num_blocks, total, 32)
    dA_parts = A.new_empty(num_groups, 16, width)
    dD_parts, ddt_bias_parts = (
        None if t is None else A.new_empty(num_groups, width) for t in (D, dt_bias)
    )
    options = dict(
        SOFTPLUS=dt_softplus, INTERVAL=INTERVAL, UNROLL=4, WARPS=num_warps,
        num_warps=num_warps, maxnreg=255,
    )  # fmt: skip
    dBC = None
    for first in range(0, dim, width):
        channels = slice(first, first + width)

        def cut(t: Tensor | None, channels: slice = channels) -> Tensor | None:
            return None if t is None else t[..., channels]

        inputs = (
            cut(x), cut(dt), cut(A), BC, cut(D), cut(z), cut(dt_bias), cut(initial_states),
            cu_seqlens, order, cut(dy),
        )  # fmt: skip
        sizes = (
            x.stride(0), dt.stride(0), 0 if z is None else z.stride(0), dy.stride(0),
            dim, width, total, num_seqs, num_groups,
        )  # fmt: skip
        grid = (num_blocks * num_groups,)
        _scan_bwd_states_kernel[grid](
            *inputs, cut(dz), cut(e_high), cut(e_low),
            anchors, last_times, dBC_parts, dA_parts, dD_parts, *sizes, TOKENS=16, **options,
        )  # fmt: skip
        _scan_bwd_adjoints_kernel[grid](
            *inputs, cut(final_states), cut(dfinal_states), cut(e_high), cut(e_low),
            anchors, last_times, cut(dx), cut(ddt), dBC_parts, dA_parts, ddt_bias_parts,
            cut(dinitial_states), *sizes, TOKENS=8, **options,
        )  # fmt: skip
        dA[:, channels] = dA_parts.sum(0)
        if D is not None:
            dD[channels] = dD_parts.sum(0)
        if dt_bias is not None:
            ddt_bias[channels] = ddt_bias_parts.sum(0)
        dBC = dBC_parts.sum(0) if dBC is None else dBC + dBC_parts.sum(0)
    return dx, ddt, dA, dBC, dD, dz, ddt_bias, dinitial_states


def _slice_width(total: int, dim: int, num_seqs: int, block_d: int) -> int:
    """Return how many channels to work on at once: a part of them that bounds the temporaries."""
    bytes_of_block = 4 * (17 * block_d * (total // INTERVAL) + num_seqs * block_d + 32 * total)
    num_blocks = dim // block_d
    fit = max(1, _MAX_SCRATCH_BYTES // bytes_of_block)
    return block_d * max(n for n in range(1, num_blocks + 1) if num_blocks % n == 0 and n <= fit)
