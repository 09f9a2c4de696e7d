"""LoRA on Mamba through PEFT: what it takes for impossible here, and what it would get wrong."""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from torch import nn


def spare_bitsandbytes_triton(triton_utils: ModuleType) -> None:
    """Let ``import bitsandbytes`` succeed where Triton has no ``triton.ops``.

    PEFT imports bitsandbytes wherever it is installed, and XTuner pins a version that imports
    ``triton.ops``, which Triton 3 does not have. Without Triton, bitsandbytes leaves the layers
    out that need it, and LoRA needs none of them.
    """
    is_triton_available = triton_utils.is_triton_available

    def is_old_triton_available() -> bool:
        return is_triton_available() and importlib.util.find_spec("triton.ops") is not None

    triton_utils.is_triton_available = is_old_triton_available


def adapt_out_proj(tuners_utils: ModuleType) -> None:
    """Let PEFT adapt ``out_proj`` of a Mamba whose mixers call it.

    PEFT refuses it, since mamba_ssm's kernels read its weight past any adapter. Dispatched mixers
    call the module, and a merge runs no mixer. The filter, ``conv1d``, stays refused: we too read
    its weight.
    """
    refuse = tuners_utils._check_lora_target_modules_mamba

    @functools.wraps(refuse)
    def check(peft_config, model: nn.Module, target_name: str) -> None:
        # late: at the import of PEFT, XTuner may not be there yet
        from xtuner_mamba.model.lora import calls_out_proj

        if target_name == "out_proj" and (_is_merging() or calls_out_proj(model)):
            return
        try:
            refuse(peft_config, model, target_name)
        except ValueError as error:
            if target_name != "out_proj":
                raise
            raise ValueError(
                f"{error} Or keep it, and call xtuner_mamba.model.dispatch_packed(model) before, "
                "whose mixers call out_proj; or merge the adapter with `xtuner convert merge`."
            ) from None

    tuners_utils._check_lora_target_modules_mamba = check


def untie_adapted_embeddings(tuners_utils: ModuleType) -> None:
    """Let a merged Mamba compute what its adapters did, with one on the embeddings too.

    The head shares their weight, and has no part in the adapter. PEFT adds the adapter to both, and
    warns of that only where the embeddings are called ``embed_tokens``.
    """
    unload = tuners_utils.BaseTuner._unload_and_optionally_merge

    @functools.wraps(unload)
    def unload_untied(self, merge: bool = True, *args, **kwargs) -> nn.Module:
        from xtuner_mamba.model.lora import untie_head

        if merge:
            untie_head(self.model)
        return unload(self, merge, *args, **kwargs)

    tuners_utils.BaseTuner._unload_and_optionally_merge = unload_untied


def _is_merging() -> bool:
    """Whether this process is ``xtuner convert merge``."""
    return Path(sys.argv[0]).parts[-2:] == ("model_converters", "merge.py")
