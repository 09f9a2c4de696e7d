"""Which layers mix tokens, and what replaces their forward when rows hold packed documents."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import NamedTuple

from torch import nn

from xtuner_mamba.model.dispatch.class_name import class_name
from xtuner_mamba.model.dispatch.refusals import (
    check_mamba_ssm,
    check_weights_are_here,
    unnamed_mixers,
    warn_of_groups,
)

DISPATCH_TABLE = {
    "MambaMixer": "xtuner_mamba.model.dispatch.mamba:mamba_mixer_forward",
    "FalconMambaMixer": "xtuner_mamba.model.dispatch.mamba:mamba_mixer_forward",
    "JambaMambaMixer": "xtuner_mamba.model.dispatch.mamba:mamba_mixer_forward",
    "ZambaMambaMixer": "xtuner_mamba.model.dispatch.mamba:mamba_mixer_forward",
    "Mamba": "xtuner_mamba.model.dispatch.mamba:mamba_ssm_mixer_forward",
    "Mamba2Mixer": "xtuner_mamba.model.dispatch.mamba2:mamba2_mixer_forward",
    "BambaMixer": "xtuner_mamba.model.dispatch.mamba2:mamba2_mixer_forward",
    "Mamba2": "xtuner_mamba.model.dispatch.mamba2:mamba2_ssm_mixer_forward",
}
"""Mixer class name to ``module:function``, a forward that keeps documents apart."""

_ATTENTION = "xtuner_mamba.model.dispatch.attention"
_ROTARY_FAMILIES = (
    "Bamba",
    "Cohere",
    "Cohere2",
    "Gemma",
    "Gemma2",
    "Glm",
    "Granite",
    "InternLM3",
    "Llama",
    "Mistral",
    "Mixtral",
    "Olmo",
    "Olmo2",
    "Phi",
    "Phi3",
    "Qwen2",
    "Starcoder2",
)
_OLDER_KINDS = ("Attention", "SdpaAttention", "FlashAttention2")
_ATTENTION_TABLE = {
    f"{family}Attention": f"{_ATTENTION}:attention_forward"
    for family in (*_ROTARY_FAMILIES, "Zamba")
}
_ATTENTION_TABLE |= {
    f"{family}{kind}": f"{_ATTENTION}:older_attention_forward"
    for family in ("Jamba", "Qwen2Moe")
    for kind in _OLDER_KINDS
}
_ATTENTION_TABLE |= {
    f"{family}{kind}": f"xtuner_mamba.model.dispatch.internlm:{family.lower()}_attention_forward"
    for family in ("InternLM", "InternLM2")
    for kind in _OLDER_KINDS
}
DISPATCH_TABLE |= _ATTENTION_TABLE

DECODER_TABLE = {
    f"{family}Model": f"{_ATTENTION}:decoder_forward"
    for family in (*_ROTARY_FAMILIES, "InternLM", "InternLM2", "Jamba", "Qwen2Moe", "Zamba")
}
"""Class name to ``module:function``: models that give their attention layers positions and mask."""

_ROTARY_TABLE = {
    f"{family}RotaryEmbedding": f"{_ATTENTION}:rotary_forward"
    for family in (*_ROTARY_FAMILIES, "Qwen2Moe")
}

_FUSED = "xtuner_mamba.model.dispatch.mamba_lm"
_PURE_FAMILIES = ("Mamba", "FalconMamba", "Mamba2")
_FUSED_FAMILIES = (*_PURE_FAMILIES, "Bamba", "Jamba", "Zamba")

FUSED_TABLE = {f"{family}Block": f"{_FUSED}:mamba_block_forward" for family in _PURE_FAMILIES}
FUSED_TABLE |= {f"{family}RMSNorm": f"{_FUSED}:mamba_norm_forward" for family in _FUSED_FAMILIES}
FUSED_TABLE |= {
    f"{family}ForCausalLM": f"{_FUSED}:mamba_causal_lm_forward" for family in _FUSED_FAMILIES
}
"""Class name to ``module:function``, a forward that computes the same with fused ops."""

_OPTIONS_OF = {
    "mamba_mixer_forward": ("family", "recompute", "checkpointed_by"),
    "mamba_ssm_mixer_forward": ("family", "recompute", "checkpointed_by"),
    "mamba2_mixer_forward": ("family", "recompute", "checkpointed_by"),
    "mamba2_ssm_mixer_forward": ("family", "recompute", "checkpointed_by"),
    "mamba_block_forward": ("fuse_norm", "place"),
    "mamba_norm_forward": ("fuse_norm",),
}
"""What ``dispatch_packed`` binds to a forward, by the name of it."""

# names that transformers and mamba_ssm have for layers that let tokens see each other
_MIXER_NAME = re.compile(r"(Mixer|Attention|SdpaAttention|FlashAttention2|Retention|MHA)$")


class _Around(tuple):
    """What a layer is told of the modules around it, which a copy of the layer does not copy."""

    def __deepcopy__(self, memo: dict) -> "_Around":
        # they have copies of their own where the whole model is copied
        return type(self)(memo.get(id(item), item) for item in self)


class _Replaced(NamedTuple):
    module: nn.Module
    slot: str
    ours: partial
    previous: Callable | None


@dataclass(frozen=True)
class Dispatched:
    """What :func:`dispatch_packed` replaced."""

    counts: dict[str, int]
    """Token mixers that had another forward before, by class name."""
    _replaced: list[_Replaced] = field(repr=False)

    def undo(self) -> None:
        """Give every layer the forward back that it had; a second time there is nothing to do.

        Raises:
            RuntimeError: Something was put over one of our forwards since, which would be lost.
        """
        for module, slot, ours, _ in self._replaced:
            got = module.__dict__.get(slot)
            if got is not ours:
                raise RuntimeError(
                    f"{slot} of {class_name(module)} must be as this dispatch_packed left it, got "
                    f"{getattr(got, 'func', got)}; take back first what came later (of two "
                    "dispatches undo the second one first)"
                )
        for module, slot, _, previous in self._replaced:
            if previous is None:
                delattr(module, slot)
            else:
                setattr(module, slot, previous)
        self._replaced.clear()


def token_mixers(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Find the layers that let tokens see each other, by class name."""
    found: dict[str, list[nn.Module]] = {}
    for module in model.modules():
        name = class_name(module)
        if name in DISPATCH_TABLE or _MIXER_NAME.search(name):
            found.setdefault(name, []).append(module)
    return found


def is_dispatched(mixer: nn.Module) -> bool:
    """Tell whether a token mixer has a forward of ours."""
    forward = getattr(mixer.__dict__.get(_slot(mixer)), "func", None)
    return forward is not None and (
        f"{forward.__module__}:{forward.__name__}" in DISPATCH_TABLE.values()
    )


def dispatch_packed(
    model: nn.Module,
    also_covered: Iterable[str] = (),
    *,
    fuse_norm: bool | None = None,
    recompute: bool | None = None,
) -> Dispatched:
    """Replace the forward of every token mixer by one that keeps packed documents apart.

    The layers of this model alone are changed, not their classes. From then on they read the
    published :class:`~xtuner_mamba.layout.PackedLayout` and refuse to run without one, but for
    generation with a cache. Layers around the mixers get forwards that compute the same with
    fused ops, and models around attention layers hand these positions in the documents and no
    mask. A second call replaces what it does otherwise than the first.

    Args:
        model: For example ``transformers.MambaForCausalLM``, also wrapped by PEFT.
        also_covered: Class names that somebody else keeps apart (XTuner's flash attention).
        fuse_norm: Norm and residual of a block in one kernel. ``None`` stands for "on a GPU".
        recompute: Mixers keep for the backward what their input projection made, and compute the
            rest again. ``None`` stands for "on a GPU, if they have 2,048 channels or more". Without
            effect where the model checkpoints whole blocks, and under ZeRO-3.

    Returns:
        What was replaced; its ``undo()`` takes it back.

    Raises:
        ValueError: An option is none of its values.
        RuntimeError: The model has no token mixer that is known here, or one that nothing keeps
            apart, which would leak between documents; or a layer that is unlike its name, or in
            parts on several ranks; or weights that accelerate has offloaded.
    """
    check_switches(fuse_norm=fuse_norm, recompute=recompute)
    found = token_mixers(model)
    covered = set(DISPATCH_TABLE) | set(also_covered)
    leaking = sorted((set(found) | unnamed_mixers(model, covered | set(found))) - covered)
    if leaking:
        raise RuntimeError(
            f"every token-mixing layer of {type(model).__name__} must have a varlen path, got "
            f"none for {leaking}; they would carry one document into the next: train with "
            f"use_varlen_attn=False, or use a model of one of the families in docs/families.md"
        )
    if not found:
        seen = sorted({type(module).__name__ for module in model.modules()})
        raise RuntimeError(
            f"{type(model).__name__} must have one of the {len(DISPATCH_TABLE)} layers in "
            f"xtuner_mamba.model.dispatch.DISPATCH_TABLE, got only {seen}; nothing was dispatched, "
            "so packed documents would leak: use a model of one of the families in docs/families.md"
        )
    _check_attention(model)
    check_mamba_ssm(model)
    check_weights_are_here(model)
    warn_of_groups(model)
    options = {
        "fuse_norm": fuse_norm,
        "recompute": recompute,
        "checkpointed_by": _Around(
            m for m in model.modules() if hasattr(m, "gradient_checkpointing")
        ),
    }
    places = {
        block: _Around((decoder, index))
        for decoder in model.modules()
        if hasattr(decoder, "norm_f")
        for index, block in enumerate(getattr(decoder, "layers", ()))
    }
    replaced, counts = [], Counter()
    for module in model.modules():
        forward = _forward_for(module, options | {"place": places.get(module)})
        if forward is None:
            continue
        slot = _slot(module)
        had = module.__dict__.get(slot)
        is_ours = getattr(had, "func", None) is forward.func
        if is_ours and had.keywords == forward.keywords:
            continue
        replaced.append(_Replaced(module, slot, forward, had))
        setattr(module, slot, forward)
        if class_name(module) in DISPATCH_TABLE and not is_ours:
            counts[class_name(module)] += 1
    return Dispatched(dict(counts), replaced)


def check_switches(**switches: bool | None) -> None:
    """Check options by name, before anything is built.

    Raises:
        ValueError: One is something else than a bool or ``None``, whose truth would be taken.
    """
    for name, value in switches.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(
                f"{name} must be None, True or False, got {value!r}; leave it out to have it "
                "decided by the device"
            )


def _slot(module: nn.Module) -> str:
    # accelerate's hooks stand in place of the forward, and run the other one
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def _check_attention(model: nn.Module) -> None:
    """Check that our attention layers get their positions, and are the code that we know."""
    inside = {
        layer
        for decoder in model.modules()
        if class_name(decoder) in DECODER_TABLE
        for layer in decoder.modules()
    }
    for module in model.modules():
        name = class_name(module)
        if name not in _ATTENTION_TABLE:
            continue
        if module not in inside:
            raise RuntimeError(
                f"every {name} must be inside a model of xtuner_mamba.model.dispatch.table."
                "DECODER_TABLE, which tells it where in its document a token stands, got one "
                f"outside in {type(model).__name__}"
            )
        import_module(_ATTENTION_TABLE[name].partition(":")[0]).check_attention(module)


def _forward_for(module: nn.Module, options: dict[str, object]) -> partial | None:
    name = class_name(module)
    tables = (DISPATCH_TABLE, FUSED_TABLE, DECODER_TABLE, _ROTARY_TABLE)
    path = next((table[name] for table in tables if name in table), None)
    if path is None and _is_causal_lm(module):
        path = f"{_FUSED}:causal_lm_forward"
    if path is None:
        return None
    module_name, function_name = path.split(":")
    forward = getattr(import_module(module_name), function_name)
    # by its class now, which PyTorch may change later
    options = options | {"family": name}
    bound = {option: options[option] for option in _OPTIONS_OF.get(function_name, ())}
    # not a method, which would be pickled by a name that the class does not have
    bound_forward = partial(forward, module, **bound)
    if function_name == "causal_lm_forward":
        # generation asks which arguments there are
        bound_forward.__signature__ = inspect.signature(type(module).forward.__get__(module))
    return bound_forward


def _is_causal_lm(module: nn.Module) -> bool:
    """Tell language models with layers of ours from those that XTuner alone keeps apart."""
    return any(base.__name__.endswith("ForCausalLM") for base in type(module).__mro__) and any(
        class_name(layer) in DISPATCH_TABLE for layer in module.modules()
    )
