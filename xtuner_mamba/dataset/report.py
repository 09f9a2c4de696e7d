"""What packing did to a dataset, in numbers."""

from dataclasses import dataclass

import numpy as np

# documents of the padded batch that packing is compared with
_PADDED_BATCH = 16


@dataclass(frozen=True)
class PackingReport:
    """Counts of the first draw. Tokens packed, dropped and masked add up to the dataset's.

    Later draws may leave out other packs for want of labels: ``RedrawSampler`` logs how many.
    """

    documents: int
    """Documents with a token in some pack."""
    tokens: int
    packs: int
    max_length: int
    padding: float
    """Share of padding, had the documents been padded in random batches of 16."""
    num_split: int
    """Documents cut in pieces, because they are too long or cross the end of a pack."""
    num_dropped: int
    """Documents dropped because they are longer than ``max_length``."""
    num_dropped_tokens: int
    num_masked: int
    """Documents without a label, left out because they train nothing."""
    num_masked_packs: int
    """Packs left out for the same reason: no label but on first tokens of documents."""
    num_masked_tokens: int
    """Tokens of these documents and packs."""

    @property
    def utilisation(self) -> float:
        """Share of the packs' ``packs * max_length`` places that hold a token."""
        return self.tokens / (self.packs * self.max_length)

    def __str__(self) -> str:
        return (
            f"packed {self.documents:,} documents of {self.tokens:,} tokens into {self.packs:,} "
            f"packs of {self.max_length:,}, {self.utilisation:.2%} used (padded in batches of "
            f"{_PADDED_BATCH}: {self.padding:.1%} padding); {self.num_split:,} documents split, "
            f"{self.num_dropped:,} dropped as too long ({self.num_dropped_tokens:,} tokens), "
            f"{self.num_masked:,} documents and {self.num_masked_packs:,} packs left out for "
            f"want of labels ({self.num_masked_tokens:,} tokens)"
        )


def padding_of_batches(lengths: np.ndarray, seed: int = 0) -> float:
    """Return the share of padding in random batches of 16 documents.

    Args:
        lengths: Tokens of each document, ``(num_documents,)``.
        seed: Of the order that batches are cut from.
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    edges = np.arange(0, len(lengths), _PADDED_BATCH)
    sizes = np.diff(edges, append=len(lengths))
    places = (np.maximum.reduceat(lengths[order], edges) * sizes).sum()
    return float(1 - lengths.sum() / places)
