"""The documents that all schemes of a comparison train on, and those that none does."""

from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from mmengine.config import Config

from xtuner_mamba.dataset.boundaries import optimal_boundaries, padding_share
from xtuner_mamba.dataset.documents import TokenizedDocuments
from xtuner_mamba.dataset.lengths import choose_bucket_count
from xtuner_mamba.dataset.plan import PackPlan, Pieces, cut_pieces
from xtuner_mamba.integration.config_parts import type_name
from xtuner_mamba.layout import IGNORE_INDEX
from xtuner_mamba.tools.corpus import read_documents

# micro-batches of an optimizer step at least, so that steps differ little in their tokens
_MICRO_STEPS = 4
# of as many tokens as so many micro-batches hold, for there may be padding in them
_FILLED = 0.9
# of the documents trained on, as many more are held out
_HELD_OUT = 1 / 4
# rows that tell how many targets a row has
_SAMPLE = 256
_MAX_BUCKETS = 8


@dataclass(frozen=True)
class Settings:
    """What the schemes have in common, and what makes each."""

    max_length: int
    """Of a document; longer ones are split."""
    tokens_per_batch: int
    """Places of a micro-batch, and of a pack."""
    chunk_length: int
    boundaries: list[int] | None
    """Of the config's own buckets."""
    accumulative_counts: int


def read_settings(cfg: Config, chunk_length: int | None = None) -> Settings:
    """Read from a config of any scheme what all of them are to share.

    Args:
        cfg: As read.
        chunk_length: ``None`` takes the config's, if it has chunks, or a quarter of a micro-batch.

    Raises:
        ValueError: The config could not train on packs.
    """
    loader = cfg.train_dataloader
    dataset, sampler = loader.dataset, loader.get("batch_sampler") or {}
    max_length, packs = dataset.get("max_length"), cfg.get("use_varlen_attn", False)
    if max_length is None or not packs:
        raise ValueError(
            "a config must have a max_length and use_varlen_attn=True to compare packs with "
            f"anything, got {max_length} and {packs}; set both"
        )
    tokens_per_batch = sampler.get("tokens_per_batch", max_length)
    if type_name(dataset) == "process_packed_dataset" and sampler:
        # rows are chunks, and documents as long as a batch
        chunk_length = chunk_length or max_length
        max_length = tokens_per_batch
    return Settings(
        max_length=min(max_length, tokens_per_batch),
        tokens_per_batch=tokens_per_batch,
        chunk_length=chunk_length or tokens_per_batch // 4,
        boundaries=list(sampler.boundaries) if "boundaries" in sampler else None,
        accumulative_counts=cfg.optim_wrapper.get("accumulative_counts", 1),
    )


@dataclass(frozen=True, eq=False)
class Documents:
    """What is trained on, and how."""

    train: Dataset
    """Has ``input_ids`` and ``labels`` of pieces of documents."""
    held_out: Dataset
    """Documents of which ``train`` has no piece, each whole, however long."""
    tokens_per_step: int
    """Target tokens of an optimizer step."""
    boundaries: list[int]
    """Of the buckets: the config's own, or those with the least padding."""


def choose_documents(cfg: Config, settings: Settings, steps: int) -> Documents:
    """Tokenize as many documents of a config as make so many optimizer steps, drawn at random.

    Args:
        cfg: As read; only the count of its rows is changed.
        settings: Of the comparison.
        steps: Optimizer steps in which each document comes about once, if there are enough.

    Raises:
        ValueError: There are not even two documents.
    """
    node = cfg.train_dataloader.dataset
    at_most = node.get("max_dataset_length")
    micro_steps = max(settings.accumulative_counts, _MICRO_STEPS)
    places = int(_FILLED * micro_steps * settings.tokens_per_batch)
    num_rows = _SAMPLE
    while True:
        node.max_dataset_length = num_rows if at_most is None else min(num_rows, at_most)
        documents = read_documents(cfg)
        pieces = _cut_in_random_order(documents, settings.max_length)
        num_targets = np.array([_count_targets(labels) for _, labels in _read(documents, pieces)])
        tokens_per_step = max(int(places * num_targets.sum() / pieces.lengths.sum()), 1)
        missing = steps * tokens_per_step * (1 + _HELD_OUT) / num_targets.sum()
        if missing <= 1 or len(documents.lengths) < num_rows:
            break
        num_rows = int(num_rows * missing * 1.1) + 1
    # where the pieces of each document begin
    first = np.flatnonzero(np.diff(pieces.documents, prepend=-1))
    if len(first) < 2:
        raise ValueError(
            f"there must be documents to train on and others to hold out, got {len(first)} with a "
            "target; give more of them"
        )
    wanted = min(steps * tokens_per_step, num_targets.sum() / (1 + _HELD_OUT))
    train = pieces[: min(int(np.searchsorted(num_targets.cumsum(), wanted)) + 1, first[-1])]
    num_train = int(np.searchsorted(first, len(train)))
    num_held_out = max(int(_HELD_OUT * num_train), 1)
    held_out = pieces.documents[first[num_train : num_train + num_held_out]]
    return Documents(
        train=_as_dataset(documents, train),
        held_out=_as_dataset(documents, Pieces.whole(held_out, documents.lengths[held_out])),
        tokens_per_step=tokens_per_step,
        boundaries=settings.boundaries or _least_padding(train.lengths),
    )


def _cut_in_random_order(documents: TokenizedDocuments, max_length: int) -> Pieces:
    """Return what has a target, the pieces of a document side by side."""
    pieces = cut_pieces(documents.lengths, max_length)
    kept = documents.packs_with_target(PackPlan(pieces, np.arange(len(pieces) + 1)))
    place = np.random.default_rng(0).permutation(len(documents.lengths))
    return pieces[kept][np.argsort(place[pieces.documents[kept]], kind="stable")]


def _read(documents: TokenizedDocuments, pieces: Pieces) -> list[tuple[np.ndarray, np.ndarray]]:
    return [documents.read(pieces[i : i + 1]) for i in range(len(pieces))]


def _count_targets(labels: np.ndarray) -> int:
    return int((labels[1:] != IGNORE_INDEX).sum())


def _as_dataset(documents: TokenizedDocuments, pieces: Pieces) -> Dataset:
    columns = zip(*_read(documents, pieces), strict=True)
    return Dataset.from_dict(dict(zip(("input_ids", "labels"), map(list, columns), strict=True)))


def _least_padding(lengths: np.ndarray) -> list[int]:
    found = optimal_boundaries(lengths, _MAX_BUCKETS)
    paddings = [padding_share(lengths, np.array(boundaries)) for boundaries in found]
    return found[choose_bucket_count(paddings) - 1]
