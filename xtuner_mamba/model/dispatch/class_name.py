"""What a layer is called, whatever PyTorch has made of its class."""

from torch import nn


def class_name(module: nn.Module) -> str:
    """Name the class that a layer was built from."""
    return original_class(module).__name__


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a layer was built from.

    PyTorch changes the class of a layer to a new subclass when it parametrizes it (as PEFT does for
    ``target_parameters``) and when it shards it (FSDP2). Nobody else's subclasses are seen through.
    """
    for cls in type(module).__mro__:
        if issubclass(cls, nn.Module) and not cls.__module__.startswith("torch."):
            return cls
    # a layer of PyTorch's own
    return type(module)
