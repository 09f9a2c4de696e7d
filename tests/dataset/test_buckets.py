"""BucketBatchSampler: which bucket, how many documents, and which bucket when."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtuner_mamba.dataset import BucketBatchSampler

BOUNDARIES = [4, 8, 20]
BUDGET = 24
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=60)


def make(lengths, **options):
    options = dict(boundaries=BOUNDARIES, tokens_per_batch=BUDGET, seed=0) | options
    return BucketBatchSampler(lengths, **options)


def bucket(length):
    return next(b for b, boundary in enumerate(BOUNDARIES) if length <= boundary)


def buckets_of(lengths, sampler):
    """The bucket of each batch, after a check that a batch has only one."""
    found = []
    for batch in sampler:
        (one,) = {bucket(lengths[i]) for i in batch}
        found.append(one)
    return found


@pytest.mark.parametrize("sampling", ["natural", "sqrt_tokens", "stratified"])
@given(lengths=LENGTHS, num_replicas=st.integers(1, 4), drop_last=st.booleans())
def test_a_step_has_one_bucket_on_all_ranks(sampling, lengths, num_replicas, drop_last):
    options = dict(sampling=sampling, num_replicas=num_replicas, drop_last=drop_last)
    try:
        samplers = [make(lengths, rank=rank, **options) for rank in range(num_replicas)]
    except ValueError:
        assert drop_last
        return
    shares = [buckets_of(lengths, sampler) for sampler in samplers]
    assert all(share == shares[0] for share in shares)


@given(lengths=LENGTHS, num_replicas=st.integers(1, 3))
def test_batches_are_as_large_as_the_budget_allows(lengths, num_replicas):
    samplers = [make(lengths, num_replicas=num_replicas, rank=r) for r in range(num_replicas)]
    batches = [batch for sampler in samplers for batch in sampler]
    for b, boundary in enumerate(BOUNDARIES):
        sizes = [len(batch) for batch in batches if bucket(lengths[batch[0]]) == b]
        count = sum(bucket(length) == b for length in lengths)
        step = num_replicas * (BUDGET // boundary)
        assert len(sizes) == num_replicas * -(-count // step)
        assert not sizes or max(sizes) - min(sizes) <= 1


@given(lengths=LENGTHS, num_replicas=st.integers(1, 3), epoch=st.integers(0, 3))
def test_drop_last_keeps_full_batches_only(lengths, num_replicas, epoch):
    counts = np.bincount([bucket(length) for length in lengths], minlength=3)
    full = BUDGET // np.array(BOUNDARIES)
    steps = counts // (full * num_replicas)
    if not steps.any():
        with pytest.raises(ValueError, match=r"got \[\d+, \d+, \d+\] documents where \[\d+, "):
            make(lengths, num_replicas=num_replicas, rank=0, drop_last=True)
        return
    batches = []
    for rank in range(num_replicas):
        sampler = make(lengths, num_replicas=num_replicas, rank=rank, drop_last=True)
        sampler.set_epoch(epoch)
        batches += list(sampler)
    assert len(batches) == steps.sum() * num_replicas
    assert all(len(batch) == full[bucket(lengths[batch[0]])] for batch in batches)
    documents = [i for batch in batches for i in batch]
    assert len(set(documents)) == len(documents)


def test_drop_last_drops_other_documents_every_epoch():
    # the longest of a bucket would be last if what is left over were cut off after sorting
    lengths = np.arange(9, 21)[:11]
    sampler = make(lengths, tokens_per_batch=100, boundaries=[20], drop_last=True)
    dropped = []
    for epoch in range(30):
        sampler.set_epoch(epoch)
        dropped.append(set(range(11)) - {i for batch in sampler for i in batch})
    assert all(len(left_out) == 1 for left_out in dropped)
    assert len(set.union(*dropped)) > 5


def test_a_boundary_above_the_budget_makes_batches_of_one():
    sampler = make([30, 31, 2], boundaries=[4, 32])
    assert sorted(map(len, sampler)) == [1, 1, 1]
    assert sampler.batch_sizes.tolist() == [6, 1]


def test_mates_are_of_like_length():
    lengths = np.random.default_rng(0).integers(1, 1001, 20_000)
    sampler = make(lengths, boundaries=[1000], tokens_per_batch=16_000)
    spread = np.mean([np.ptp(lengths[batch]) for batch in sampler])
    unsorted = np.random.default_rng(1).permutation(lengths).reshape(-1, 16)
    assert spread < 0.3 * np.ptp(unsorted, axis=1).mean()


def test_a_small_bucket_has_other_mates_every_epoch():
    # sorted by length alone, the same documents would always meet
    sampler = make(range(10, 20), boundaries=[20], tokens_per_batch=40)
    epochs = []
    for epoch in range(10):
        sampler.set_epoch(epoch)
        epochs.append(frozenset(frozenset(batch) for batch in sampler))
    assert len(set(epochs)) > 5


def skewed(count=4000):
    return np.random.default_rng(0).choice([3, 6, 18], count, p=[0.9, 0.09, 0.01])


def test_sqrt_tokens_draws_buckets_by_the_root_of_their_tokens():
    lengths = skewed()
    sampler = make(lengths, sampling="sqrt_tokens")
    tokens = np.array([lengths[lengths == length].sum() for length in (3, 6, 18)])
    expected = len(sampler) * np.sqrt(tokens) / np.sqrt(tokens).sum()
    natural = np.bincount(buckets_of(lengths, make(lengths)))
    assert (np.abs(natural - expected) > 20).all(), "natural frequencies would pass"
    drawn = []
    for epoch in range(40):
        sampler.set_epoch(epoch)
        drawn.append(np.bincount(buckets_of(lengths, sampler)))
        # each epoch to a step, and so within the error of any sampling
        assert (np.abs(drawn[-1] - expected) <= 1).all()
    assert np.abs(np.mean(drawn, axis=0) - expected).max() < 0.25


@given(lengths=LENGTHS, epoch=st.integers(0, 3), num_replicas=st.integers(1, 3))
def test_sqrt_tokens_exposes_every_bucket(lengths, epoch, num_replicas):
    sampler = make(lengths, sampling="sqrt_tokens", num_replicas=num_replicas, rank=0)
    sampler.set_epoch(epoch)
    assert set(buckets_of(lengths, sampler)) == {bucket(length) for length in lengths}


def test_sqrt_tokens_exposes_a_bucket_too_small_for_a_share():
    lengths = [3] * 6000 + [18]
    assert buckets_of(lengths, make(lengths, sampling="sqrt_tokens")).count(2) >= 1


def test_sqrt_tokens_visits_a_bucket_anew_only_when_it_is_through():
    lengths = skewed()
    sampler = make(lengths, sampling="sqrt_tokens", boundaries=[4, 8, 18])
    visits = np.bincount([i for batch in sampler for i in batch], minlength=len(lengths))
    # short documents are drawn less often than there are, long ones more than once
    assert visits[lengths == 3].max() == 1
    for length in (6, 18):
        assert visits[lengths == length].min() >= 1
        assert np.ptp(visits[lengths == length]) <= 1
    sampler.set_epoch(1)
    other = np.bincount([i for batch in sampler for i in batch], minlength=len(lengths))
    assert (visits != other).mean() > 0.1


@given(lengths=LENGTHS, window=st.integers(1, 8), epoch=st.integers(0, 3))
def test_stratified_gives_every_optimizer_step_its_share(lengths, window, epoch):
    sampler = make(lengths, sampling="stratified")
    sampler.set_epoch(epoch)
    order = np.array(buckets_of(lengths, sampler))
    shares = np.bincount(order, minlength=3) / len(order)
    num_buckets = (shares > 0).sum()
    for start in range(len(order) - window + 1):
        counts = np.bincount(order[start : start + window], minlength=3)
        assert (np.abs(counts - window * shares) <= 1 + num_buckets * shares).all()


def test_natural_order_is_not_stratified():
    lengths = skewed()
    spreads = {}
    for sampling in ("natural", "stratified"):
        order = np.array(buckets_of(lengths, make(lengths, sampling=sampling)))
        windows = (order[: len(order) // 8 * 8].reshape(-1, 8) == 1).sum(axis=1)
        spreads[sampling] = windows.std()
    assert spreads["stratified"] < 0.6 * spreads["natural"]


def test_the_log_says_what_a_bucket_holds(monkeypatch):
    lines = []
    module = "xtuner_mamba.dataset.buckets.print_log"
    monkeypatch.setattr(module, lambda line, logger: lines.append(line))
    make([3, 3, 7], drop_last=True, tokens_per_batch=8)
    assert "2 documents of at most 4 tokens in batches of 2, 1 documents of at most 8" in lines[0]
    assert "0 documents of at most 20 tokens in batches of 1; 2 steps an epoch" in lines[0]
    assert "sampling natural, 0 documents dropped an epoch" in lines[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(boundaries=[]), r"integers, rising and not empty, got \[\]; `xtuner-mamba lengths`"),
        (dict(boundaries=[8, 8, 20]), r"got \[8, 8, 20\]"),
        (dict(boundaries=[0, 20]), r"got \[0, 20\]"),
        (dict(boundaries=[4, 20.5]), r"got \[4, 20.5\]; "),
        (dict(boundaries="20"), "got '20'; "),
        (dict(shuffle="False"), "shuffle must be True or False, got 'False'"),
        (dict(boundaries=[4, 8]), r"got 8 for 19 tokens in document 1 \(2 are longer\)"),
        (dict(sampling="uniform"), "'sqrt_tokens' or 'stratified', got 'uniform'"),
    ],
)
def test_what_cannot_be_met_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make([3, 19, 9], **options)
