"""RedrawSampler: packs of an epoch, through MMEngine's own dataloader and iterator."""

import re

import numpy as np
import pytest
import torch.distributed as dist
from mmengine.dataset import DefaultSampler
from mmengine.dataset import sampler as default_sampler
from mmengine.runner import Runner, loops
from xtuner.parallel.sequence import setup_distributed

from xtuner_mamba.dataset import (
    PackedDataset,
    RedrawSampler,
    packed_collate_fn,
    packed_dataset,
    samplers,
)
from xtuner_mamba.dataset.packed_dataset import pack_documents

NUM_EPOCHS = 3


@pytest.fixture
def packs(make_documents):
    lengths = np.random.default_rng(0).integers(2, 60, 30)
    return pack_documents(make_documents(lengths), 128, seed=1)


@pytest.fixture
def iterate(monkeypatch):
    """What ``TrainLoop`` iterates over, from a dataloader config like a template's."""
    monkeypatch.setattr(loops.time, "sleep", lambda seconds: None)

    def build(packs, sampler=RedrawSampler, **options):
        config = dict(
            batch_size=1,
            dataset=packs,
            sampler=dict(type=sampler, shuffle=True),
            collate_fn=dict(type=packed_collate_fn),
            **options,
        )
        return loops._InfiniteDataloaderIterator(Runner.build_dataloader(config, seed=5))

    return build


def tokens_of(batch):
    return batch["data"]["input_ids"][0].tolist()


WORKERS = [
    dict(num_workers=0),
    dict(num_workers=2),
    dict(num_workers=2, persistent_workers=True),
]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_every_epoch_has_its_own_packs(packs, iterate, workers):
    batches = iterate(packs, **workers)
    seen = []
    for epoch in range(NUM_EPOCHS):
        drawn = [tokens_of(next(batches)) for _ in range(len(packs))]
        expected = [packs[epoch, i]["input_ids"] for i in range(len(packs))]
        assert sorted(drawn) == sorted(expected)
        assert drawn != expected
        seen.append(frozenset(map(tuple, drawn)))
    assert len(set(seen)) == NUM_EPOCHS


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_resumed_run_goes_on_with_the_same_packs(packs, iterate, workers):
    batches = iterate(packs, num_workers=0)
    uninterrupted = [tokens_of(next(batches)) for _ in range(NUM_EPOCHS * len(packs))]
    # TrainLoop replays the batches before the checkpoint, here one in the second epoch
    batches = iterate(pack_again(packs), **workers)
    replayed = [tokens_of(next(batches)) for _ in uninterrupted]
    assert replayed == uninterrupted


def pack_again(packs):
    """Another process would pack the dataset from scratch."""
    return pack_documents(packs.documents, 128, seed=packs.seed)


def test_xtuners_samplers_see_the_first_draw_every_epoch(packs, iterate):
    batches = iterate(packs, sampler=DefaultSampler, num_workers=0)
    expected = sorted(pack["input_ids"] for pack in packs)
    for _ in range(2):
        assert sorted(tokens_of(next(batches)) for _ in range(len(packs))) == expected


# plain data parallelism, and rows that two ranks share
@pytest.mark.parametrize("ranks_per_row", [1, 2])
@pytest.mark.parametrize("round_up", [True, False])
def test_ranks_share_the_packs_of_an_epoch(make_documents, monkeypatch, ranks_per_row, round_up):
    packs = pack_documents(make_documents([60] * 7), 64, seed=1)
    monkeypatch.setattr(samplers, "get_sequence_parallel_world_size", lambda: ranks_per_row)
    shares = []
    for rank in range(2 * ranks_per_row):
        world = (rank, 2 * ranks_per_row)
        monkeypatch.setattr(default_sampler, "get_dist_info", lambda world=world: world)
        sampler = RedrawSampler(packs, seed=0, round_up=round_up)
        sampler.set_epoch(3)
        shares.append(list(sampler))
        assert len(sampler) == len(shares[-1])
    rows = shares[::ranks_per_row]
    assert shares == [row for row in rows for _ in range(ranks_per_row)]
    # an odd number of packs
    assert len(rows[0]) - len(rows[1]) == (0 if round_up else 1)
    assert sorted({*rows[0], *rows[1]}) == [(3, i) for i in range(len(packs))]
    # the sampler that was told of no epoch is still in the first
    assert {epoch for epoch, _ in RedrawSampler(packs, seed=0)} == {0}


def test_a_process_group_without_deepspeed_is_enough(packs, monkeypatch, tmp_path):
    # what XTuner may have kept of an earlier test
    for name in ("_DATA_PARALLEL_WORLD_SIZE", "_DATA_PARALLEL_RANK"):
        monkeypatch.setattr(setup_distributed, name, None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sampler = RedrawSampler(packs, seed=0)
    finally:
        dist.destroy_process_group()
    assert sorted(sampler) == [(0, i) for i in range(len(packs))]


def test_workers_that_fetch_ahead_stay_in_their_epoch(packs):
    sampler = RedrawSampler(packs, seed=0)
    indices = iter(sampler)
    next(indices)
    sampler.set_epoch(1)
    assert {epoch for epoch, _ in indices} == {0}


def test_workers_forked_for_an_epoch_find_its_plan_made(packs, monkeypatch):
    RedrawSampler(packs, seed=0).set_epoch(2)
    monkeypatch.setattr(PackedDataset, "_draw", None)
    assert packs[2, 0]["input_ids"]
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        packs[3, 0]


def test_what_a_draw_leaves_out_is_told_every_epoch(make_documents, monkeypatch):
    # documents of one token are no targets: a pack of nothing else is left out
    lengths = [1] * 30 + [4] * 10
    packs = pack_documents(make_documents(lengths), 4, packing="wrap")
    sampler, lines, missing = RedrawSampler(packs, seed=0), [], []
    monkeypatch.setattr(samplers, "print_log", lambda line, logger: lines.append(line))
    for epoch in range(6):
        lines.clear()
        sampler.set_epoch(epoch)
        packed = {t for _, i in sampler for t in packs[epoch, i]["input_ids"]}
        every = {1000 * i + t for i, n in enumerate(lengths) for t in range(n)}
        missing.append(every - packed)
        assert packs.left_out.sum() == len(missing[-1])
        assert lines == [
            f"packs of epoch {epoch}: {len(packs.left_out)} left out for want of labels "
            f"({len(missing[-1])} tokens)"
        ]
    assert packs.packing_report.num_masked_tokens == len(missing[0])
    assert all(missing)
    assert any(other != missing[0] for other in missing)


@pytest.fixture
def few_targets(make_documents):
    """Documents of which the last tokens are the only targets, in many packs without one."""
    lengths = np.random.default_rng(0).integers(20, 300, 60).tolist()
    labels = [[-100] * (n - 3) + [1] * 3 for n in lengths]
    return pack_documents(make_documents(lengths, labels), 32, packing="wrap")


def test_every_epoch_has_all_targets_in_as_many_packs(few_targets, monkeypatch):
    monkeypatch.setattr(samplers, "print_log", lambda *_, **__: None)
    sampler, epochs = RedrawSampler(few_targets, shuffle=False), set()
    for epoch in range(8):
        sampler.set_epoch(epoch)
        drawn = [few_targets[index] for index in sampler]
        assert len(drawn) == len(few_targets)
        # at most the first token of a pack's piece is none
        assert 170 <= sum(label == 1 for pack in drawn for label in pack["labels"]) <= 180
        epochs.add(tuple(tuple(pack["input_ids"]) for pack in drawn))
        assert few_targets.is_first_draw == (epoch == 0)
    assert len(epochs) == 8


def test_a_draw_that_is_the_first_again_is_told(few_targets, monkeypatch):
    monkeypatch.setattr(packed_dataset, "_MAX_ATTEMPTS", 0)
    lines = []
    monkeypatch.setattr(samplers, "print_log", lambda line, **_: lines.append(line))
    first = few_targets[0, 0]
    sampler = RedrawSampler(few_targets)
    sampler.set_epoch(0)
    assert not any("epoch 0 again" in line for line in lines)
    sampler.set_epoch(3)
    told = f"packs of epoch 3: those of epoch 0 again, since all draws .* {len(few_targets)} packs"
    assert any(re.match(told, line) for line in lines)
    assert few_targets[3, 0] == first


def test_a_draw_of_everything_is_not_worth_a_word(packs, monkeypatch):
    monkeypatch.setattr(samplers, "print_log", lambda line, logger: pytest.fail(line))
    RedrawSampler(packs, seed=0).set_epoch(1)
    assert packs.left_out.tolist() == []


def test_a_dataset_with_one_draw_is_refused(packs, make_documents):
    with pytest.raises(ValueError, match="got list; use mmengine"):
        RedrawSampler([1, 2, 3])
    in_order = pack_documents(make_documents([3, 4]), 8, seed=None)
    assert isinstance(in_order, PackedDataset)
    with pytest.raises(ValueError, match="got PackedDataset with shuffle_before_pack=False"):
        RedrawSampler(in_order)
