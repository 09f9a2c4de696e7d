"""Optimal boundaries against every other choice of boundaries."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtuner_mamba.dataset.boundaries import optimal_boundaries, padding_share, powers_of_two

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def places(lengths, boundaries):
    return sum(next(b for b in boundaries if length <= b) for length in lengths)


def fewest_places(lengths, num_buckets):
    """Try all boundaries up to the longest document, whether such a document exists or not."""
    longest = max(lengths)
    choices = combinations(range(1, longest), num_buckets - 1)
    return min(places(lengths, [*choice, longest]) for choice in choices)


@given(lengths=LENGTHS, max_buckets=st.integers(1, 3))
def test_no_other_boundaries_have_less_padding(lengths, max_buckets):
    found = optimal_boundaries(lengths, max_buckets)
    assert len(found) == min(max_buckets, len(set(lengths)))
    for num_buckets, boundaries in enumerate(found, start=1):
        assert len(boundaries) == num_buckets
        assert boundaries == sorted(set(boundaries) & set(lengths))
        assert places(lengths, boundaries) == fewest_places(lengths, num_buckets)


@given(
    lengths=st.lists(st.integers(1, 10**6), min_size=1, max_size=9, unique=True),
    counts=st.lists(st.integers(1, 10**4), min_size=9, max_size=9),
)
def test_up_to_eight_buckets_and_any_histogram(lengths, counts):
    lengths, counts = sorted(lengths), counts[: len(lengths)]
    total = dict(zip(lengths, counts))

    def cost(boundaries):
        ends = np.searchsorted(boundaries, lengths)
        return sum(boundaries[end] * total[length] for end, length in zip(ends, lengths))

    found = optimal_boundaries(np.repeat(lengths, counts), max_buckets=8)
    for num_buckets, boundaries in enumerate(found, start=1):
        choices = combinations(lengths[:-1], num_buckets - 1)
        assert cost(boundaries) == min(cost([*choice, lengths[-1]]) for choice in choices)


def test_no_more_buckets_than_lengths():
    assert optimal_boundaries([7, 7], max_buckets=5) == [[7]]


def test_places_beyond_int64_are_compared_exactly():
    lengths = np.array([2**40, 2**40 + 1, 2**41])
    assert optimal_boundaries(np.repeat(lengths, [3, 1, 1]), 2)[1] == [2**40 + 1, 2**41]


def test_a_bucket_more_is_never_worse_and_beats_powers_of_two():
    lengths = np.random.default_rng(0).lognormal(6.2, 0.85, 5000).astype(int).clip(57, 2048)
    shares = [padding_share(lengths, np.array(found)) for found in optimal_boundaries(lengths)]
    assert len(shares) == 8
    assert sorted(shares, reverse=True) == shares
    powers = powers_of_two(lengths)
    assert powers == [64, 128, 256, 512, 1024, 2048]
    assert shares[len(powers) - 1] < 0.75 * padding_share(lengths, np.array(powers))


@pytest.mark.parametrize(
    ("lengths", "max_buckets", "message"),
    [([], 1, "got 0 documents and 1"), ([3], 0, "got 1 documents and 0")],
)
def test_nothing_to_put_in_buckets_is_refused(lengths, max_buckets, message):
    with pytest.raises(ValueError, match=message):
        optimal_boundaries(lengths, max_buckets)
