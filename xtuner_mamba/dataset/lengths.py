"""What the lengths of a corpus mean for each way to batch it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from xtuner_mamba.dataset.batch_sizes import choose_batch_sizes
from xtuner_mamba.dataset.boundaries import optimal_boundaries, padding_share, powers_of_two
from xtuner_mamba.dataset.buckets import assign_buckets, check_boundaries, share_steps
from xtuner_mamba.dataset.plan import cut_pieces, plan_best_fit
from xtuner_mamba.dataset.report import padding_of_batches
from xtuner_mamba.dataset.token_budget import fill_batches

# names of schemes, in the table and in advice
FIXED_ROWS = "fixed rows"
CHUNKS = "fixed chunks"
RANDOM = "random batches"
OPTIMAL = "optimal buckets, {}"
POWERS = "powers of two"
OWN = "your buckets"
ROLLING = "rolling window"
PACKED = "packed, best fit"
WRAPPED = "packed, wrap"

_MAX_BUCKETS = 8
_NUM_BINS = 40
# documents that TokenBudgetBatchSampler chooses from
_WINDOW = 2048
# epochs whose mean is what the buckets get of the steps
_NUM_EPOCHS = 500


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to batch the corpus, and what it wastes, cuts or loses."""

    name: str
    padding: float
    """Share of places without a token, if padding is executed or a row is not full, the last one
    included."""
    num_split: int = 0
    """Documents whose tokens lie in several rows, so that the rest starts without a state."""
    num_truncated: int = 0
    num_dropped: int = 0
    num_lost_tokens: int = 0
    """Tokens of truncated or dropped documents that nothing trains on."""
    boundaries: tuple[int, ...] = ()
    """Of buckets."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One bucket of some boundaries."""

    boundary: int
    documents: int
    batch_size: int
    padding: float
    best_split: int | None
    """Boundary that would spare most padding in it; none if its documents have one length."""
    natural: float
    """Share of the tokens trained on, if every document comes once."""
    sqrt_tokens: float
    """The same, if ``sampling="sqrt_tokens"`` draws the steps of an epoch, on one device."""


@dataclass(frozen=True, kw_only=True)
class LengthReport:
    """Numbers about the lengths of a corpus, the documents that are dropped included."""

    documents: int
    tokens: int
    max_length: int
    too_long: str
    """What becomes of documents longer than ``max_length``."""
    unused_but_last: float
    """Share of the places of best-fit packs that more packing could fill: without what the last of
    the fewest possible packs leaves, which no document is there to fill."""
    quantiles: dict[str, int]
    """Tokens of the documents at ``min``, ``10 %`` ... ``max``."""
    bin_edges: list[int]
    """Of the histogram, rising about geometrically; a bin includes its lower edge."""
    bin_documents: list[int]
    bin_tokens: list[int]
    long_documents: int
    """Documents longer than ``max_length``."""
    long_tokens: int
    """Tokens of those."""
    schemes: list[Scheme]
    buckets: list[Bucket]
    """Of the user's boundaries, or of the optimal ones that are recommended."""

    def scheme(self, name: str) -> Scheme:
        """Return the scheme of that name."""
        return next(scheme for scheme in self.schemes if scheme.name == name)


def analyse_lengths(
    lengths: Sequence[int],
    max_length: int,
    *,
    boundaries: Sequence[int] | None = None,
    tokens_per_batch: int = 16_000,
    batch_sizes: Sequence[int] | str | None = None,
    too_long: Literal["split", "truncate", "drop", "error"] = "split",
) -> LengthReport:
    """Compare the ways to batch documents of these lengths.

    Args:
        lengths: Tokens of each document.
        max_length: The longest row.
        boundaries: The user's own.
        tokens_per_batch: Places of a batch of a bucket.
        batch_sizes: Documents of a batch of each of the user's buckets, as ``BucketBatchSampler``
            takes them.
        too_long: What becomes of documents longer than ``max_length``. ``"error"``, which trains
            on none of such a corpus, is reported as ``"split"``.

    Raises:
        ValueError: No document is left, the boundaries hold not all, or have other batch sizes.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    long = lengths > max_length
    kept = lengths[~long] if too_long == "drop" else lengths
    if not len(kept):
        raise ValueError(
            f"max_length must hold a document with too_long='drop', got {max_length:,} for "
            f"{len(lengths):,} documents of at least {lengths.min():,} tokens; raise it"
        )
    rows = np.minimum(kept, max_length) if too_long == "truncate" else kept
    pieces = cut_pieces(rows, max_length).lengths
    fewest = -(-int(pieces.sum()) // max_length)
    num_packs = len(plan_best_fit(pieces, max_length))
    bucketed = {OPTIMAL.format(len(b)): b for b in optimal_boundaries(pieces, _MAX_BUCKETS)}
    paddings = [padding_share(pieces, np.array(found)) for found in bucketed.values()]
    shown = bucketed[OPTIMAL.format(choose_bucket_count(paddings))]
    bucketed[POWERS] = powers_of_two(pieces)
    if boundaries is not None:
        shown = bucketed[OWN] = check_boundaries(boundaries).tolist()
        assign_buckets(pieces, np.array(shown))
    paddings = {
        RANDOM: padding_of_batches(pieces),
        **{name: padding_share(pieces, np.array(found)) for name, found in bucketed.items()},
        ROLLING: _rolling_padding(pieces, tokens_per_batch),
        PACKED: _unused(pieces, num_packs * max_length),
    }
    lost = dict(
        num_truncated=int(long.sum()) if too_long == "truncate" else 0,
        num_dropped=int(long.sum()) if too_long == "drop" else 0,
        num_lost_tokens=int(lengths.sum() - pieces.sum()),
    )
    num_split = int((rows > max_length).sum())
    cut = dict(
        padding=_unused(pieces, fewest * max_length), num_split=_count_cut(rows, max_length), **lost
    )
    schemes = [
        _fixed_rows(kept, max_length, lost),
        Scheme(name=CHUNKS, **cut),
        *(
            Scheme(
                name=name,
                padding=padding,
                num_split=num_split,
                boundaries=tuple(bucketed.get(name, ())),
                **lost,
            )
            for name, padding in paddings.items()
        ),
        Scheme(name=WRAPPED, **cut),
    ]
    edges = _bin_edges(lengths)
    bins = np.searchsorted(edges, lengths, side="right") - 1
    levels = {"min": 0, "10 %": 10, "50 %": 50, "90 %": 90, "99 %": 99, "max": 100}
    values = np.percentile(lengths, list(levels.values()), method="lower")
    return LengthReport(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        max_length=max_length,
        too_long=too_long,
        unused_but_last=1 - fewest / num_packs,
        quantiles=dict(zip(levels, values.tolist())),
        bin_edges=edges.tolist(),
        bin_documents=np.bincount(bins, minlength=len(edges) - 1).tolist(),
        bin_tokens=np.bincount(bins, lengths, minlength=len(edges) - 1).astype(int).tolist(),
        long_documents=int(long.sum()),
        long_tokens=int(lengths[long].sum()),
        schemes=schemes,
        buckets=describe_buckets(
            pieces,
            np.array(shown),
            choose_batch_sizes(np.array(shown), tokens_per_batch, batch_sizes),
        ),
    )


def describe_buckets(
    lengths: np.ndarray, boundaries: np.ndarray, batch_sizes: np.ndarray
) -> list[Bucket]:
    """Return what each bucket holds; those without a document are left out.

    Args:
        lengths: Tokens of each document, ``(num_documents,)``.
        boundaries: ``(num_buckets,)``.
        batch_sizes: Documents of a full batch, ``(num_buckets,)``.
    """
    index = assign_buckets(lengths, boundaries)
    counts = np.bincount(index, minlength=len(boundaries))
    tokens = np.bincount(index, lengths, minlength=len(boundaries))
    natural = tokens / tokens.sum()
    exposed = _sqrt_token_shares(tokens, -(-counts // batch_sizes))
    return [
        Bucket(
            boundary=int(boundaries[b]),
            documents=int(counts[b]),
            batch_size=int(batch_sizes[b]),
            padding=float(1 - tokens[b] / (counts[b] * boundaries[b])),
            best_split=_best_split(lengths[index == b], int(boundaries[b])),
            natural=float(natural[b]),
            sqrt_tokens=float(exposed[b]),
        )
        for b in np.flatnonzero(counts)
    ]


def _sqrt_token_shares(tokens: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
    """Return the share of the tokens that a sampler of square roots shows of each bucket."""
    offsets = (np.arange(_NUM_EPOCHS) + 0.5) / _NUM_EPOCHS
    drawn = np.mean([share_steps(num_steps, tokens, offset) for offset in offsets], axis=0)
    # batches of a bucket differ by a document at most, so that many tokens are in each on average
    exposed = drawn * tokens / num_steps.clip(1)
    return exposed / exposed.sum()


def choose_bucket_count(paddings: Sequence[float], least_gain: float = 0.03) -> int:
    """Return how many buckets pay: one more must spare ``least_gain`` of all places.

    >>> choose_bucket_count([0.7, 0.4, 0.3, 0.29, 0.28])
    3

    Args:
        paddings: Share of padding with 1, 2, ... buckets.
        least_gain: Share of places.
    """
    gains = -np.diff(paddings)
    enough = np.flatnonzero(gains < least_gain)
    return int(enough[0]) + 1 if enough.size else len(paddings)


def _fixed_rows(lengths: np.ndarray, max_length: int, lost: dict[str, int]) -> Scheme:
    """Pad or truncate each document to one length, whatever else becomes of long ones."""
    row = min(max_length, int(lengths.max()))
    kept = np.minimum(lengths, row)
    truncated = dict(
        num_truncated=int((lengths > row).sum()), num_lost_tokens=int((lengths - kept).sum())
    )
    return Scheme(
        name=FIXED_ROWS,
        padding=_unused(kept, len(kept) * row),
        **(lost if lost["num_dropped"] else truncated),
    )


def _count_cut(lengths: np.ndarray, max_length: int) -> int:
    """Count documents whose first and last token are in different rows, laid end to end."""
    ends = lengths.cumsum()
    return int(((ends - 1) // max_length != (ends - lengths) // max_length).sum())


def _rolling_padding(lengths: np.ndarray, tokens_per_batch: int) -> float:
    order = np.random.default_rng(0).permutation(len(lengths))
    documents, sizes = fill_batches(lengths, order, tokens_per_batch, _WINDOW)
    longest = np.maximum.reduceat(lengths[documents], sizes.cumsum() - sizes)
    return float(1 - lengths.sum() / (longest * sizes).sum())


def _unused(lengths: np.ndarray, places: int) -> float:
    return float(1 - lengths.sum() / places)


def _best_split(lengths: np.ndarray, boundary: int) -> int | None:
    # the boundary stays, and so is a length of the bucket
    found = optimal_boundaries(np.append(lengths, boundary), max_buckets=2)
    return found[1][0] if len(found) > 1 else None


def _bin_edges(lengths: np.ndarray) -> np.ndarray:
    """Return rising edges from the shortest length to beyond the longest, int64."""
    edges = np.geomspace(lengths.min(), lengths.max() + 1, _NUM_BINS + 1)
    return np.unique(edges.round().astype(np.int64))
