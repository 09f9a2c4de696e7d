"""State space duality over packed documents on the Triton kernels of mamba_ssm.

With ``seq_idx`` those take documents anywhere in a row, but sum decays across their boundaries and
subtract again, and multiply by 0 what may be NaN: a document's bits would depend on its neighbours.
Here every chunk is a row of a batch, and its state is handed to the next chunk outside of them.
"""

import importlib.metadata
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from xtuner_mamba.ops.ssd.chunk_grid import ChunkGrid, chunk_size_for

_HALVES = torch.float16, torch.bfloat16
_OLDEST = "2.3.0"


def ssd_mamba_ssm(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    initial_states: Tensor | None, cu_seqlens: Tensor, chunk_size: int | None,
    *, return_final_states: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.ssd`; rows are laid end to end, step sizes are final."""
    reason = why_not_mamba_ssm(x)
    if reason is not None:
        raise RuntimeError(f"{reason}; take impl='reference'")
    grid = ChunkGrid.from_cu_seqlens(cu_seqlens, chunk_size or chunk_size_for(cu_seqlens, 32, 256))
    x_c, dt_c, B_c, C_c, z_c = (None if t is None else grid.scatter(t) for t in (x, dt, B, C, z))
    before, final_states = grid.pass_states(*_decays_and_added(x_c, dt_c, A, B_c), initial_states)
    # kernels are launched on the current device, which need not be that of x
    with torch.cuda.device_of(x):
        y = _kernels()(x_c, dt_c, A, B_c, C_c, grid.chunk_size, D=D, z=z_c, initial_states=before)
    return grid.gather(y), final_states if return_final_states else None


def _decays_and_added(x_c: Tensor, dt_c: Tensor, A: Tensor, B_c: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of a state after each chunk, and what the chunk adds to it."""
    heads = (B_c.shape[2], -1)
    log_decay = dt_c * A
    # of the tokens behind each one
    to_end = F.pad(log_decay[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)
    weighted = (torch.exp(to_end) * dt_c)[..., None] * x_c
    added = torch.einsum("csghp,csgn->cghpn", weighted.unflatten(2, heads), B_c.to(A.dtype))
    return torch.exp(log_decay.sum(1))[..., None, None], added.flatten(1, 2)


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
