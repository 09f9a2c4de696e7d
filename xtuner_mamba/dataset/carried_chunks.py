"""Fixed chunks whose documents go on in the next batch, on the same row of the same rank."""

import heapq
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from mmengine.logging import print_log
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import Dataset, Sampler
from xtuner.utils import DEFAULT_PAD_TOKEN_INDEX

from xtuner_mamba.dataset.arguments import bind_arguments, check_choice, check_integer
from xtuner_mamba.dataset.batch_plan import check_inputs, resolve_inputs
from xtuner_mamba.dataset.collate import packed_collate_fn
from xtuner_mamba.dataset.documents import TokenizedDocuments
from xtuner_mamba.dataset.plan import Pieces
from xtuner_mamba.dataset.process import check_arguments, process_packed_dataset
from xtuner_mamba.layout import IGNORE_INDEX


class Chunk(NamedTuple):
    """A row of one batch: runs of tokens of documents, of which the first may go on with one.

    Each list has an entry a run; ``plan`` is what the chunks of all steps are a function of.
    """

    epoch: int
    step: int
    documents: list[int]
    starts: list[int]
    lengths: list[int]
    plan: dict[str, int]


class ChunkDataset(Dataset):
    """Documents, read by the chunks that ``CarriedChunkBatchSampler`` cuts.

    ``dataset[i]`` is document ``i``, as a chunk that holds all of it.

    Args:
        documents: Where the tokens are.
        pieces: The documents to train on.
    """

    def __init__(self, documents: TokenizedDocuments, pieces: Pieces) -> None:
        self.documents, self.pieces = documents, pieces
        self.length: list[int] = pieces.lengths.tolist()
        """Tokens of each document, where batch samplers look for them."""

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, chunk: Chunk | int) -> dict[str, Any]:
        if not isinstance(chunk, Chunk):
            chunk = Chunk(0, 0, [chunk], [0], [self.length[chunk]], {})
        pieces = Pieces(*map(np.asarray, (chunk.documents, chunk.starts, chunk.lengths)))
        is_left = pieces.starts[-1] + pieces.lengths[-1] < self.length[chunk.documents[-1]]
        # the token after the chunk, if it is the last one's target
        lengths = pieces.lengths.copy()
        lengths[-1] += is_left
        read = Pieces(pieces.documents, pieces.starts, lengths).of(self.pieces)
        input_ids, labels = (column.tolist() for column in self.documents.read(read))
        next_label = labels.pop() if is_left else IGNORE_INDEX
        total = len(labels)
        ends = [0, *accumulate(chunk.lengths)]
        for start in ends[:-1]:
            labels[start] = IGNORE_INDEX
        return {
            "input_ids": input_ids[:total],
            "labels": labels,
            "cumulative_len": ends,
            "position_ids": list(chain.from_iterable(map(range, chunk.lengths))),
            "continues": chunk.starts[0] > 0,
            "next_label": next_label,
            "chunk": (chunk.epoch, chunk.step),
            "plan": chunk.plan,
        }


def process_chunk_dataset(*args: Any, **kwargs: Any) -> ChunkDataset:
    """Tokenize documents for ``CarriedChunkBatchSampler``, which cuts them into chunks.

    Args:
        *args: As in ``process_packed_dataset``.
        **kwargs: As there. ``max_length`` is that of a chunk; ``packing`` and ``too_long`` have no
            say, since documents of any length are carried from chunk to chunk.

    Raises:
        ValueError: An argument cannot be met, or nothing is left to train on.
    """
    packs = process_packed_dataset(*args, **kwargs | _CUT_ANYWHERE)
    return ChunkDataset(packs.documents, packs.pieces)


_CUT_ANYWHERE = dict(packing="wrap", too_long="split")


def check_chunk_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of :func:`process_chunk_dataset`, before anything is built.

    Args:
        arguments: By name, as a config has them.

    Raises:
        ValueError: One is unknown, missing, or cannot be met.
    """
    check_arguments({**arguments, **_CUT_ANYWHERE})


@DATA_SAMPLERS.register_module()
class CarriedChunkBatchSampler(Sampler[list[Chunk]]):
    """Cut documents into rows of ``max_length`` tokens that go on from batch to batch.

    Each row of each rank has documents of its own, laid end to end in random order, and a step
    takes the next tokens of every row. So a document longer than a row goes on in the same row of
    the next micro-batch, where its state is carried to, and none is cut otherwise. The rows have
    about as many tokens; what one has less is taken from each of its chunks. The order is a pure
    function of the seed and the epoch, and every epoch has as many steps.

    In a config it is the ``batch_sampler``; ``lengths`` and ``seed`` then come from the dataset and
    the ``sampler`` of the dataloader, which has no other say.

    Args:
        lengths: Tokens of each document.
        max_length: Tokens of a row, at most.
        tokens_per_batch: Places of a batch, on each rank: ``tokens_per_batch // max_length`` rows.
        seed: The same on all ranks.
        shuffle: Whether each epoch draws another order.
        num_replicas: Data-parallel ranks; the process group's by default.
        rank: Of this process among them.
        sampler: MMEngine's; see above.
        batch_size: MMEngine's; must be 1.

    Raises:
        ValueError: An argument cannot be met, or there are too few documents for the rows.
    """

    def __init__(
        self,
        lengths: Sequence[int] | None = None,
        max_length: int = 2048,
        tokens_per_batch: int = 16_000,
        seed: int | None = None,
        shuffle: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        sampler: Any = None,
        batch_size: int | None = None,
    ) -> None:
        _check_rows(max_length=max_length, tokens_per_batch=tokens_per_batch, shuffle=shuffle)
        inputs = resolve_inputs(
            lengths,
            tokens_per_batch=tokens_per_batch,
            seed=seed,
            num_replicas=num_replicas,
            rank=rank,
            sampler=sampler,
            batch_size=batch_size,
        )
        self.lengths, self.seed, self.shuffle = inputs.lengths, inputs.seed, shuffle
        self._num_rows = tokens_per_batch // max_length
        self._plan = {
            "max_length": max_length,
            "tokens_per_batch": tokens_per_batch,
            "seed": self.seed,
            "shuffle": shuffle,
            "documents": len(self.lengths),
            "tokens": int(self.lengths.sum()),
            "checksum of lengths": zlib.crc32(self.lengths.tobytes()),
        }
        self._first_row = inputs.rank * self._num_rows
        num_rows = self._num_rows * inputs.num_replicas
        if len(self.lengths) < num_rows:
            raise ValueError(
                f"there must be a document for each of {num_rows} rows on {inputs.num_replicas} "
                f"ranks, got {len(self.lengths)}; lower tokens_per_batch"
            )
        self._row_of = share_documents(self.lengths, num_rows)
        totals = np.bincount(self._row_of, self.lengths).astype(np.int64)
        self._num_steps = -(-int(totals.max()) // max_length)
        if totals.min() < self._num_steps:
            raise ValueError(
                f"each row must have a token for each of {self._num_steps} steps, got rows of "
                f"{totals.min()} to {totals.max()} tokens; some document is too long for so many "
                "rows: lower tokens_per_batch"
            )
        # MMEngine's loop tells the epoch to batch_sampler.sampler
        self.sampler, self.epoch = self, 0
        # rows of a batch, which MMEngine asks for on behalf of DeepSpeed
        self.batch_size = 1
        used = totals.sum() / (self._num_steps * num_rows * max_length)
        print_log(
            f"chunks: {self._num_steps:,} steps an epoch of {num_rows} rows of {max_length:,} "
            f"tokens on {inputs.num_replicas} ranks, {used:.2%} used; "
            f"{(self.lengths > max_length).sum():,} of {len(self.lengths):,} documents are longer "
            "than a row and carried on",
            logger="current",
        )

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[list[Chunk]]:
        # drawn now: the epoch changes while a loader still fetches
        epoch = self.epoch
        rng = np.random.default_rng((self.seed, epoch if self.shuffle else 0))
        order = np.arange(len(self.lengths))
        if self.shuffle:
            order = rng.permutation(order)
        own = range(self._first_row, self._first_row + self._num_rows)
        rows = [self._cut(order[self._row_of[order] == row], epoch) for row in own]
        return (list(batch) for batch in zip(*rows))

    def set_epoch(self, epoch: int) -> None:
        """Choose what the next iteration draws."""
        self.epoch = epoch

    def _cut(self, documents: np.ndarray, epoch: int) -> Iterator[Chunk]:
        """Cut the documents of a row, laid end to end, into the chunks of its steps."""
        ends = self.lengths[documents].cumsum()
        edges = np.arange(self._num_steps + 1) * ends[-1] // self._num_steps
        for step, (start, stop) in enumerate(pairwise(edges)):
            first = np.searchsorted(ends, start, side="right")
            last = np.searchsorted(ends, stop)
            chosen = documents[first : last + 1]
            begins = ends[first : last + 1] - self.lengths[chosen]
            starts = np.maximum(start - begins, 0)
            stops = np.minimum(stop - begins, self.lengths[chosen])
            lengths = stops - starts
            runs = (chosen.tolist(), starts.tolist(), lengths.tolist())
            yield Chunk(epoch, step, *runs, self._plan)


def check_carried_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of :class:`CarriedChunkBatchSampler`, before there is a dataset.

    Args:
        arguments: By name, as a config has them.

    Raises:
        ValueError: One is unknown, or cannot be met.
    """
    values = bind_arguments(CarriedChunkBatchSampler, arguments)
    check_inputs(**{name: values[name] for name in ("tokens_per_batch", "seed", "batch_size")})
    _check_rows(**{name: values[name] for name in ("max_length", "tokens_per_batch", "shuffle")})


def _check_rows(*, max_length: int, tokens_per_batch: int, shuffle: bool) -> None:
    check_integer("max_length", max_length, 1)
    check_integer("tokens_per_batch", tokens_per_batch, max_length)
    check_choice("shuffle", shuffle, (True, False))


def share_documents(lengths: np.ndarray, num_rows: int) -> np.ndarray:
    """Share whole documents out to rows of about as many tokens, the longest ones first.

    >>> share_documents(np.array([5, 9, 4, 4]), num_rows=2).tolist()
    [1, 0, 1, 0]

    Args:
        lengths: Tokens of each document, ``(num_documents,)``.
        num_rows: At most as many as documents.

    Returns:
        Row of each document, int64, ``(num_documents,)``; none is without any.
    """
    order = np.argsort(-lengths, kind="stable")
    loads = [(0, row) for row in range(num_rows)]
    row_of = np.empty_like(order)
    for document in order.tolist():
        load, row = loads[0]
        row_of[document] = row
        heapq.heapreplace(loads, (load + int(lengths[document]), row))
    return row_of


def carried_collate_fn(
    instances: Sequence[dict],
    pad_index: int = DEFAULT_PAD_TOKEN_INDEX,
    return_hf_format: bool = False,
) -> dict:
    """Lay the rows of a batch end to end, and tell which go on with a document.

    Args:
        instances: Rows, from ``process_chunk_dataset`` with ``CarriedChunkBatchSampler``.
        pad_index: Of no use, since nothing is padded.
        return_hf_format: Whether to return the inner dict alone.

    Returns:
        What ``packed_collate_fn`` gives, with ``carried`` in its data: for each row the count of
        its pieces, whether the first goes on with a document, and the label after the row; and
        the epoch and the step of the batch, and the plan that it is of.

    Raises:
        ValueError: An instance is no row of chunks.
    """
    for instance in instances:
        if "continues" not in instance:
            raise ValueError(
                f"a row must hold continues, got {sorted(instance)}; build the dataset with "
                "process_chunk_dataset and batch it with CarriedChunkBatchSampler"
            )
    lengths = [np.diff(instance["cumulative_len"]) for instance in instances]
    names = ("input_ids", "labels", "position_ids")
    pack = {name: list(chain.from_iterable(row[name] for row in instances)) for name in names}
    pack["cumulative_len"] = [0, *np.concatenate(lengths).cumsum().tolist()]
    batch = packed_collate_fn([pack], pad_index, return_hf_format)
    data = batch if return_hf_format else batch["data"]
    data["carried"] = {
        "num_pieces": list(map(len, lengths)),
        "continues": [instance["continues"] for instance in instances],
        "next_labels": [instance["next_label"] for instance in instances],
        "chunk": instances[0]["chunk"],
        "plan": instances[0]["plan"],
    }
    return batch
