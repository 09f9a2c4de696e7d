"""What ``dispatch_packed`` looks for in a model besides the layers that it knows."""

import logging
from collections.abc import Collection

from torch import nn

from xtuner_mamba.model.dispatch.class_name import class_name

_logger = logging.getLogger(__name__)


def unnamed_mixers(model: nn.Module, named: Collection[str]) -> set[str]:
    """Find what mixes tokens by its kind or its place, whatever it or what is around it is called.

    Args:
        model: The language model.
        named: Class names of mixers, which may have such layers inside.

    Returns:
        Class names of recurrent layers, of convolutions over more than one token, and of what
        blocks call their mixer.
    """
    inside = {
        layer
        for mixer in model.modules()
        if class_name(mixer) in named
        for layer in mixer.modules()
    }
    in_place_of_mixers = {
        class_name(layer)
        for block in model.modules()
        for name, layer in block.named_children()
        if name == "mixer"
        and not isinstance(layer, nn.Identity)
        # PEFT, torch.compile and FSDP put a layer of their own around one that is known
        and not any(class_name(part) in named for part in layer.modules())
    }
    return in_place_of_mixers | {
        class_name(layer)
        for layer in model.modules()
        if layer not in inside
        and (
            isinstance(layer, nn.RNNBase)
            or (isinstance(layer, nn.Conv1d) and layer.kernel_size != (1,))
        )
    }


def check_mamba_ssm(model: nn.Module) -> None:
    """Check that what has a name of mamba_ssm's mixers is one, and whole on its device.

    Raises:
        RuntimeError: It is other code of the same name, or a part of one over several ranks.
    """
    for module in model.modules():
        name = class_name(module)
        if name not in ("Mamba", "Mamba2"):
            continue
        missing = [part for part in ("in_proj", "conv1d", "A_log") if not hasattr(module, part)]
        if missing:
            raise RuntimeError(
                f"{name} must be the mixer of mamba_ssm, got one of {type(module).__module__} "
                f"without {missing}; give a class that is no such mixer another name"
            )
        if getattr(module, "process_group", None) is not None:
            raise RuntimeError(
                f"process_group of {name} must be None with packed documents, got "
                f"{module.process_group}; shard the model with DeepSpeed's ZeRO instead"
            )


def check_weights_are_here(model: nn.Module) -> None:
    """Check that accelerate does not fetch a layer's weights only when the layer is called.

    Mixers read the weights of some layers past these.

    Raises:
        RuntimeError: It does.
    """
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        # one hook, or several in a row
        if any(getattr(part, "offload", False) for part in getattr(hook, "hooks", [hook])):
            raise RuntimeError(
                f"no weight of {type(model).__name__} may be offloaded by accelerate, got "
                f"{name or 'the model'} offloaded; load it with a device_map that has neither "
                "'cpu' nor 'disk' beside a GPU, and shard it with DeepSpeed's ZeRO-3 where it "
                "does not fit"
            )


def warn_of_groups(model: nn.Module) -> None:
    """Say where a model of transformers computes something else once it is dispatched."""
    for module in model.modules():
        groups = getattr(module, "n_groups", 1)
        if class_name(module) in ("Mamba2Mixer", "BambaMixer") and groups > 1:
            _logger.warning(
                "%s has n_groups=%d: packs are computed as in mamba_ssm, where such weights come "
                "from. transformers 4.48 does so in training with CUDA kernels only; run what you "
                "have trained dispatched, or with mamba_ssm (docs/families.md)",
                class_name(module),
                groups,
            )
            return
