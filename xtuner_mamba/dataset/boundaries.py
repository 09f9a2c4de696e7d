"""Bucket boundaries with the least padding.

A bucket pads its documents to its boundary, so a boundary belongs on a length that occurs. With
the distinct lengths ``x[0] < x[1] < ...`` and ``below[j]`` documents shorter than ``x[j]``, the
places that ``k`` buckets need for those are

    best[k][j] = min over i < j of  best[k - 1][i] + x[j - 1] * (below[j] - below[i])

For a given ``j`` that is the lowest of the lines ``best[k - 1][i] - below[i] * x`` at
``x[j - 1]``. Their slopes fall with ``i`` and ``x`` rises with ``j``, so a pointer that runs once
along their lower envelope finds all minima: a row takes one pass, whatever the count of documents.
"""

from collections.abc import Sequence

import numpy as np


def optimal_boundaries(lengths: Sequence[int], max_buckets: int = 8) -> list[list[int]]:
    """Find the boundaries with the least padding, for every count of buckets.

    >>> optimal_boundaries([1, 2, 2, 7, 9], max_buckets=3)
    [[9], [2, 9], [2, 7, 9]]

    Args:
        lengths: Tokens of each document.
        max_buckets: The largest count.

    Returns:
        Boundaries for 1, 2, ... buckets; no more than there are distinct lengths.

    Raises:
        ValueError: There is no document, or no bucket to put it in.
    """
    if not len(lengths) or max_buckets < 1:
        raise ValueError(
            "lengths must not be empty and max_buckets at least 1, got "
            f"{len(lengths)} documents and {max_buckets}"
        )
    values, counts = np.unique(lengths, return_counts=True)
    # Python's integers: products of places overflow int64
    x, below = values.tolist(), [0, *counts.cumsum().tolist()]
    best = [below[j] * x[j - 1] for j in range(1, len(x) + 1)]
    found, starts = [[x[-1]]], []
    for _ in range(1, min(max_buckets, len(x))):
        best, start = _add_bucket(best, x, below)
        starts.append(start)
        found.append(_trace(starts, x))
    return found


def padding_share(lengths: np.ndarray, boundaries: np.ndarray) -> float:
    """Return the share of places that hold padding, with every document padded to its boundary.

    >>> padding_share(np.array([3, 4, 5]), np.array([4, 8]))
    0.25

    Args:
        lengths: Tokens of each document, ``(num_documents,)``.
        boundaries: Rising, the last one holds the longest document, ``(num_buckets,)``.
    """
    places = boundaries[np.searchsorted(boundaries, lengths)].sum()
    return float(1 - lengths.sum() / places)


def powers_of_two(lengths: np.ndarray) -> list[int]:
    """Return the powers of two that hold a document each, as boundaries.

    >>> powers_of_two(np.array([3, 5, 8, 33]))
    [4, 8, 64]

    Args:
        lengths: Tokens of each document, ``(num_documents,)``.
    """
    return (2 ** np.unique(np.ceil(np.log2(lengths))).astype(np.int64)).tolist()


def _add_bucket(best: list[int], x: list[int], below: list[int]) -> tuple[list[int], list[int]]:
    """Return the next row of the recurrence, and where the last bucket of each minimum starts.

    Args:
        best: ``best[j]`` places for the documents up to ``x[j]``.
        x: Distinct lengths, rising.
        below: Documents shorter than each of them, and their count at the end.
    """

    def line_at(i: int, length: int) -> int:
        return best[i - 1] - below[i] * length

    row, starts = [best[0]], [0]
    envelope: list[int] = []
    lowest = 0
    for j in range(1, len(x)):
        while len(envelope) > 1 and _is_above(envelope[-2], envelope[-1], j, best, below):
            envelope.pop()
        envelope.append(j)
        while lowest + 1 < len(envelope) and line_at(envelope[lowest + 1], x[j]) <= line_at(
            envelope[lowest], x[j]
        ):
            lowest += 1
        start = envelope[lowest]
        row.append(x[j] * below[j + 1] + line_at(start, x[j]))
        starts.append(start)
    return row, starts


def _is_above(first: int, middle: int, last: int, best: list[int], below: list[int]) -> bool:
    """Tell whether the middle one of three lines is nowhere the lowest."""
    rise = best[middle - 1] - best[first - 1], best[last - 1] - best[first - 1]
    fall = below[middle] - below[first], below[last] - below[first]
    return rise[1] * fall[0] <= rise[0] * fall[1]


def _trace(starts: list[list[int]], x: list[int]) -> list[int]:
    boundaries, end = [x[-1]], len(x) - 1
    for start in reversed(starts):
        # the last bucket starts after x[start - 1], where the one before ends
        end = start[end] - 1
        boundaries.append(x[end])
    return boundaries[::-1]
