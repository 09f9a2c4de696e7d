"""State space duality over packed documents on the Triton kernels of mamba_ssm.

With ``seq_idx`` those take documents anywhere in a row, but sum decays across their boundaries and
subtract again, and multiply by 0 what may be NaN: a document's bits would depend on its neighbours.
Here no chunk holds tokens of two documents, and states pass from chunk to chunk outside of them.
"""

import importlib
import importlib.metadata
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace

import torch
from packaging.version import Version
from torch import Tensor

from xtuner_mamba.ops.parts import GradientPart
from xtuner_mamba.ops.ssd.chunk_grid import ChunkGrid, chunk_size_for
from xtuner_mamba.ops.ssd.gated_norm import GatedNorm

_HALVES = torch.float16, torch.bfloat16
_OLDEST = "2.3.0"
# their offsets are 32 bits wide
_MAX_NUMBERS = 2**31
# of programs in the last two directions of a launch
_MAX_PROGRAMS = 65535
# of which one is chosen where none is asked for
_CHUNK_SIZES = 32, 64, 128, 256
# all that is relied upon beside its determinism module; mamba_ssm promises none of the names
_KERNELS = {
    "ssd_bmm": ("_bmm_chunk_fwd", "_bmm_chunk_bwd"),
    "ssd_chunk_state": ("_chunk_state_fwd", "_chunk_state_bwd_db"),
    "ssd_chunk_scan": (
        "_chunk_scan_fwd",
        "_chunk_scan_bwd_dz",
        "_chunk_scan_bwd_dstates",
        "_chunk_scan_bwd_dC",
        "_chunk_scan_bwd_dcb",
        "_chunk_scan_bwd_ddAcs_stable",
    ),
    "ssd_combined": ("_chunk_scan_chunk_state_bwd_dx",),
}


def ssd_mamba_ssm(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    norm: GatedNorm | None, initial_states: Tensor | None, cu_seqlens: Tensor,
    chunk_size: int | None, *, return_final_states: bool,
    dxBC_out: Sequence[GradientPart] | None = None, dz_out: GradientPart | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.ssd`; rows are laid end to end, step sizes are final."""
    from xtuner_mamba.ops.ssd.mamba_ssm_function import SsdFunction
    from xtuner_mamba.ops.ssd.triton_gated_norm import gate_and_norm

    reason = why_not_mamba_ssm(x)
    if reason is not None:
        raise RuntimeError(f"{reason}; take impl='reference'")
    grid = _cut_into_chunks(cu_seqlens, chunk_size, x, B)
    # kernels are launched on the current device, which need not be that of x
    with torch.cuda.device_of(x):
        # a norm gates as well, and takes the tokens out of their chunks
        gate, dgate_out = (z, dz_out) if norm is None else (None, None)
        y, final_states = SsdFunction.apply(
            x, dt, A, B, C, D, gate, initial_states, grid, _kernels(), return_final_states,
            norm is None, dxBC_out, dgate_out,
        )  # fmt: skip
        if norm is not None:
            y = gate_and_norm(y, z, norm, grid, B.shape[1], dz_out)
    return y, final_states


def _cut_into_chunks(cu_seqlens: Tensor, chunk_size: int | None, x: Tensor, B: Tensor) -> ChunkGrid:
    """Leave few gaps; but states, one a chunk, may be so many that only larger chunks can be."""
    if chunk_size is not None:
        sizes = [chunk_size]
    else:
        smallest = chunk_size_for(cu_seqlens, _CHUNK_SIZES[0], _CHUNK_SIZES[-1])
        sizes = [size for size in _CHUNK_SIZES if size >= smallest]
    for size in sizes:
        grid = ChunkGrid.from_cu_seqlens(cu_seqlens, size)
        num_chunks, most = len(grid.chunk_order), _most_chunks(size, x, B)
        if num_chunks <= most:
            return grid
    larger = "take a larger chunk_size, " if size < _CHUNK_SIZES[-1] else ""
    raise RuntimeError(
        f"documents must have at most {most} chunks of {size} tokens together for mamba_ssm, got "
        f"{num_chunks}; {larger}put fewer documents into a pack, or take impl='reference'"
    )


def _most_chunks(chunk_size: int, x: Tensor, B: Tensor) -> int:
    ngroups, dstate = B.shape[1:]
    # heads have x and a state, groups have B, C and the products of both
    numbers = max(x[0].numel(), ngroups * chunk_size) * max(dstate, chunk_size)
    return min((_MAX_NUMBERS - 1) // numbers, _MAX_PROGRAMS // ngroups)


def why_not_mamba_ssm(x: Tensor) -> str | None:
    """Say what keeps mamba_ssm's kernels from an input.

    Args:
        x: Input of the recurrence.

    Returns:
        The first condition that does not hold, with the value; ``None`` if all hold.
    """
    if not x.is_cuda:
        return f"x must be on a GPU for mamba_ssm, got {x.device}"
    if x.dtype not in _HALVES:
        # its float32 products have ten bits (TF32)
        return f"x must be float16 or bfloat16 for mamba_ssm, got {x.dtype}"
    return why_not_installed()


@cache
def why_not_installed() -> str | None:
    """Say what is missing to use mamba_ssm, with the remedy; ``None`` if nothing is.

    Builds of 2.2.4 from source between March and June 2025 return a wrong gradient of B with
    ``seq_idx``, and cannot be told from the release; those before 2.3.0 add up gradients in no
    fixed order.
    """
    try:
        version = importlib.metadata.version("mamba_ssm")
    except importlib.metadata.PackageNotFoundError:
        return f"mamba-ssm must be installed, got none: `pip install 'mamba-ssm>={_OLDEST}'`"
    if Version(version) < Version(_OLDEST):
        return (
            f"mamba-ssm must be {_OLDEST} or newer, got {version}, whose gradients may be wrong: "
            f"`pip install 'mamba-ssm>={_OLDEST}'`"
        )
    try:
        _kernels()
    # a package that does not fit torch, Triton or the GPU may raise anything
    except Exception as error:
        return f"mamba-ssm must be importable, got {error!r}"
    return None


@cache
def _kernels() -> SimpleNamespace:
    """Import what is relied upon, and set it to add up in a fixed order."""
    from mamba_ssm.utils.determinism import set_deterministic_mode

    from xtuner_mamba.ops.ssd.tuning import keep_timings

    kernels = SimpleNamespace()
    for module, names in _KERNELS.items():
        found = importlib.import_module(f"mamba_ssm.ops.triton.{module}")
        for name in names:
            if not hasattr(found, name):
                raise ImportError(f"mamba_ssm.ops.triton.{module} has no {name}")
            setattr(kernels, name, getattr(found, name))
        keep_timings(found)
    # after the import, which would otherwise tune nothing
    set_deterministic_mode(True)
    return kernels
