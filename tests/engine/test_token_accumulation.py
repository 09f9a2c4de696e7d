"""Optimizer steps of a constant number of tokens, against steps written by hand."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import ExponentialLR, OptimWrapper
from mmengine.runner import Runner, loops
from torch import nn
from torch.optim import SGD
from transformers import MambaConfig, MambaForCausalLM
from xtuner.dataset.collate_fns import default_collate_fn
from xtuner.engine.runner import TrainLoop

from xtuner_mamba.engine import TokenAccumulationOptimWrapper, TokenStepLoop
from xtuner_mamba.engine.hooks import PackedLayoutHook
from xtuner_mamba.engine.step_windows import TokenWindows
from xtuner_mamba.layout import PackedLayout, withdraw_layout
from xtuner_mamba.model import PackedSupervisedFinetune

VOCAB = 30
LR = 0.5
PACKS = [[9], [1, 2, 1], [5, 5], [2, 1], [12], [3, 3, 3], [1, 4]]
# the first token of a document is no target
TARGETS = [8, 1, 8, 1, 11, 6, 3]
TOKENS_PER_STEP = 12
# what reaches 12 tokens in order; the third step ends in the next epoch
STEPS = [[0, 1, 2], [3, 4], [5, 6, 0]]
# two ranks have the packs 0, 2, 4, 6 and 1, 3, 5, 0 of an epoch
STEPS_OF_TWO = [[0, 1, 2, 3], [4, 5], [6, 0, 0, 1]]
collate = partial(default_collate_fn, use_varlen_attn=True)


def make_llm() -> MambaForCausalLM:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=8, state_size=4, num_hidden_layers=2, use_cache=False
    )
    return MambaForCausalLM(config).double()


def make_pack(lengths: list[int], seed: int) -> dict:
    layout = PackedLayout.from_lengths(lengths)
    draw = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, VOCAB, (layout.total,), generator=draw).tolist()
    return {
        "input_ids": input_ids,
        "labels": input_ids,
        "cumulative_len": layout.cu_seqlens.tolist(),
        "position_ids": layout.positions[0].tolist(),
    }


def make_dataset() -> list[dict]:
    return [make_pack(lengths, seed) for seed, lengths in enumerate(PACKS)]


def train_by_hand(steps: list[list[int]]) -> torch.Tensor:
    """Take the steps on documents one at a time, the rate halved after each."""
    llm, packs = make_llm(), make_dataset()
    for number, step in enumerate(steps):
        total = 0.0
        for pack in step:
            for ids in torch.tensor(packs[pack]["input_ids"]).split(PACKS[pack]):
                if len(ids) > 1:
                    logits = llm(ids[None]).logits[0, :-1]
                    total = total + F.cross_entropy(logits, ids[1:], reduction="sum")
        llm.zero_grad()
        (total / sum(TARGETS[pack] for pack in step)).backward()
        with torch.no_grad():
            for parameter in llm.parameters():
                parameter -= LR / 2**number * parameter.grad
    return weights(llm)


def weights(llm: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in llm.parameters()])


def assert_same_steps(actual: torch.Tensor, steps: list[list[int]]) -> None:
    expected = train_by_hand(steps)
    moved = (expected - weights(make_llm())).abs().max()
    assert moved > 1e-2
    assert (actual - expected).abs().max() < 1e-6 * moved
    # one more token's worth of loss would show
    assert (train_by_hand([steps[0][:-1], *steps[1:]]) - expected).abs().max() > 1e-3 * moved


def make_runner(work_dir: Path, model: nn.Module | None = None, **changes) -> Runner:
    options = dict(
        model=model or PackedSupervisedFinetune(make_llm(), use_activation_checkpointing=False),
        work_dir=str(work_dir),
        train_dataloader=dict(
            dataset=make_dataset(),
            sampler=dict(type="DefaultSampler", shuffle=False),
            batch_size=1,
            num_workers=0,
            collate_fn=collate,
        ),
        train_cfg=dict(type=TokenStepLoop, max_iters=len(STEPS)),
        optim_wrapper=dict(
            type=TokenAccumulationOptimWrapper,
            tokens_per_step=TOKENS_PER_STEP,
            optimizer=dict(type=SGD, lr=LR),
        ),
        param_scheduler=dict(type=ExponentialLR, gamma=0.5, by_epoch=False),
        custom_hooks=[dict(type=PackedLayoutHook)],
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=1),
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1),
        ),
        log_processor=dict(by_epoch=False, window_size=1),
        visualizer=None,
        experiment_name=str(work_dir).replace("/", "_"),
    )
    return Runner(**options | changes)


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch):
    # MMEngine waits between epochs for worker processes, of which there are none
    monkeypatch.setattr(loops.time, "sleep", lambda seconds: None)


def test_steps_are_those_taken_by_hand(tmp_path):
    runner = make_runner(tmp_path)
    runner.train()
    assert_same_steps(weights(runner.model), STEPS)
    # 17, 12 and 17 tokens
    assert runner.message_hub.get_scalar("train/tokens_per_step").current() == pytest.approx(46 / 3)
    spread = runner.message_hub.get_scalar("train/tokens_per_step_std").current()
    assert spread == pytest.approx((50 / 9) ** 0.5)
    log = next(tmp_path.rglob("*.log")).read_text()
    assert "Iter(train) [3/3]" in log
    assert "tokens_per_step: 15.3333  tokens_per_step_std: 2.3570" in log


def test_logged_loss_is_that_of_the_step(tmp_path):
    runner = make_runner(tmp_path, train_cfg=dict(type=TokenStepLoop, max_iters=1))
    runner.train()
    llm, packs = make_llm(), make_dataset()
    total = 0.0
    for pack in STEPS[0]:
        for ids in torch.tensor(packs[pack]["input_ids"]).split(PACKS[pack]):
            if len(ids) > 1:
                total += llm(ids[None], labels=ids[None]).loss.item() * (len(ids) - 1)
    logged = runner.message_hub.get_scalar("train/loss").current()
    assert logged == pytest.approx(total / 17, rel=1e-6)


def test_checkpoints_count_optimizer_steps_and_resume_to_the_same_bits(tmp_path):
    whole = make_runner(tmp_path / "whole")
    whole.train()
    saved = tmp_path / "whole" / "iter_2.pth"
    assert not (tmp_path / "whole" / "iter_4.pth").exists()
    resumed = make_runner(tmp_path / "resumed", load_from=str(saved), resume=True)
    resumed.train()
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.iter == len(STEPS)


def test_two_ranks_take_the_steps_together(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    subprocess.run([*torchrun, *rendezvous, __file__, str(tmp_path)], check=True, timeout=240)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert torch.equal(*ranks)
    assert_same_steps(ranks[0], STEPS_OF_TWO)


def train_on_this_rank(folder: Path) -> None:
    dist.init_process_group("gloo")
    model = PackedSupervisedFinetune(make_llm(), use_activation_checkpointing=False)
    runner = make_runner(folder, MMDistributedDataParallel(model))
    runner.train()
    torch.save(weights(model), folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


def test_autocast_and_clipping_are_those_of_the_wrapper():
    linear = nn.Linear(4, 1)
    optimizer = SGD(linear.parameters(), lr=1.0)
    wrapper = TokenAccumulationOptimWrapper(
        optimizer, tokens_per_step=1, dtype="bfloat16", clip_grad=dict(max_norm=1e-3)
    )
    wrapper.begin_step(1)
    before = weights(linear)
    with wrapper.optim_context(linear):
        loss = linear(torch.ones(1, 4)).sum()
    assert loss.dtype == torch.bfloat16
    wrapper.update_params(loss)
    assert (weights(linear) - before).norm().item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tokens_per_step=0), "tokens_per_step must be an integer of at least 1, got 0"),
        (dict(tokens_per_step=float("inf")), "tokens_per_step must be an integer .*, got inf"),
        (dict(tokens_per_step="a"), "tokens_per_step must be an integer .*, got 'a'"),
        (dict(tokens_per_step=1, dtype="float16"), "None or 'bfloat16', got 'float16'; "),
    ],
)
def test_arguments_that_cannot_be_met_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TokenAccumulationOptimWrapper(SGD(nn.Linear(1, 1).parameters(), lr=1.0), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(train_cfg=dict(type=TrainLoop, max_iters=1)), "of tokens_per_step=12, got none; set"),
        (
            dict(train_cfg=dict(type=TokenStepLoop, max_epochs=3)),
            "got None and {'max_epochs': 3}; ",
        ),
        (
            dict(param_scheduler=[dict(type=ExponentialLR, gamma=0.5)]),
            "got epochs in .*'gamma': 0.5.*; set by_epoch=False",
        ),
        (
            dict(optim_wrapper=dict(type=OptimWrapper, optimizer=dict(type=SGD, lr=LR))),
            "with TokenStepLoop, got OptimWrapper; with DeepSpeed use .*TrainLoop",
        ),
    ],
    ids=["loop", "epochs", "schedule", "wrapper"],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, changes, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        make_runner(tmp_path, **changes).train()
    # a step that fails does not come to the hook that withdraws
    withdraw_layout()


def test_an_epoch_without_targets_is_refused():
    batches = [collate([make_pack([1, 1], seed=0)]) for _ in range(3)]
    with pytest.raises(ValueError, match="got 3 micro-batches whose labels are all -100; check"):
        next(TokenWindows(iter(batches), tokens_per_step=1, epoch_length=3))


if __name__ == "__main__":
    train_on_this_rank(Path(sys.argv[1]))
