"""LoRA with the Triton that comes with today's PyTorch.

PEFT imports bitsandbytes wherever it is installed, and XTuner pins a version whose
``bitsandbytes.triton`` imports ``triton.ops``, which Triton 3 does not have. Nothing of it is
needed: without Triton, bitsandbytes leaves those layers out.
"""

import importlib.util
import sys
from types import ModuleType


def spare_bitsandbytes_triton(registry: ModuleType) -> None:
    """Let ``import bitsandbytes`` succeed where Triton has no ``triton.ops``.

    Args:
        registry: ``xtuner.registry``, imported by all that builds a model; nothing in it changes.
    """
    if importlib.util.find_spec("triton") and not importlib.util.find_spec("triton.ops"):
        name = "bitsandbytes.triton.triton_utils"
        # there already if an import of bitsandbytes has failed before
        module = sys.modules.setdefault(name, ModuleType(name))
        module.is_triton_available = lambda: False
