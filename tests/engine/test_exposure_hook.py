"""Exposure: tokens and losses of each length, against counts and losses by hand."""

import pytest
import torch
import torch.nn.functional as F

from xtuner_mamba.engine import TokenAccumulationOptimWrapper, TokenStepLoop
from xtuner_mamba.engine.hooks import ExposureHook

PACKS = [[9, 2], [1, 2, 1], [5, 5], [2, 1]]
BOUNDARIES = (2, 5)


def train(runner):
    runner.train()
    hub = runner.message_hub
    return hub.get_info("exposure_counts"), hub.get_info("exposure_history")


@pytest.fixture
def packs(make_pack):
    return [make_pack(lengths, seed) for seed, lengths in enumerate(PACKS)]


def losses_by_hand(llm, pack, lengths):
    """Mean loss of the targets of each bucket, a document at a time."""
    losses = [[], [], []]
    for ids in torch.tensor(pack["input_ids"]).split(lengths):
        bucket = sum(len(ids) > boundary for boundary in BOUNDARIES)
        logits = llm(ids[None]).logits[0, :-1]
        losses[bucket].append(F.cross_entropy(logits, ids[1:], reduction="none"))
    joined = [torch.cat(bucket) if bucket else torch.zeros(0) for bucket in losses]
    return [bucket.mean().item() if len(bucket) else None for bucket in joined]


@pytest.mark.parametrize("fuse", [False, True])
def test_tokens_and_losses_are_those_counted_by_hand(tmp_path, make_runner, make_llm, packs, fuse):
    runner = make_runner(
        tmp_path, packs[:2], [dict(type=ExposureHook, boundaries=BOUNDARIES, interval=1)]
    )
    runner.model.fuse_loss = fuse
    counts, history = train(runner)
    assert counts == [2 + 1 + 2 + 1, 0, 9]
    # before the first step
    expected = losses_by_hand(make_llm(), packs[0], PACKS[0])
    assert history[1][1] is expected[1] is None
    assert history[1][::2] == pytest.approx(expected[::2], rel=1e-5)
    assert expected[0] != pytest.approx(expected[2], rel=1e-2)
    assert history[2][2] is None
    log = next(tmp_path.rglob("*.log")).read_text()
    assert "exposure after 2 iterations" in log
    assert "over 5" in log
    assert "60.0%" in log
    assert (tmp_path / "exposure.png").stat().st_size > 1000


def test_the_loss_is_that_of_the_iteration_alone(tmp_path, make_runner, packs):
    hook = dict(type=ExposureHook, boundaries=BOUNDARIES, interval=2)
    counts, history = train(make_runner(tmp_path, packs, [hook]))
    assert counts == [2 + 4 + 3, 10, 9]
    assert list(history) == [2, 4]
    # the second pack has no document in these buckets
    assert history[2][1:] == [None, None]


def test_the_picture_has_the_iterations_after_the_last_table(tmp_path, make_runner, packs):
    hook = dict(type=ExposureHook, boundaries=BOUNDARIES, interval=3)
    counts, history = train(make_runner(tmp_path, packs, [hook]))
    assert sum(counts) == sum(map(sum, PACKS))
    assert list(history) == [3]
    hook["interval"] = 5
    counts, history = train(make_runner(tmp_path / "none", packs, [hook]))
    assert sum(counts) == sum(map(sum, PACKS))
    assert history is None
    assert (tmp_path / "none" / "exposure.png").exists()


def test_resumed_training_goes_on_counting(tmp_path, make_runner, packs):
    hook = dict(type=ExposureHook, boundaries=BOUNDARIES, interval=2)
    whole = train(make_runner(tmp_path / "whole", packs, [hook]))
    checkpoint = str(tmp_path / "whole" / "iter_2.pth")
    resumed = make_runner(tmp_path / "resumed", packs, [hook], load_from=checkpoint, resume=True)
    assert train(resumed) == whole


def test_every_micro_batch_of_a_step_is_counted(tmp_path, make_runner, packs):
    runner = make_runner(
        tmp_path,
        packs,
        [dict(type=ExposureHook, boundaries=BOUNDARIES, interval=1)],
        train_cfg=dict(type=TokenStepLoop, max_iters=1),
        optim_wrapper=dict(
            type=TokenAccumulationOptimWrapper,
            tokens_per_step=18,
            optimizer=dict(type="SGD", lr=0.1),
        ),
    )
    # 9, 1 and 8 targets
    counts, history = train(runner)
    assert counts == [6, 10, 9]
    assert None not in history[1]


def test_training_is_the_same_with_it(tmp_path, make_runner, packs):
    weights = []
    for name, hooks in (("with", [dict(type=ExposureHook, interval=1)]), ("without", [])):
        runner = make_runner(tmp_path / name, packs, hooks)
        runner.train()
        weights.append(torch.cat([p.detach().flatten() for p in runner.model.parameters()]))
    assert torch.equal(*weights)


def test_what_it_cannot_count_is_refused(make_llm):
    for interval in (0, 1.5, None):
        with pytest.raises(ValueError, match=f"interval must be .* at least 1, got {interval}"):
            ExposureHook(interval=interval)
    with pytest.raises(ValueError, match=r"boundaries must be .* got \[4, 2\]"):
        ExposureHook(boundaries=[4, 2])
    with pytest.raises(RuntimeError, match="published for ExposureHook, got none; it needs"):
        ExposureHook()._count_tokens(make_llm().train(), (), dict(mode="loss"))
