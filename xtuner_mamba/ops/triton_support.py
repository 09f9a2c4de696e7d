"""What the Triton kernels of all ops ask of their input."""

import torch
import triton
from torch import Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_triton_takes(x: Tensor, instead: str) -> None:
    """Check that kernels can run on x.

    Args:
        x: The op's main input.
        instead: What to use when they cannot, for the message.

    Raises:
        ValueError: The dtype of ``x`` is none of theirs.
        RuntimeError: ``x`` is not on a GPU, and Triton does not interpret.
    """
    if x.dtype not in _DTYPES:
        raise ValueError(
            f"x must be float32, float16 or bfloat16 with impl='triton', got {x.dtype}; {instead}"
        )
    if not x.is_cuda and not triton.knobs.runtime.interpret:
        raise RuntimeError(
            f"x must be on a GPU with impl='triton', got {x.device}; {instead}, or set "
            "TRITON_INTERPRET=1 before Python starts to try the kernels, slowly, without one"
        )


def cdiv(a: int, b: int) -> int:
    """Divide and round up; Triton's own asks for its constants first, and takes 3 us on a host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is not below n; see :func:`cdiv`."""
    return 1 << (n - 1).bit_length()


def with_unit_stride(rows: Tensor) -> Tensor:
    """Return rows whose channels lie next to each other, copied only if they do not."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
