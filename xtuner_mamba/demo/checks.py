"""Whether a model keeps packed documents apart, measured on the model itself."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xtuner_mamba.layout import PackedLayout


class LeakTest(NamedTuple):
    """How many documents changed when another one of their pack did."""

    changed: int
    """With the pack's boundaries; must be 0."""
    changed_without_boundaries: int
    """With the whole pack as one document; if this is 0 too, the test shows nothing."""

    @property
    def passed(self) -> bool:
        """Whether the boundaries, and nothing else, kept the documents apart."""
        return self.changed == 0 and self.changed_without_boundaries > 0


@torch.no_grad()
def packed_logits(model: PreTrainedModel, lengths: list[int], input_ids: Tensor) -> Tensor:
    """Run a dispatched model over packed documents.

    Args:
        model: Changed by ``dispatch_packed``.
        lengths: Tokens of each document.
        input_ids: Int64, ``(1, total)``.

    Returns:
        ``(total, vocab)``.
    """
    with PackedLayout.from_lengths(lengths).published():
        return model(input_ids, use_cache=False).logits[0]


def run_leak_test(model: PreTrainedModel, lengths: list[int], input_ids: Tensor) -> LeakTest:
    """Replace one document at a time by other values and by NaN, and compare the others bitwise.

    The first, the middle and the longest document take their turns.

    Args:
        model: Changed by ``dispatch_packed``.
        lengths: Tokens of each document, two documents at least.
        input_ids: Int64, ``(1, total)``.
    """
    victims = sorted({0, len(lengths) // 2, lengths.index(max(lengths))})
    counts = [
        sum(
            len(changed_documents(model, boundaries, lengths, input_ids, victim, value))
            for victim in victims
            for value in (0.5, math.nan)
        )
        for boundaries in (lengths, [sum(lengths)])
    ]
    return LeakTest(*counts)


@torch.no_grad()
def changed_documents(
    model: PreTrainedModel,
    boundaries: list[int],
    lengths: list[int],
    input_ids: Tensor,
    victim: int,
    value: float,
) -> list[int]:
    """Find the documents, but for the victim, with a logit that is not the same to the last bit.

    Args:
        model: Changed by ``dispatch_packed``.
        boundaries: Lengths that the model is told.
        lengths: Lengths that the documents have.
        input_ids: Int64, ``(1, total)``.
        victim: Document whose embeddings are replaced.
        value: What by.
    """
    embeddings = model.get_input_embeddings()(input_ids)
    poisoned = embeddings.clone()
    poisoned.split(lengths, dim=1)[victim].fill_(value)
    before, after = [], []
    with PackedLayout.from_lengths(boundaries).to(embeddings.device).published():
        for inputs, parts in ((embeddings, before), (poisoned, after)):
            logits = model(inputs_embeds=inputs, use_cache=False).logits
            parts += logits.split(lengths, dim=1)
    return [
        document
        for document, (a, b) in enumerate(zip(before, after, strict=True))
        if document != victim and not torch.equal(a, b)
    ]
