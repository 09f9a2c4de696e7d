"""What both batch samplers promise: ranks in step, exact length, replay, an order of each epoch."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mmengine.dataset import DefaultSampler
from mmengine.runner import Runner, loops
from mmengine.runner.utils import _get_batch_size
from torch.utils.data import ConcatDataset

from xtuner_mamba.dataset import BucketBatchSampler, TokenBudgetBatchSampler, batch_plan
from xtuner_mamba.dataset.batch_plan import BatchPlan
from xtuner_mamba.dataset.buckets import check_bucket_arguments
from xtuner_mamba.dataset.token_budget import check_budget_arguments

BOUNDARIES = [4, 8, 20]
BUDGET = 24
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=60)


def natural(lengths, **options):
    return BucketBatchSampler(lengths, BOUNDARIES, BUDGET, **options)


def stratified(lengths, **options):
    return BucketBatchSampler(lengths, BOUNDARIES, BUDGET, sampling="stratified", **options)


def sqrt_tokens(lengths, **options):
    return BucketBatchSampler(lengths, BOUNDARIES, BUDGET, sampling="sqrt_tokens", **options)


def token_budget(lengths, **options):
    return TokenBudgetBatchSampler(lengths, BUDGET, window=16, **options)


EACH_ONCE = [natural, stratified, token_budget]
ALL = [*EACH_ONCE, sqrt_tokens]


def steps_of(make, lengths, num_replicas, epoch=0, **options):
    """The batches of all ranks, a list of steps."""
    shares = []
    for rank in range(num_replicas):
        sampler = make(lengths, num_replicas=num_replicas, rank=rank, seed=3, **options)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        assert len(sampler) == len(shares[-1])
    return list(zip(*shares, strict=True))


def padded_size(lengths, batch):
    return max(lengths[i] for i in batch) * len(batch)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("make", EACH_ONCE)
@given(lengths=LENGTHS, num_replicas=st.integers(1, 4), epoch=st.integers(0, 3))
def test_every_document_comes_once_an_epoch(make, shuffle, lengths, num_replicas, epoch):
    steps = steps_of(make, lengths, num_replicas, epoch, shuffle=shuffle)
    visits = np.bincount(np.concatenate([batch for step in steps for batch in step]))
    assert len(visits) == len(lengths)
    assert visits.min() >= 1
    # again only where a rank would have no batch
    assert visits.sum() - len(lengths) <= len(BOUNDARIES) * (num_replicas - 1)
    if num_replicas == 1:
        assert visits.max() == 1


@pytest.mark.parametrize("make", ALL)
@given(lengths=LENGTHS, num_replicas=st.integers(1, 4), epoch=st.integers(0, 3))
def test_no_batch_is_empty_or_over_its_budget(make, lengths, num_replicas, epoch):
    for step in steps_of(make, lengths, num_replicas, epoch):
        for batch in step:
            assert len(batch) == 1 or padded_size(lengths, batch) <= BUDGET
            assert len(set(batch)) == len(batch) > 0


@pytest.mark.parametrize("make", ALL)
@given(lengths=LENGTHS, num_replicas=st.integers(1, 4))
def test_every_epoch_is_as_long(make, lengths, num_replicas):
    epochs = [steps_of(make, lengths, num_replicas, epoch) for epoch in range(4)]
    assert len({len(steps) for steps in epochs}) == 1


def draw(make, epoch, count=300, **options):
    lengths = np.random.default_rng(0).integers(1, 21, count)
    sampler = make(lengths, **options)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("make", ALL)
def test_the_order_is_a_function_of_seed_and_epoch(make):
    drawn = draw(make, epoch=1, seed=0)
    assert draw(make, epoch=1, seed=0) == drawn
    for other in (draw(make, epoch=2, seed=0), draw(make, epoch=1, seed=1)):
        mates, other_mates = (
            {frozenset(b) for b in batches if len(b) > 1} for batches in (drawn, other)
        )
        assert len(mates & other_mates) < 0.3 * len(mates)


@pytest.mark.parametrize("make", ALL)
def test_without_shuffling_all_epochs_are_the_same(make):
    assert draw(make, epoch=0, seed=0, shuffle=False) == draw(make, epoch=5, seed=0, shuffle=False)


@pytest.mark.parametrize("make", EACH_ONCE)
def test_batch_mates_are_no_neighbours_in_the_corpus(make):
    # documents of a source lie together and have one length
    lengths = np.repeat([3, 7, 19], 200)
    sampler = make(lengths, seed=0)
    steps = np.concatenate([np.diff(sorted(batch)) for batch in sampler if len(batch) > 1])
    assert (steps == 1).mean() < 0.1
    in_order = np.concatenate(
        [np.diff(b) for b in make(lengths, seed=0, shuffle=False) if len(b) > 1]
    )
    assert (in_order == 1).mean() > 0.9


class Documents(torch.utils.data.Dataset):
    """Rows that are their own index, with the lengths where XTuner's datasets have them."""

    def __init__(self, lengths):
        self.length = list(lengths)

    def __len__(self):
        return len(self.length)

    def __getitem__(self, index):
        return index


@pytest.fixture
def iterate(monkeypatch):
    """What ``TrainLoop`` iterates over, from a dataloader config like a template's."""
    monkeypatch.setattr(loops.time, "sleep", lambda seconds: None)

    def build(batch_sampler, num_workers=0):
        lengths = np.random.default_rng(0).integers(1, 21, 60)
        config = dict(
            batch_size=1,
            dataset=Documents(lengths),
            sampler=dict(type=DefaultSampler, shuffle=True),
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=dict(type="pseudo_collate"),
        )
        loader = Runner.build_dataloader(config, seed=5)
        return loops._InfiniteDataloaderIterator(loader), loader

    return build


CONFIGS = [
    dict(type=BucketBatchSampler, boundaries=BOUNDARIES, tokens_per_batch=BUDGET),
    dict(
        type=BucketBatchSampler,
        boundaries=BOUNDARIES,
        tokens_per_batch=BUDGET,
        sampling="sqrt_tokens",
    ),
    dict(type=TokenBudgetBatchSampler, tokens_per_batch=BUDGET),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["type"].__name__)
def test_mmengine_tells_the_epoch_and_replay_gives_the_same(iterate, config):
    batches, loader = iterate(config)
    num_steps = len(loader)
    run = [next(batches) for _ in range(3 * num_steps)]
    assert loader.batch_sampler.epoch == 2
    assert _get_batch_size(loader) == 1, "DeepSpeed would not start"
    epochs = [run[i * num_steps : (i + 1) * num_steps] for i in range(3)]
    assert all(a != b for a, b in zip(epochs, [*epochs[1:], epochs[0]]))
    # TrainLoop replays what came before the checkpoint, whichever step that was
    again, _ = iterate(config, num_workers=2)
    assert [next(again) for _ in run] == run


@pytest.mark.parametrize("make", ALL)
def test_a_loader_that_fetches_ahead_stays_in_its_epoch(make):
    lengths = np.random.default_rng(0).integers(1, 21, 60)
    sampler, other = make(lengths, seed=0), make(lengths, seed=0)
    started = iter(sampler)
    first = next(started)
    sampler.set_epoch(1)
    assert [first, *started] == list(other)
    assert list(sampler) != list(other)


def test_ranks_seed_and_lengths_come_from_the_sampler():
    sampler = SimpleNamespace(dataset=Documents([1, 2, 3]), seed=7, world_size=2, rank=1)
    made = token_budget(None, sampler=sampler, batch_size=1)
    assert (made.seed, made.num_replicas, made.rank) == (7, 2, 1)
    assert made.lengths.tolist() == [1, 2, 3]
    given = token_budget([4], sampler=sampler, seed=1, num_replicas=1, rank=0)
    assert (given.seed, given.num_replicas, given.rank) == (1, 1, 0)
    assert given.lengths.tolist() == [4]


def test_without_a_sampler_the_seed_is_drawn_for_all_ranks(monkeypatch):
    monkeypatch.setattr(batch_plan, "sync_random_seed", lambda: 11)
    assert natural([1]).seed == 11


def test_datasets_in_a_row_keep_their_order():
    sampler = SimpleNamespace(dataset=ConcatDataset([Documents([1, 2]), Documents([3])]), seed=0)
    assert natural(None, sampler=sampler).lengths.tolist() == [1, 2, 3]


def test_a_plan_gives_each_rank_its_batch_of_every_step():
    plan = BatchPlan(np.array([4, 2, 5, 0, 1, 3]), np.array([0, 2, 3, 4, 6]), np.array([1, 0]))
    assert list(plan.of_rank(0, 2)) == [[0], [4, 2]]
    assert list(plan.of_rank(1, 2)) == [[1, 3], [5]]


@pytest.mark.parametrize("make", [natural, token_budget])
@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, r"lengths must be at least 1 and not empty, got \[\]; leave out"),
        ([3, 0], {}, "got 0 at 1; leave out documents"),
        ([1.5, 2], {}, r"lengths must be an integer .*, got float64 of shape \(2,\); give"),
        ([[1, 2]], {}, r"lengths must be an integer .*, got int64 of shape \(1, 2\); give"),
        ([3], dict(num_replicas=2, rank=2), r"rank must be in \[0, num_replicas=2\), got 2"),
        ([3], dict(batch_size=8), f"got 8; batches are filled to tokens_per_batch={BUDGET}"),
        (None, dict(sampler=SimpleNamespace(dataset=[1])), "attribute length, got list without"),
        (None, {}, "attribute length, got NoneType without; build it with process_document"),
    ],
)
def test_what_cannot_be_met_is_refused(make, lengths, options, message):
    with pytest.raises(ValueError, match=message):
        make(lengths, **options)


@pytest.mark.parametrize("make", [TokenBudgetBatchSampler, BucketBatchSampler])
def test_a_budget_of_nothing_is_refused(make):
    for value in (0, 2.5, "16k"):
        with pytest.raises(ValueError, match=f"tokens_per_batch must be .* 1, got {value!r}"):
            make([3], tokens_per_batch=value)
    with pytest.raises(ValueError, match="seed must be an integer of at least 0, got -1"):
        make([3], seed=-1)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # a row of a bucket takes as many places as its boundary
        (lambda budget: BucketBatchSampler([3, 9, 7], [4, 8, 20], budget), "1 of 3 .* up to 20"),
        (lambda budget: TokenBudgetBatchSampler([3, 9, 7], budget), "1 of 3 .* up to 9"),
    ],
    ids=["buckets", "rolling"],
)
def test_documents_that_exceed_the_budget_are_counted(monkeypatch, make, expected):
    lines = []
    monkeypatch.setattr(batch_plan, "print_log", lambda line, **_: lines.append(line))
    make(20)
    assert lines == []
    make(8)
    assert re.search(f"tokens_per_batch=8 is exceeded by {expected} places", lines[0])


@pytest.mark.parametrize(
    ("check", "arguments", "message"),
    [
        (check_bucket_arguments, dict(boundries=[4]), "got 'boundries'; write 'boundaries'"),
        (check_bucket_arguments, dict(boundaries=[8, 4]), r"rising .*, got \[8, 4\]; "),
        (check_bucket_arguments, dict(boundaries=[4], sampling="sqrt"), "got 'sqrt'"),
        (check_bucket_arguments, dict(boundaries=[4], drop_last="no"), "drop_last .* got 'no'"),
        (check_budget_arguments, dict(window=0), "window .* 1, got 0"),
        (check_budget_arguments, dict(tokens_per_batch="16k"), "tokens_per_batch .* got '16k'"),
        (check_budget_arguments, dict(boundaries=[4]), "got 'boundaries'; it has lengths, tokens"),
    ],
)
def test_arguments_are_checked_without_a_dataset(check, arguments, message):
    with pytest.raises(ValueError, match=message):
        check(arguments)
