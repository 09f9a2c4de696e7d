"""Batches of an epoch, and what a batch sampler is told about the run that it is in."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mmengine.dist import get_rank, get_world_size, sync_random_seed
from mmengine.logging import print_log
from torch.utils.data import ConcatDataset

from xtuner_mamba.dataset.arguments import check_integer
from xtuner_mamba.dataset.curriculum import LengthCurriculum


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Batches of an epoch, for all ranks.

    Two ranks and the batches ``[4, 2] [5]  [0] [1, 3]`` are two steps; the second comes first::

        documents = [4, 2, 5, 0, 1, 3]
        offsets   = [0, 2, 3, 4, 6]        batch b holds documents offsets[b] : offsets[b + 1]
        steps     = [1, 0]                 step s holds batches 2 * s and 2 * s + 1
    """

    documents: np.ndarray
    """Int64, end to end."""
    offsets: np.ndarray
    """Int64, ``(num_batches + 1,)``."""
    steps: np.ndarray
    """The order of the steps, int64, ``(num_steps,)``."""

    def reorder(
        self, curriculum: LengthCurriculum, epoch: int, lengths: np.ndarray, num_replicas: int
    ) -> "BatchPlan":
        """Put the steps into the order of a curriculum.

        Args:
            curriculum: Says which lengths may come when.
            epoch: Counts from 0.
            lengths: Tokens of each document, ``(num_documents,)``.
            num_replicas: Batches of a step.
        """
        longest = np.maximum.reduceat(lengths[self.documents], self.offsets[:-1])
        longest = longest.reshape(-1, num_replicas).max(axis=1)[self.steps]
        order, num_early = curriculum.order(longest, epoch)
        if num_early:
            print_log(
                f"curriculum: {num_early:,} of {len(order):,} steps of epoch {epoch} come early, "
                "since no shorter ones are left",
                logger="current",
            )
        return BatchPlan(self.documents, self.offsets, self.steps[order])

    def of_rank(self, rank: int, num_replicas: int) -> Iterator[list[int]]:
        """Iterate over the batches that one rank trains on."""
        for batch in (self.steps * num_replicas + rank).tolist():
            yield self.documents[self.offsets[batch] : self.offsets[batch + 1]].tolist()


@dataclass(frozen=True, eq=False)
class SamplerInputs:
    """What a batch sampler works on."""

    lengths: np.ndarray
    """Tokens of each document, int64, ``(num_documents,)``."""
    seed: int
    num_replicas: int
    rank: int


def check_inputs(*, tokens_per_batch: int, seed: int | None, batch_size: int | None) -> None:
    """Check what is known before there is a dataset.

    Raises:
        ValueError: A value cannot be met.
    """
    if batch_size not in (None, 1):
        raise ValueError(
            f"batch_size must be 1 beside a batch_sampler, got {batch_size}; batches are filled to "
            f"tokens_per_batch={tokens_per_batch}"
        )
    check_integer("tokens_per_batch", tokens_per_batch, 1)
    if seed is not None:
        check_integer("seed", seed, 0)


def resolve_inputs(
    lengths: Sequence[int] | None,
    *,
    tokens_per_batch: int,
    seed: int | None,
    num_replicas: int | None,
    rank: int | None,
    sampler: Any,
    batch_size: int | None,
) -> SamplerInputs:
    """Fill in what MMEngine knows, and check the rest.

    Args:
        lengths: Tokens of each document; ``None`` takes those of the sampler's dataset.
        tokens_per_batch: Places of a batch.
        seed: ``None`` takes the sampler's, or draws one for all ranks.
        num_replicas: ``None`` takes the sampler's, or all ranks.
        rank: The same.
        sampler: What MMEngine built from ``dataloader.sampler``.
        batch_size: What the config says; the samplers decide themselves.

    Raises:
        ValueError: A value cannot be met, or there are no lengths.
    """
    check_inputs(tokens_per_batch=tokens_per_batch, seed=seed, batch_size=batch_size)
    if lengths is None:
        lengths = lengths_of(getattr(sampler, "dataset", None))
    # not int64 at once, which makes 1 of 1.5
    lengths = np.asarray(lengths)
    if lengths.size and (lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer)):
        raise ValueError(
            f"lengths must be an integer for each document, got {lengths.dtype} of shape "
            f"{lengths.shape}; give the tokens of each"
        )
    if not lengths.size or lengths.min() < 1:
        got = f"{lengths.min()} at {lengths.argmin()}" if lengths.size else "[]"
        raise ValueError(
            f"lengths must be at least 1 and not empty, got {got}; leave out documents without "
            "tokens"
        )
    if num_replicas is None:
        # not always all ranks: those of XTuner's SequenceParallelSampler share batches
        num_replicas = getattr(sampler, "world_size", get_world_size())
    if rank is None:
        rank = getattr(sampler, "rank", get_rank())
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank must be in [0, num_replicas={num_replicas}), got {rank}")
    if seed is None:
        seed = getattr(sampler, "seed", None)
    return SamplerInputs(
        lengths=lengths.astype(np.int64),
        seed=sync_random_seed() if seed is None else seed,
        num_replicas=num_replicas,
        rank=rank,
    )


def warn_of_long_documents(places: np.ndarray, tokens_per_batch: int) -> None:
    """Say how many documents exceed the budget, each in a batch of its own.

    Args:
        places: What a row of each document takes, ``(num_documents,)``.
        tokens_per_batch: Places of a batch.
    """
    if num_over := int((places > tokens_per_batch).sum()):
        print_log(
            f"tokens_per_batch={tokens_per_batch:,} is exceeded by {num_over:,} of "
            f"{len(places):,} documents, whose rows take up to {places.max():,} places, each in a "
            "batch of its own; raise it, or lower max_length and the last boundary",
            logger="current",
            level=logging.WARNING,
        )


def lengths_of(dataset: Any) -> np.ndarray:
    """Return the tokens of each row, which XTuner's datasets and ours keep as ``length``.

    Raises:
        ValueError: The dataset does not know them.
    """
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([lengths_of(part) for part in dataset.datasets])
    if not hasattr(dataset, "length"):
        raise ValueError(
            f"the dataset must have the attribute length, got {type(dataset).__name__} without; "
            "build it with process_document_dataset, or give lengths to the sampler"
        )
    # datasets 4 and later have a Column there, which is a list only when asked
    return np.asarray(dataset.length[:], dtype=np.int64)
