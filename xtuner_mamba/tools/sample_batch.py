"""A short, a middle and a long document of a corpus, and where they stand in a batch."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from xtuner_mamba.dataset.documents import TokenizedDocuments
from xtuner_mamba.dataset.plan import PackPlan, Pieces, cut_pieces


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """A short, a middle and a long document, as the config batches them."""

    collated: dict
    """What the collate function made of them."""
    documents: list[np.ndarray]
    """Token ids of each, int64, ``(length,)``."""
    places: list[slice]
    """Where each stands in the batch's rows, laid end to end."""
    pieces: Pieces
    """Which of the corpus they are."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [len(tokens) for tokens in self.documents]

    @property
    def data(self) -> dict:
        """What the model is called with, and the boundaries."""
        return self.collated["data"]

    @property
    def is_padded(self) -> bool:
        """Whether each document has a row of its own."""
        return len(self.data["input_ids"]) == len(self.documents) > 1


def choose_pieces(documents: TokenizedDocuments, max_length: int) -> Pieces:
    """Choose a short, a middle and a long document that fit in a row together.

    Where no three fit, pieces of a quarter of the row stand in for them.

    Args:
        documents: The corpus.
        max_length: Tokens of all three.

    Raises:
        ValueError: There are not as many.
    """
    whole = Pieces.whole(np.arange(len(documents.lengths)), documents.lengths)
    for pieces in (whole, cut_pieces(documents.lengths, max_length // 4)):
        kept = documents.packs_with_target(PackPlan(pieces, np.arange(len(pieces) + 1)))
        pieces = pieces[kept]
        lengths = pieces.lengths
        order = np.argsort(lengths, kind="stable")
        if len(order) >= 3 and lengths[order[:3]].sum() <= max_length:
            break
    else:
        raise ValueError(
            f"three documents must have a target and fit in {max_length} tokens, got "
            f"{lengths[order[:3]].tolist()} as the shortest of {len(order)}; give more documents, "
            "or a longer max_length"
        )
    shortest, second = order[:2]
    room = max_length - lengths[shortest]
    long = order[np.flatnonzero(lengths[order] <= room - lengths[second])[-1]]
    others = np.setdiff1d(order[lengths[order] <= room - lengths[long]], [shortest, long])
    # as many times longer than the short one as it is shorter than the long one
    middle = others[
        np.abs(np.log(lengths[others] ** 2 / lengths[shortest] / lengths[long])).argmin()
    ]
    return pieces[np.array([shortest, middle, long])]


def find_documents(input_ids: Tensor, documents: list[np.ndarray]) -> list[slice]:
    """Find where documents stand in a batch: a row each, or end to end in one.

    Args:
        input_ids: ``(batch, seqlen)``.
        documents: Token ids of each, ``(length,)``.

    Returns:
        Their places in the flat batch.

    Raises:
        ValueError: They are somewhere else.
    """
    batch, seqlen = input_ids.shape
    lengths = [len(tokens) for tokens in documents]
    if batch == len(documents):
        starts = [row * seqlen for row in range(batch)]
    else:
        starts = list(accumulate(lengths, initial=0))[:-1]
    places = [slice(start, start + length) for start, length in zip(starts, lengths)]
    flat = input_ids.flatten()
    for number, (place, tokens) in enumerate(zip(places, documents)):
        if not torch.equal(flat[place], torch.from_numpy(tokens).to(flat)):
            raise ValueError(
                f"a batch must hold its documents from the left, in order, got others than those "
                f"of document {number} in rows of {seqlen}; pad on the right, and keep every token"
            )
    return places
