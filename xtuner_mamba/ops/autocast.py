"""The ops choose their own precision: autocast would round their float32 products."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device_type: str) -> AbstractContextManager:
    """Return a context without autocast, which is entered at a price only if there is one."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
