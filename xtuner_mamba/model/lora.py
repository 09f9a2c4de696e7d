"""Which layers of a Mamba a LoRA may adapt, and what a merge must not do to the others."""

from collections.abc import Iterator
from contextlib import contextmanager

from mmengine import print_log
from torch import nn

from xtuner_mamba.model.dispatch import is_dispatched, token_mixers

# models of which PEFT 0.21 takes no out_proj
_REFUSED = ("mamba", "mamba2", "falcon_mamba")


def default_targets(llm: nn.Module) -> list[str]:
    """Name what is adapted unless a config says otherwise: as in XTuner, all but the head.

    ``out_proj`` is left out of a Mamba that is not dispatched, where PEFT refuses it.
    """
    from xtuner.model.utils import find_all_linear_names

    names = set(find_all_linear_names(llm))
    if llm.config.model_type in _REFUSED and not calls_out_proj(llm):
        names.discard("out_proj")
    print_log(f"LoRA on {sorted(names)}", "current")
    return sorted(names)


@contextmanager
def dtypes_kept(llm: nn.Module) -> Iterator[None]:
    """Undo what PEFT does to frozen half-precision weights, which it brings to float32.

    They gain nothing from it, and take twice the memory. Adapters stay as PEFT makes them.
    """
    before = [(parameter, parameter.dtype) for parameter in llm.parameters()]
    yield
    for parameter, dtype in before:
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def calls_out_proj(model: nn.Module) -> bool:
    """Tell whether every mixer with an ``out_proj`` has a dispatched forward, which calls it."""
    mixers = [
        mixer
        for found in token_mixers(model).values()
        for mixer in found
        if hasattr(mixer, "out_proj")
    ]
    return bool(mixers) and all(is_dispatched(mixer) for mixer in mixers)


def untie_head(model: nn.Module) -> None:
    """Give a Mamba's head a weight of its own, if an adapter is about to change the embeddings'."""
    mixers = token_mixers(model).values()
    if not any(hasattr(mixer, "A_log") for found in mixers for mixer in found):
        return
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if hasattr(embeddings, "base_layer") and isinstance(head, nn.Linear):
        weight = head.weight
        if weight is embeddings.base_layer.weight:
            head.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
