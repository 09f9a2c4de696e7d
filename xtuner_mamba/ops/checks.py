"""What all ops ask of their tensors."""

from torch import Tensor


def check_tensors(x: Tensor, cu_seqlens: Tensor | None, **others: Tensor | None) -> None:
    """Check that an op's tensors are floating-point numbers, all on one device.

    Args:
        x: The op's main input, which the others follow.
        cu_seqlens: Of which the device is checked.
        others: Further inputs by name.

    Raises:
        ValueError: A tensor holds something else, or lies on another device.
    """
    for name, tensor in {"x": x, **others}.items():
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} must have a floating-point dtype, got {tensor.dtype}")
    for name, tensor in {**others, "cu_seqlens": cu_seqlens}.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"{name} must be on the device of x, {x.device}, got {tensor.device}; "
                f"take {name}.to(x.device)"
            )
