"""XTuner's varlen dispatch: our layers in its table, and every class by its own entry.

XTuner 0.2.0 gives the forward of the first class it meets to every other class, which breaks
hybrids, and without flash-attn it returns without a word, which leaks between documents. So do
its forwards for Llama and its likes: with transformers 4.48 they attend over the whole row.
"""

import types
from types import ModuleType

from torch import nn

from xtuner_mamba.model.dispatch import DISPATCH_TABLE, dispatch_packed
from xtuner_mamba.model.dispatch.class_name import class_name


def dispatch_per_class(dispatch: ModuleType) -> None:
    """Put our layers into XTuner's varlen table, and resolve that table per class."""
    for name, path in DISPATCH_TABLE.items():
        dispatch.VARLEN_ATTN_DISPATCH_MAPPING[name] = dispatch.LazyObject(*path.split(":"))

    def dispatch_varlen_attn_forward(model: nn.Module) -> None:
        dispatch_varlen(model, dispatch)

    dispatch.dispatch_varlen_attn_forward = dispatch_varlen_attn_forward


def dispatch_varlen(model: nn.Module, dispatch: ModuleType) -> None:
    """Replace the forward of every token mixer, ours by our table and others by XTuner's.

    Args:
        model: The language model.
        dispatch: ``xtuner.model.modules.dispatch``.

    Raises:
        RuntimeError: A token mixer has no varlen path, or one that needs flash-attn.
    """
    from mmengine import print_log

    theirs = {
        name: entry
        for name, entry in dispatch.VARLEN_ATTN_DISPATCH_MAPPING.items()
        if entry is not None and name not in DISPATCH_TABLE
    }
    others = [module for module in model.modules() if class_name(module) in theirs]
    names = sorted({class_name(module) for module in others})
    if names and not dispatch.SUPPORT_FLASH2:
        raise RuntimeError(
            f"flash-attn must be installed for the varlen path of {names}, got none; "
            "`pip install flash-attn`, or train with use_varlen_attn=False"
        )
    # first, since it raises before anything is replaced
    counts = dispatch_packed(model, also_covered=theirs).counts
    if counts:
        print_log(f"Dispatch packed forwards: {counts}", "current")
    for module in others:
        forward = theirs[class_name(module)].build()
        module.forward = types.MethodType(forward, module)
    if others:
        print_log(f"Dispatch varlen forwards: {names}. {dispatch.NO_ATTN_WEIGHTS_MSG}", "current")
