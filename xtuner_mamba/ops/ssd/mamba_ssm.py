"""State space duality over packed documents on the Triton kernels of mamba_ssm.

Those take documents anywhere in a row, but sum decays across their boundaries and subtract again,
so that a document's last bits would depend on its neighbours. Here every document starts a chunk.
What they multiply by 0 at a boundary is finite, unless a document holds NaN or infinity: that
reaches the documents after it.
"""

import importlib.metadata
from collections.abc import Callable
from functools import cache

import torch
from packaging.version import Version
from torch import Tensor

from xtuner_mamba.ops.ssd.chunk_grid import ChunkGrid, chunk_size_for

_HALVES = torch.float16, torch.bfloat16
_OLDEST = "2.3.0"


def ssd_mamba_ssm(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    initial_states: Tensor | None, cu_seqlens: Tensor, chunk_size: int | None,
    *, return_final_states: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.ssd`; rows are laid end to end, step sizes are final."""
    reason = why_not_mamba_ssm(x)
    if reason is not None:
        raise RuntimeError(f"{reason}; take impl='reference'")
    if initial_states is not None or return_final_states:
        raise RuntimeError(
            "initial_states must be None and return_final_states False with impl='mamba_ssm', got "
            f"{None if initial_states is None else tuple(initial_states.shape)} and "
            f"{return_final_states}; take impl='reference'"
        )
    grid = ChunkGrid.from_cu_seqlens(cu_seqlens, chunk_size or chunk_size_for(cu_seqlens, 32, 256))
    x_c, dt_c, B_c, C_c, z_c = (
        None if t is None else grid.scatter(t).flatten(0, 1)[None] for t in (x, dt, B, C, z)
    )
    # kernels are launched on the current device, which need not be that of x
    with torch.cuda.device_of(x):
        y = _kernels()(
            x_c, dt_c, A, B_c, C_c, grid.chunk_size, D=D, z=z_c, seq_idx=grid.seq_idx[None]
        )
    return grid.gather(y[0].unflatten(0, (-1, grid.chunk_size))), None


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
    except ImportError as error:
        return f"mamba-ssm must be importable, got {error!r}"
    return None


@cache
def _kernels() -> Callable[..., Tensor]:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    from mamba_ssm.utils.determinism import set_deterministic_mode

    # after the import, which would otherwise tune nothing
    set_deterministic_mode(True)
    return mamba_chunk_scan_combined
