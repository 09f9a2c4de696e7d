"""What is read back from checkpoints: all of it, and unrounded.

Since 2.6 ``torch.load`` refuses everything but tensors unless told otherwise, and MMEngine's
checkpoints hold a message hub, numpy values and optimizer state. Only files that the user names
on this machine are read in full; downloads stay restricted.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType

import torch


def load_own_checkpoints(checkpoint: ModuleType) -> None:
    """Let MMEngine read a local checkpoint in full."""
    checkpoint.load_from_local = reads_in_full(checkpoint.load_from_local)
    checkpoint.CheckpointLoader.register_scheme(
        prefixes="", loader=checkpoint.load_from_local, force=True
    )


def load_seed_of_own_checkpoint(utils: ModuleType) -> None:
    """Let ``xtuner train --resume`` read the seed, of a file or of a DeepSpeed folder."""
    utils.get_seed_from_checkpoint = reads_in_full(utils.get_seed_from_checkpoint)


def reads_in_full(function: Callable) -> Callable:
    """Wrap a function whose ``torch.load`` calls shall unpickle everything."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        load = torch.load
        torch.load = functools.partial(load, weights_only=False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.load = load

    return wrapper


def load_zero_checkpoints_unrounded(zero: ModuleType) -> None:
    """Let ``pth_to_hf --fp32`` read what a ZeRO folder holds; XTuner rounds it to float16."""
    read = zero.get_state_dict_from_zero_checkpoint

    @functools.wraps(read)
    def wrapper(*args, **kwargs):
        if "--fp32" in sys.argv:
            kwargs.setdefault("dtype", torch.float32)
        return read(*args, **kwargs)

    zero.get_state_dict_from_zero_checkpoint = wrapper
