"""Batches whose padded size comes close to a budget, filled from a rolling window."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import Sampler

from xtuner_mamba.dataset.arguments import bind_arguments, check_choice, check_integer
from xtuner_mamba.dataset.batch_plan import (
    BatchPlan,
    check_inputs,
    resolve_inputs,
    warn_of_long_documents,
)
from xtuner_mamba.dataset.curriculum import LengthCurriculum

# batches an epoch may have above the first, so that all have as many
_SPARE = 0.003
# a draw that needs more batches is tried again with a window that many times wider
_WIDER = 8


@DATA_SAMPLERS.register_module()
class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Fill batches from a shuffled window, as close to ``tokens_per_batch`` as their lengths allow.

    The padded size of a batch is its longest document times its count of documents. It is at most
    ``tokens_per_batch``, unless a document alone is longer. Every document comes once an epoch;
    where there are fewer than the steps have ranks, some come twice. The order is a pure function
    of the seed and the epoch, and every epoch has as many steps. A *step* is a batch a rank, of
    like lengths.

    In a config it is the ``batch_sampler``; ``lengths`` and ``seed`` then come from the dataset and
    the ``sampler`` of the dataloader, which has no other say.

    Args:
        lengths: Tokens of each document.
        tokens_per_batch: Places of a batch, on each rank.
        window: Documents to choose from. More of them fill batches better, fewer mix batches
            more.
        seed: The same on all ranks.
        shuffle: Whether each epoch draws other batches in another order.
        num_replicas: Data-parallel ranks; the process group's by default.
        rank: Of this process among them.
        sampler: MMEngine's; see above.
        batch_size: MMEngine's; must be 1.

    Raises:
        ValueError: An argument cannot be met.
    """

    def __init__(
        self,
        lengths: Sequence[int] | None = None,
        tokens_per_batch: int = 16_000,
        window: int = 2048,
        seed: int | None = None,
        shuffle: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        sampler: Any = None,
        batch_size: int | None = None,
    ) -> None:
        _check_options(window=window, shuffle=shuffle)
        inputs = resolve_inputs(
            lengths,
            tokens_per_batch=tokens_per_batch,
            seed=seed,
            num_replicas=num_replicas,
            rank=rank,
            sampler=sampler,
            batch_size=batch_size,
        )
        self.lengths, self.seed = inputs.lengths, inputs.seed
        self.num_replicas, self.rank = inputs.num_replicas, inputs.rank
        self.tokens_per_batch, self.window, self.shuffle = tokens_per_batch, window, shuffle
        warn_of_long_documents(self.lengths, tokens_per_batch)
        first = self._fill(self._rng(0), window)[1]
        most = min(int(len(first) * (1 + _SPARE)), len(self.lengths)) if shuffle else len(first)
        self._num_steps = -(-most // self.num_replicas)
        self.curriculum: LengthCurriculum | None = None
        """What ``LengthCurriculumHook`` sets."""
        # MMEngine's loop tells the epoch to batch_sampler.sampler
        self.sampler, self.epoch = self, 0
        # rows of a batch, which MMEngine asks for on behalf of DeepSpeed
        self.batch_size = 1

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[list[int]]:
        # drawn now: the epoch changes while a loader still fetches
        plan = self._draw(self.epoch)
        if self.curriculum is not None:
            plan = plan.reorder(self.curriculum, self.epoch, self.lengths, self.num_replicas)
        return plan.of_rank(self.rank, self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Choose what the next iteration draws."""
        self.epoch = epoch

    def _rng(self, epoch: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, epoch if self.shuffle else 0))

    def _draw(self, epoch: int) -> BatchPlan:
        rng, window = self._rng(epoch), self.window
        wanted = self._num_steps * self.num_replicas
        documents, sizes = self._fill(rng, window)
        # a window over all documents needs the fewest batches, whatever their order
        while len(sizes) > wanted:
            window *= _WIDER
            documents, sizes = self._fill(rng, window)
        sizes = halve_largest(sizes, wanted)
        if len(sizes) < wanted:
            # every rank needs a document
            documents, sizes = np.resize(documents, wanted), np.ones(wanted, dtype=np.int64)
        steps = np.arange(self._num_steps)
        offsets = np.concatenate([[0], sizes.cumsum()])
        return BatchPlan(documents, offsets, rng.permutation(steps) if self.shuffle else steps)

    def _fill(self, rng: np.random.Generator, window: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.arange(len(self.lengths))
        if self.shuffle:
            order = rng.permutation(order)
        return fill_batches(self.lengths, order, self.tokens_per_batch, window)


def check_budget_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of :class:`TokenBudgetBatchSampler`, before there is a dataset.

    Args:
        arguments: By name, as a config has them.

    Raises:
        ValueError: One is unknown, or cannot be met.
    """
    values = bind_arguments(TokenBudgetBatchSampler, arguments)
    check_inputs(**{name: values[name] for name in ("tokens_per_batch", "seed", "batch_size")})
    _check_options(window=values["window"], shuffle=values["shuffle"])


def _check_options(*, window: int, shuffle: bool) -> None:
    check_integer("window", window, 1)
    check_choice("shuffle", shuffle, (True, False))


def fill_batches(
    lengths: np.ndarray, order: np.ndarray, tokens_per_batch: int, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into the fewest batches that a window allows.

    The longest document of the window leads a batch and takes as many of the next shorter ones as
    fit. Those that fill no batch wait for the next window.

    >>> lengths = np.array([3, 8, 5, 2, 4])
    >>> fill_batches(lengths, np.arange(5), tokens_per_batch=10, window=5)
    (array([1, 2, 4, 0, 3]), array([1, 2, 2]))

    Args:
        lengths: Tokens of each document, ``(num_documents,)``.
        order: In which documents enter the window, ``(num_documents,)``.
        tokens_per_batch: What the longest document times the count of a batch is at most.
        window: Documents that enter at once.

    Returns:
        Documents, batch by batch, and the size of each batch, int64.
    """
    documents, sizes = [], []
    waiting = order[:0]
    for start in range(0, len(order), window):
        pool = np.concatenate([waiting, order[start : start + window]])
        pool = pool[np.argsort(-lengths[pool], kind="stable")]
        room = np.maximum(tokens_per_batch // lengths[pool], 1).tolist()
        is_last = start + window >= len(order)
        filled = 0
        while filled < len(pool) and (is_last or filled + room[filled] <= len(pool)):
            size = min(room[filled], len(pool) - filled)
            sizes.append(size)
            filled += size
        documents.append(pool[:filled])
        waiting = pool[filled:]
    return np.concatenate(documents), np.array(sizes)


def halve_largest(sizes: np.ndarray, wanted: int) -> np.ndarray:
    """Halve the batches of most documents until there are ``wanted``, or none has two.

    >>> halve_largest(np.array([2, 5, 1]), 4).tolist()
    [2, 3, 2, 1]

    Args:
        sizes: Documents of each batch, ``(num_batches,)``.
        wanted: Batches to end with.
    """
    while len(sizes) < wanted and sizes.max() > 1:
        largest = np.argsort(-sizes, kind="stable")[: wanted - len(sizes)]
        largest = largest[sizes[largest] > 1]
        halves = sizes[largest] // 2
        sizes = sizes.copy()
        sizes[largest] -= halves
        sizes = np.insert(sizes, largest + 1, halves)
    return sizes
