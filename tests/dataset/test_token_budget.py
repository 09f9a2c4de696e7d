"""TokenBudgetBatchSampler: as few batches as a window allows, and as many every epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtuner_mamba.dataset import TokenBudgetBatchSampler
from xtuner_mamba.dataset.token_budget import fill_batches, halve_largest


def fewest_batches(lengths, budget):
    """Try every way to divide documents into batches."""
    if not lengths:
        return 0
    leader, *others = sorted(lengths, reverse=True)
    best = len(lengths)
    for chosen in range(2 ** len(others)):
        mates = [n for i, n in enumerate(others) if chosen >> i & 1]
        if not mates or leader * (len(mates) + 1) <= budget:
            rest = [n for i, n in enumerate(others) if not chosen >> i & 1]
            best = min(best, 1 + fewest_batches(rest, budget))
    return best


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7), budget=st.integers(1, 30))
def test_a_window_is_cut_into_the_fewest_batches(lengths, budget):
    lengths = np.array(lengths)
    documents, sizes = fill_batches(lengths, np.arange(len(lengths)), budget, window=len(lengths))
    assert sorted(documents) == list(range(len(lengths)))
    assert len(sizes) == fewest_batches(lengths.tolist(), budget)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    budget=st.integers(1, 30),
    window=st.integers(1, 50),
)
def test_what_fills_no_batch_waits_for_the_next_window(lengths, budget, window):
    lengths = np.array(lengths)
    documents, sizes = fill_batches(lengths, np.arange(len(lengths)), budget, window)
    assert sorted(documents) == list(range(len(lengths)))
    assert sizes.sum() == len(lengths)
    leaders = lengths[documents][np.cumsum(sizes) - sizes]
    full = np.maximum(budget // leaders, 1)
    assert (sizes <= full).all()
    # only the last batch may have room for another document
    assert (sizes[:-1] == full[:-1]).all()


def test_batches_come_close_to_the_budget():
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(int).clip(1, 2000)
    sampler = TokenBudgetBatchSampler(lengths, 16_000, seed=0)
    batches = list(sampler)
    places = [lengths[batch].max() * len(batch) for batch in batches]
    assert np.mean(places) > 0.95 * 16_000
    assert lengths.sum() / np.sum(places) > 0.9
    # batches of neighbours in the corpus are mostly padding
    in_order = TokenBudgetBatchSampler(lengths, 16_000, window=1, seed=0, shuffle=False)
    places = [lengths[batch].max() * len(batch) for batch in in_order]
    assert lengths.sum() / np.sum(places) < 0.7


def test_a_wider_window_needs_fewer_batches():
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    counts = [len(TokenBudgetBatchSampler(lengths, 500, window=w, seed=0)) for w in (16, 64, 2000)]
    assert counts[0] > counts[1] > counts[2]


def test_an_unlucky_epoch_widens_its_window():
    # with a window of 2 the count of batches is a matter of luck, and far from the fewest
    lengths = [1, 10] * 30
    samplers = [TokenBudgetBatchSampler(lengths, 20, window=2, seed=seed) for seed in range(20)]
    needed = [len(s._fill(s._rng(epoch), 2)[1]) for s in samplers for epoch in range(5)]
    assert len(set(needed)) > 3
    for sampler in samplers:
        for epoch in range(5):
            sampler.set_epoch(epoch)
            batches = list(sampler)
            assert len(batches) == len(sampler)
            assert sorted(i for batch in batches for i in batch) == list(range(60))


@pytest.mark.parametrize(
    ("sizes", "wanted", "expected"),
    [
        ([2, 5, 1], 3, [2, 5, 1]),
        ([2, 5, 1], 4, [2, 3, 2, 1]),
        ([4], 4, [1, 1, 1, 1]),
        ([2, 1], 9, [1, 1, 1]),
    ],
)
def test_the_largest_batches_are_halved(sizes, wanted, expected):
    assert halve_largest(np.array(sizes), wanted).tolist() == expected


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window must be an integer of at least 1, got 0"):
        TokenBudgetBatchSampler([3], window=0)
