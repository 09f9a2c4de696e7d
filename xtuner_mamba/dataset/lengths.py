"""What the lengths of a corpus mean for each way to batch it."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Share of places without a token, if padding is executed or a pack is not full.

    What the last of the fewest possible rows leaves is not counted: nothing could fill it.
    """
    num_split: int = 0
    """Documents whose tokens lie in several rows, so that the rest starts without a state."""
    num_truncated: int = 0
    num_lost_tokens: int = 0
    """Tokens of truncated documents that nothing trains on."""
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
    """Numbers about the lengths of a corpus."""

    documents: int
    tokens: int
    max_length: int
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
) -> LengthReport:
    """Compare the ways to batch documents of these lengths.

    Args:
        lengths: Tokens of each document.
        max_length: The longest row. Documents beyond are split, where a scheme does not say else.
        boundaries: The user's own.
        tokens_per_batch: Places of a batch of a bucket.
        batch_sizes: Documents of a batch of each of the user's buckets, as ``BucketBatchSampler``
            takes them.

    Raises:
        ValueError: There is no document, the boundaries hold not all, or have other batch sizes.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    pieces = cut_pieces(lengths, max_length).lengths
    long = lengths > max_length
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
        PACKED: _unused_by_packs(pieces, max_length),
    }
    schemes = [
        _fixed_rows(lengths, max_length),
        _cut_rows(CHUNKS, lengths, max_length),
        *(
            Scheme(
                name=name,
                padding=padding,
                num_split=int(long.sum()),
                boundaries=tuple(bucketed.get(name, ())),
            )
            for name, padding in paddings.items()
        ),
        _cut_rows(WRAPPED, lengths, max_length),
    ]
    edges = _bin_edges(lengths)
    bins = np.searchsorted(edges, lengths, side="right") - 1
    levels = {"min": 0, "10 %": 10, "50 %": 50, "90 %": 90, "99 %": 99, "max": 100}
    values = np.percentile(lengths, list(levels.values()), method="lower")
    return LengthReport(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        max_length=max_length,
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


def _fixed_rows(lengths: np.ndarray, max_length: int) -> Scheme:
    row = min(max_length, int(lengths.max()))
    kept = np.minimum(lengths, row)
    return Scheme(
        name=FIXED_ROWS,
        padding=float(1 - kept.sum() / (len(lengths) * row)),
        num_truncated=int((lengths > row).sum()),
        num_lost_tokens=int((lengths - kept).sum()),
    )


def _cut_rows(name: str, lengths: np.ndarray, max_length: int) -> Scheme:
    ends = lengths.cumsum()
    # the first and the last token in different rows
    cut = (ends - 1) // max_length != (ends - lengths) // max_length
    return Scheme(name=name, padding=0.0, num_split=int(cut.sum()))


def _rolling_padding(lengths: np.ndarray, tokens_per_batch: int) -> float:
    order = np.random.default_rng(0).permutation(len(lengths))
    documents, sizes = fill_batches(lengths, order, tokens_per_batch, _WINDOW)
    longest = np.maximum.reduceat(lengths[documents], sizes.cumsum() - sizes)
    return float(1 - lengths.sum() / (longest * sizes).sum())


def _unused_by_packs(lengths: np.ndarray, max_length: int) -> float:
    fewest = -(-int(lengths.sum()) // max_length)
    return 1 - fewest / len(plan_best_fit(lengths, max_length))


def _best_split(lengths: np.ndarray, boundary: int) -> int | None:
    # the boundary stays, and so is a length of the bucket
    found = optimal_boundaries(np.append(lengths, boundary), max_buckets=2)
    return found[1][0] if len(found) > 1 else None


def _bin_edges(lengths: np.ndarray) -> np.ndarray:
    """Return rising edges from the shortest length to beyond the longest, int64."""
    edges = np.geomspace(lengths.min(), lengths.max() + 1, _NUM_BINS + 1)
    return np.unique(edges.round().astype(np.int64))
