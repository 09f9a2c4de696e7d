"""Losses of single tokens, from the last hidden states, without all logits at once."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtuner_mamba.layout import IGNORE_INDEX

# a fixed count, as ZeRO-3 gathers the head for every call, on all ranks together
_NUM_SLICES = 64


def backbone(llm: nn.Module) -> nn.Module:
    """Return the part of a Hugging Face model whose output the head reads, also under PEFT."""
    model = llm.get_base_model() if hasattr(llm, "get_base_model") else llm
    return model.base_model


def token_losses(llm: nn.Module, hidden_states: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross entropy of each token, a slice of tokens at a time, without gradients.

    Args:
        llm: A Hugging Face model; its head is called.
        hidden_states: Of :func:`backbone`, ``(1, total, hidden)``.
        targets: Int64, ``(total,)``, -100 where there is none.

    Returns:
        Float32 (or float64), ``(total,)``, 0 where there is no target.
    """
    head = llm.get_output_embeddings()
    losses = []
    with torch.no_grad():
        slices = zip(
            hidden_states.detach().flatten(0, -2).tensor_split(_NUM_SLICES),
            targets.tensor_split(_NUM_SLICES),
        )
        for hidden, target in slices:
            logits = head(hidden.to(head.weight.dtype))
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses.append(
                F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX, reduction="none")
            )
    return torch.cat(losses)
