"""What all ops ask of their tensors."""

from typing import NoReturn

import torch
from torch import Tensor

from xtuner_mamba.layout import PackedLayout, check_cu_seqlens


def check_tensors(x: Tensor, cu_seqlens: Tensor | None, **others: Tensor | None) -> None:
    """Check that an op's tensors are floating-point numbers, all on one device.

    Args:
        x: The op's main input, which the others follow.
        cu_seqlens: Of which the device is checked.
        others: Further inputs by name.

    Raises:
        ValueError: A tensor holds something else, or lies on another device.
    """
    device = x.device
    for name, tensor in {"x": x, **others}.items():
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must have a floating-point dtype, got {tensor.dtype}")
        if tensor.device != device:
            _refuse_device(name, tensor, "x", x)
    check_boundaries("x", x, cu_seqlens)


def check_boundaries(name: str, x: Tensor, cu_seqlens: Tensor | None) -> None:
    """Check that offsets, where there are any, are a tensor beside an op's main input.

    Args:
        name: Of that input.
        x: That input.
        cu_seqlens: What the caller gave.

    Raises:
        ValueError: They are something else, or lie on another device.
    """
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        raise ValueError(
            f"cu_seqlens must be a tensor, got {cu_seqlens!r}; build it with "
            "PackedLayout.from_lengths"
        )
    if cu_seqlens is not None and cu_seqlens.device != x.device:
        _refuse_device("cu_seqlens", cu_seqlens, name, x)


def _refuse_device(name: str, tensor: Tensor, main_name: str, x: Tensor) -> NoReturn:
    raise ValueError(
        f"{name} must be on the device of {main_name}, {x.device}, got {tensor.device}; "
        f"take {name}.to({main_name}.device)"
    )


def check_shapes(expected: dict[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """Check tensors, where there are any, against the shapes beside them.

    Raises:
        ValueError: One has another shape.
    """
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def check_decay_dtype(x: Tensor, A: Tensor) -> None:
    """Check that decay rates have the precision of the states.

    Raises:
        ValueError: They are rounded.
    """
    state_dtype = torch.promote_types(x.dtype, torch.float32)
    if A.dtype != state_dtype:
        raise ValueError(
            f"A must be {state_dtype} for x of {x.dtype}, got {A.dtype}; "
            "a rounded A changes every decay: keep A_log in float32"
        )


def resolve_cu_seqlens(name: str, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the offsets of an op's documents; without any every row is one.

    Args:
        name: Of the op's main input.
        x: That input, ``(batch, seqlen, ...)``.
        cu_seqlens: What the caller gave.

    Raises:
        ValueError: There are several rows beside offsets, or these do not cover the row.
    """
    batch, seqlen = x.shape[:2]
    if cu_seqlens is None:
        return PackedLayout.from_lengths([seqlen] * batch).to(x.device).cu_seqlens
    if batch != 1:
        raise ValueError(
            f"{name} must have batch 1 with cu_seqlens, got {tuple(x.shape)}; "
            f"lay the rows end to end: {name}.flatten(0, 1)[None]"
        )
    check_cu_seqlens(cu_seqlens, seqlen)
    return cu_seqlens
