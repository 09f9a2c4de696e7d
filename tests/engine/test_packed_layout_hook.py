"""Boundaries reach the model for one iteration, and the loss is the optimizer step's token mean."""

import re
import subprocess
import sys
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from mmengine import MessageHub
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from torch.optim import SGD
from transformers import MambaConfig, MambaForCausalLM
from xtuner.dataset.collate_fns import default_collate_fn
from xtuner.engine.runner import TrainLoop

from xtuner_mamba.engine.hooks import PackedLayoutHook
from xtuner_mamba.engine.step_windows import StepWindows, mean_targets
from xtuner_mamba.layout import PackedLayout, current_layout, current_mean_targets
from xtuner_mamba.model import PackedSupervisedFinetune

VOCAB = 30
# packs whose target counts differ widely: a mean of means would be another step
PACKS = [[9], [1, 2, 1], [5, 5], [2, 1], [12], [3, 3, 3], [1, 4]]
collate = partial(default_collate_fn, use_varlen_attn=True)


def make_llm() -> MambaForCausalLM:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=8, state_size=4, num_hidden_layers=2, use_cache=False
    )
    return MambaForCausalLM(config).double()


def make_pack(lengths: list[int], seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, VOCAB, (sum(lengths),), generator=generator)
    labels = input_ids.clone()
    # prompts: some tokens of the longer documents are no targets
    labels[1 : len(labels) // 4] = -100
    layout = PackedLayout.from_lengths(lengths)
    return {
        "input_ids": input_ids.tolist(),
        "labels": labels.tolist(),
        "cumulative_len": layout.cu_seqlens.tolist(),
        "position_ids": layout.positions[0].tolist(),
    }


def make_dataset() -> list[dict]:
    return [make_pack(lengths, seed) for seed, lengths in enumerate(PACKS)]


def one_document_at_a_time(packs: list[dict], lr: float, micro_steps: int) -> MambaForCausalLM:
    """The same optimizer steps, written without packs, by transformers' own loss."""
    llm = make_llm()
    for start in range(0, len(packs), micro_steps):
        total, count = 0.0, 0
        for pack in packs[start : start + micro_steps]:
            bounds = pack["cumulative_len"]
            for begin, end in pairwise(bounds):
                ids = torch.tensor(pack["input_ids"][begin:end])[None]
                labels = torch.tensor(pack["labels"][begin:end])[None]
                targets = int((labels[:, 1:] != -100).sum())
                if targets:
                    total = total + llm(ids, labels=labels).loss * targets
                    count += targets
        llm.zero_grad()
        (total / count).backward()
        with torch.no_grad():
            for parameter in llm.parameters():
                parameter -= lr * parameter.grad
    return llm


def train(work_dir, max_iters: int, micro_steps: int, lr: float, **kwargs) -> Runner:
    runner = Runner(
        model=PackedSupervisedFinetune(make_llm(), use_activation_checkpointing=True),
        work_dir=str(work_dir),
        train_dataloader=dict(
            dataset=make_dataset(),
            sampler=dict(type="DefaultSampler", shuffle=False),
            batch_size=1,
            num_workers=0,
            collate_fn=collate,
        ),
        train_cfg=dict(type=TrainLoop, max_iters=max_iters),
        optim_wrapper=dict(
            type=OptimWrapper,
            optimizer=dict(type=SGD, lr=lr),
            accumulative_counts=micro_steps,
        ),
        custom_hooks=[dict(type=PackedLayoutHook)],
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=micro_steps)
        ),
        log_processor=dict(by_epoch=False, window_size=1),
        visualizer=None,
        log_level="WARNING",
        experiment_name=f"{work_dir.name}-{max_iters}",
        **kwargs,
    )
    runner.train()
    return runner


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_training_on_packs_takes_the_steps_of_one_document_at_a_time(tmp_path, micro_steps):
    runner = train(tmp_path, max_iters=len(PACKS), micro_steps=micro_steps, lr=0.5)
    expected = dict(one_document_at_a_time(make_dataset(), 0.5, micro_steps).named_parameters())
    start = dict(make_llm().named_parameters())
    for name, parameter in runner.model.llm.named_parameters():
        moved = (expected[name] - start[name]).abs().max().item()
        assert moved > 0, name
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-5 * moved, msg=name)


def test_resumed_training_equals_training_in_one_go(tmp_path):
    whole = train(tmp_path / "whole", max_iters=6, micro_steps=2, lr=0.5)
    checkpoint = str(tmp_path / "whole" / "iter_4.pth")
    resumed = train(
        tmp_path / "resumed", 6, micro_steps=2, lr=0.5, load_from=checkpoint, resume=True
    )
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (dict(by_epoch=False, end=1), "two iterations or more, got one: .* leaves it at 0.25 of"),
        (dict(by_epoch=False, end=2), None),
        (dict(by_epoch=True, end=1), "two epochs or more, got one"),
        # of 7 packs an epoch, as XTuner's templates count
        (dict(by_epoch=True, end=0.2, convert_to_iter_based=True), "two iterations or more"),
        (dict(by_epoch=True, end=0.4, convert_to_iter_based=True), None),
    ],
)
def test_a_warm_up_that_does_not_end_is_told(tmp_path, schedule, told, capfd):
    scheduler = dict(type="LinearLR", start_factor=0.25, **schedule)
    runner = train(tmp_path, max_iters=3, micro_steps=1, lr=0.5, param_scheduler=scheduler)
    lines = [line for line in capfd.readouterr().out.splitlines() if "lr must warm up" in line]
    assert len(lines) == bool(told)
    assert all(re.search(told, line) for line in lines)
    # the reason to tell of it
    assert runner.optim_wrapper.get_lr()["lr"] == [0.125 if told else 0.5]


@pytest.mark.parametrize("mode", ["train", "val", "test"])
def test_publishes_for_one_iteration_and_withdraws(mode):
    hook = PackedLayoutHook()
    batch = collate([make_pack([3, 1, 2], seed=0)])
    getattr(hook, f"before_{mode}_iter")(None, 0, batch)
    assert sorted(batch["data"]) == ["input_ids", "labels", "position_ids"]
    assert current_layout().lengths == (3, 1, 2)
    hub = MessageHub.get_instance("varlen_attn_args")
    assert hub.get_info("cumulative_len_rank_0").tolist() == [0, 3, 4, 6]
    assert hub.get_info("max_seqlen_rank_0") == 3
    getattr(hook, f"after_{mode}_iter")(None, 0, batch)
    assert current_layout() is None
    assert hub.get_info("cumulative_len_rank_0") is None


def test_withdraws_before_the_hooks_that_generate():
    from xtuner.engine.hooks import EvaluateChatHook

    def rank(hook):
        return ["VERY_HIGH", "HIGH", "NORMAL", "LOW"].index(hook.priority)

    assert rank(PackedLayoutHook) < rank(EvaluateChatHook)


def test_batches_of_a_step_know_its_mean_target_count():
    batches = [collate([pack]) for pack in make_dataset()]
    windows = StepWindows(iter(batches), micro_steps=3, max_iters=7)
    means = [float(next(windows)["data"]["mean_targets"]) for _ in range(7)]
    counts = [
        int((PackedLayout.from_lengths(lengths).targets(batch["data"]["labels"]) != -100).sum())
        for lengths, batch in zip(PACKS, batches, strict=True)
    ]
    assert len(set(counts)) > 2
    expected = [sum(counts[:3]) / 3] * 3 + [sum(counts[3:6]) / 3] * 3 + [counts[6]]
    assert means == pytest.approx(expected)


def test_hook_passes_the_mean_target_count_on():
    hook = PackedLayoutHook()
    batch = next(StepWindows(iter([collate([make_pack([4, 2], 0)])]), 1, max_iters=1))
    expected = float(batch["data"]["mean_targets"])
    hook.before_train_iter(None, 0, batch)
    assert float(current_mean_targets()) == expected
    hook.after_train_iter(None, 0, batch)
    assert current_mean_targets() is None


def test_a_batch_without_boundaries_is_refused_with_what_it_holds():
    batch = {"data": {"input_ids": torch.ones(1, 2), "labels": torch.ones(1, 2)}}
    with pytest.raises(ValueError, match=r"cumulative_len, got \['input_ids', 'labels'\]"):
        PackedLayoutHook().before_train_iter(None, 0, batch)


def test_a_batch_of_no_collate_function_is_refused():
    batch = {"input_ids": [1], "labels": [1]}
    with pytest.raises(ValueError, match=r"got \['input_ids', 'labels'\]; set collate_fn"):
        next(StepWindows(iter([batch]), 1, max_iters=1))
    with pytest.raises(ValueError, match=r"hold data, got list"):
        PackedLayoutHook().before_val_iter(None, 0, [batch])


def test_boundaries_that_do_not_cover_the_row_are_refused():
    batch = collate([make_pack([3, 1], seed=0)])
    batch["data"]["input_ids"] = torch.ones(1, 9)
    with pytest.raises(ValueError, match="batch of 1 x 9 tokens, got 4"):
        PackedLayoutHook().before_train_iter(None, 0, batch)


def test_a_step_without_targets_is_refused():
    data = collate([make_pack([3, 1], seed=0)])["data"]
    data["labels"].fill_(-100)
    with pytest.raises(ValueError, match="got 1 micro-batches whose labels are all -100"):
        mean_targets([data])


def test_an_epoch_based_loop_is_refused():
    class Loop:
        pass

    class FakeRunner:
        train_loop = Loop()
        optim_wrapper = None

    with pytest.raises(RuntimeError, match=r"iteration-based loop .* got Loop"):
        PackedLayoutHook().before_train(FakeRunner())


def test_a_second_hook_is_told_before_it_finds_no_boundaries(tmp_path, make_runner, make_pack):
    runner = make_runner(tmp_path, [make_pack([3])], [dict(type=PackedLayoutHook)])
    message = "custom_hooks must hold PackedLayoutHook once, got it 2 times; leave the others out"
    with pytest.raises(RuntimeError, match=message):
        runner.train()


def test_ranks_share_the_token_mean(tmp_path):
    """Two ranks whose packs have different target counts take one common step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    subprocess.run([*torchrun, *rendezvous, __file__, str(tmp_path)], check=True, timeout=240)
    packs = make_dataset()
    # DefaultSampler deals the packs to ranks in turn; two micro-steps a rank are one step
    expected = dict(one_document_at_a_time(packs[:4], 0.5, micro_steps=4).named_parameters())
    for rank in range(2):
        for name, parameter in torch.load(tmp_path / f"{rank}.pt").items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-7, msg=name)


def train_one_step_on_this_rank(folder: str) -> None:
    dist.init_process_group("gloo")
    model = PackedSupervisedFinetune(make_llm(), use_activation_checkpointing=False)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    packs = make_dataset()[dist.get_rank() : 4 : 2]
    windows = StepWindows(iter([collate([pack]) for pack in packs]), micro_steps=2, max_iters=2)
    hook = PackedLayoutHook()
    optimizer = OptimWrapper(SGD(model.parameters(), lr=0.5), accumulative_counts=2)
    for i in range(2):
        batch = next(windows)
        hook.before_train_iter(None, i, batch)
        with optimizer.optim_context(wrapped):
            losses = wrapped(**batch, mode="loss")
        optimizer.update_params(losses["loss"])
        hook.after_train_iter(None, i, batch)
    state = {name: p.detach() for name, p in model.llm.named_parameters()}
    torch.save(state, f"{folder}/{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    train_one_step_on_this_rank(sys.argv[1])
