"""Short documents first: each batch once, in its time, the same after a resume."""

import numpy as np
import pytest
import torch
from mmengine.dataset import DefaultSampler
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from torch.optim import SGD
from xtuner.engine.runner import TrainLoop

from xtuner_mamba.dataset import BucketBatchSampler, TokenBudgetBatchSampler, padded_collate_fn
from xtuner_mamba.dataset.curriculum import LengthCurriculum
from xtuner_mamba.engine.hooks import LengthCurriculumHook, PackedLayoutHook
from xtuner_mamba.layout import current_layout
from xtuner_mamba.model import PackedSupervisedFinetune

SCHEDULE = [(0, 4), (0.25, 8), (0.75, 16)]
LENGTHS = np.random.default_rng(0).integers(2, 17, 90)
SAMPLERS = [
    dict(type=BucketBatchSampler, boundaries=[4, 8, 16], tokens_per_batch=16),
    dict(type=TokenBudgetBatchSampler, tokens_per_batch=16),
]


class Rows(torch.utils.data.Dataset):
    """Documents whose every token is their number."""

    length = LENGTHS.tolist()

    def __len__(self):
        return len(self.length)

    def __getitem__(self, index):
        return dict(input_ids=[index % 30] * self.length[index], labels=[1] * self.length[index])


def sampler_of(cfg: dict, **options):
    options = {"lengths": LENGTHS, "seed": 0, **cfg, **options}
    return options.pop("type")(**options)


def steps_of(sampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


def in_time(steps: list[list[int]], epoch: int) -> list[list[int]]:
    """Take at each place the first step that may come, or else the shortest."""
    left, ordered = list(steps), []
    for place in range(len(steps)):
        now = epoch + place / len(steps)
        boundary = [boundary for start, boundary in SCHEDULE if start <= now][-1]
        opened = [step for step in left if LENGTHS[step].max() <= boundary]
        step = opened[0] if opened else min(left, key=lambda step: LENGTHS[step].max())
        left.remove(step)
        ordered.append(step)
    return ordered


@pytest.mark.parametrize("cfg", SAMPLERS, ids=["buckets", "rolling"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_each_batch_comes_once_and_in_its_time(cfg, epoch):
    plain, sampler = sampler_of(cfg), sampler_of(cfg)
    sampler.curriculum = LengthCurriculum(SCHEDULE)
    drawn, steps = steps_of(plain, epoch), steps_of(sampler, epoch)
    assert steps == in_time(drawn, epoch)
    # from its last pair on the schedule has no say
    assert (steps == drawn) == (epoch == 1)


def test_ranks_go_together():
    ranks = [sampler_of(SAMPLERS[0], num_replicas=2, rank=rank) for rank in range(2)]
    for sampler in ranks:
        sampler.curriculum = LengthCurriculum(SCHEDULE)
    pairs = list(zip(*(steps_of(sampler, 0) for sampler in ranks)))
    buckets = [
        [np.searchsorted([4, 8, 16], LENGTHS[step].max()) for step in pair] for pair in pairs
    ]
    assert all(first == second for first, second in buckets)
    assert buckets[0] == [0, 0]


def test_steps_that_come_early_are_logged(monkeypatch):
    lines = []
    monkeypatch.setattr(
        "xtuner_mamba.dataset.batch_plan.print_log", lambda line, **_: lines.append(line)
    )
    sampler = sampler_of(SAMPLERS[0])
    sampler.curriculum = LengthCurriculum([(0, 4), (1, 16)])
    steps = steps_of(sampler, 0)
    num_early = sum(LENGTHS[step].max() > 4 for step in steps)
    expected = f"curriculum: {num_early} of {len(steps)} steps of epoch 0 come early"
    assert [line.partition(",")[0] for line in lines] == [expected]


@pytest.mark.parametrize(
    "schedule",
    [
        [],
        [(0.5, 4)],
        [(0, 8), (1, 4)],
        [(0, 4), (0, 8)],
        [4, 8],
        [(0, 4, 8)],
        [(0, 0), (1, 4)],
        [(0, "a")],
        [("a", 4)],
        None,
    ],
    ids=str,
)
def test_a_schedule_that_does_not_rise_from_the_first_epoch_is_refused(schedule):
    with pytest.raises(ValueError, match="rise from epoch 0, got") as error:
        LengthCurriculumHook(schedule)
    assert f"got {schedule}; such as" in str(error.value)


def train(work_dir, make_llm, batch_sampler: dict | None, num_iters: int, **extra) -> tuple:
    """Train, and note the lengths of every batch."""
    seen = []
    model = PackedSupervisedFinetune(make_llm(), use_activation_checkpointing=False)
    model.register_forward_pre_hook(lambda *_: seen.append(current_layout().lengths))
    loader = dict(
        batch_size=1,
        num_workers=0,
        dataset=Rows(),
        sampler=dict(type=DefaultSampler, shuffle=True),
        collate_fn=dict(type=padded_collate_fn),
    )
    if batch_sampler is not None:
        loader["batch_sampler"] = batch_sampler
    runner = Runner(
        model=model,
        work_dir=str(work_dir),
        train_dataloader=loader,
        train_cfg=dict(type=TrainLoop, max_iters=num_iters),
        optim_wrapper=dict(type=OptimWrapper, optimizer=dict(type=SGD, lr=0.05)),
        custom_hooks=[
            dict(type=PackedLayoutHook),
            dict(type=LengthCurriculumHook, schedule=SCHEDULE),
        ],
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=5)),
        log_processor=dict(by_epoch=False),
        randomness=dict(seed=1),
        visualizer=None,
        log_level="WARNING",
        experiment_name=str(work_dir).replace("/", "_"),
        **extra,
    )
    runner.train()
    return seen, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_training_opens_lengths_and_resumes_to_the_same_bits(tmp_path, make_llm):
    seen, whole = train(tmp_path / "whole", make_llm, SAMPLERS[0], num_iters=15)
    assert max(map(max, seen[:4])) <= 4
    assert max(map(max, seen[4:])) > 4
    checkpoint = str(tmp_path / "whole" / "iter_10.pth")
    resumed_seen, resumed = train(
        tmp_path / "resumed", make_llm, SAMPLERS[0], 15, load_from=checkpoint, resume=True
    )
    assert resumed_seen == seen[10:]
    assert torch.isfinite(whole).all()
    assert torch.equal(resumed, whole)


def test_packs_have_no_lengths_to_open(tmp_path, make_llm):
    with pytest.raises(RuntimeError, match="with LengthCurriculumHook, got BatchSampler; packs"):
        train(tmp_path, make_llm, None, num_iters=1)
