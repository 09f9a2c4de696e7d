"""What every test stands on: Triton without a GPU, and memory that no luck has zeroed."""

import os
import sys

import pytest
import torch
from hypothesis import settings
from torch.utils._device import _device_constructors

if not torch.cuda.is_available():
    # read when Triton is first imported; kernels then run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

# torch.device("meta") knows constructors by identity: it must collect them before they are replaced
_device_constructors()

settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")


@pytest.fixture(autouse=True)
def _nan_in_empty_tensors(monkeypatch):
    """Let our own code find NaN wherever it reads memory that it did not write."""

    def filled(allocate):
        def allocate_nan(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            caller = sys._getframe(1).f_globals["__name__"]
            if tensor.is_floating_point() and caller.split(".")[0] == "xtuner_mamba":
                tensor.detach().fill_(torch.nan)
            return tensor

        return allocate_nan

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


@pytest.fixture(autouse=True)
def _leave_no_layout():
    """Keep a layout that a test has published from the next one."""
    from xtuner_mamba.layout import current_layout, withdraw_layout

    yield
    layout = current_layout()
    withdraw_layout()
    assert layout is None, f"a test must withdraw what it published, got {layout} left"
