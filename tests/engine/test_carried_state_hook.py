"""Training on chunks that are carried on: losses, resume, ranks, and what happens in between."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from mmengine.dataset import DefaultSampler
from mmengine.evaluator import BaseMetric
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner, ValLoop
from torch.optim import SGD
from transformers import MambaConfig, MambaForCausalLM
from xtuner.engine.runner import TrainLoop

from xtuner_mamba.dataset import (
    CarriedChunkBatchSampler,
    carried_collate_fn,
    packed_collate_fn,
    process_chunk_dataset,
    process_document_dataset,
    process_packed_dataset,
)
from xtuner_mamba.engine import TokenAccumulationOptimWrapper, TokenStepLoop
from xtuner_mamba.engine.hooks import (
    CarriedStateHook,
    LengthExtrapolationHook,
    PackedLayoutHook,
    carried_state_hook,
)
from xtuner_mamba.layout import current_layout, current_mean_targets
from xtuner_mamba.model import PackedSupervisedFinetune

VOCAB = 30
LENGTHS = [41, 3, 17, 9, 1, 30, 12, 22, 5, 27]
MAX_LENGTH = 8
HOOKS = [dict(type=PackedLayoutHook), dict(type=CarriedStateHook)]


def make_rows() -> Dataset:
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, VOCAB, (n,), generator=draw).tolist() for n in LENGTHS]
    labels = [[-100] * (len(row) // 3) + row[len(row) // 3 :] for row in ids]
    return Dataset.from_dict(dict(input_ids=ids, labels=labels))


def make_model(**options) -> PackedSupervisedFinetune:
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, hidden_size=8, state_size=4, num_hidden_layers=2)
    llm = MambaForCausalLM(MambaConfig(**sizes, use_cache=False)).double()
    options = dict(use_activation_checkpointing=False) | options
    return PackedSupervisedFinetune(llm, **options)


def train(
    work_dir: Path,
    model=None,
    num_rows=2,
    lr=0.5,
    num_iters=6,
    micro_steps=1,
    rows=None,
    plan=None,
    **changes,
):
    dataset = process_chunk_dataset(
        rows or make_rows(), do_dataset_tokenization=False, max_length=MAX_LENGTH
    )
    options = dict(
        model=model or make_model(),
        work_dir=str(work_dir),
        train_dataloader=dict(
            batch_size=1,
            num_workers=0,
            dataset=dataset,
            sampler=dict(type=DefaultSampler, shuffle=True),
            batch_sampler=dict(
                type=CarriedChunkBatchSampler,
                max_length=MAX_LENGTH,
                tokens_per_batch=num_rows * MAX_LENGTH,
            )
            | (plan or {}),
            collate_fn=dict(type=carried_collate_fn),
        ),
        train_cfg=dict(type=TrainLoop, max_iters=num_iters),
        optim_wrapper=dict(
            type=OptimWrapper,
            optimizer=dict(type=SGD, lr=lr),
            accumulative_counts=micro_steps,
        ),
        custom_hooks=HOOKS,
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=3, max_keep_ckpts=9)
        ),
        log_processor=dict(by_epoch=False, window_size=1),
        randomness=dict(seed=1),
        visualizer=None,
        log_level="WARNING",
        experiment_name=str(work_dir).replace("/", "_"),
    )
    runner = Runner(**options | changes)
    runner.train()
    return runner


def weights(runner: Runner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in runner.model.parameters()])


def test_an_epoch_sees_every_target_as_in_its_whole_document(tmp_path):
    """With weights that stay, the summed losses are those of whole documents."""
    sums = []
    model = make_model()
    compute_loss = model.compute_loss

    def sum_losses(data, data_samples=None):
        count = (current_layout().targets(data["labels"]) != -100).sum()
        loss = compute_loss(data, data_samples)
        assert current_mean_targets() == max(count, 1)
        sums.append(loss["loss"].item() * max(count.item(), 1))
        return loss

    model.compute_loss = sum_losses
    runner = train(tmp_path, model, lr=0.0, num_iters=11)
    assert len(runner.train_dataloader) == 11
    expected = 0.0
    llm = make_model(use_varlen_attn=False).llm
    for row in make_rows():
        labels = torch.tensor(row["labels"])[None]
        if (count := (labels[:, 1:] != -100).sum().item()) > 0:
            loss = llm(torch.tensor(row["input_ids"])[None], labels=labels).loss
            expected += loss.item() * count
    assert sum(sums) == pytest.approx(expected, rel=1e-6)


# in the middle of documents, and where an optimizer step has another micro-batch to come
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_resumed_training_goes_on_with_the_same_bits(tmp_path, micro_steps):
    whole = train(tmp_path / "whole", num_iters=15, micro_steps=micro_steps)
    for iteration in (3, 12):
        checkpoint = str(tmp_path / "whole" / f"iter_{iteration}.pth")
        resumed = train(
            tmp_path / f"resumed_{iteration}",
            num_iters=15,
            micro_steps=micro_steps,
            load_from=checkpoint,
            resume=True,
        )
        assert torch.equal(weights(resumed), weights(whole)), iteration


@pytest.mark.parametrize(
    ("interval", "by_epoch", "told"),
    [(4, False, "every 4 iterations"), (6, False, ""), (1, True, "every 11 iterations")],
)
def test_checkpoints_within_an_optimizer_step_are_told(tmp_path, interval, by_epoch, told, capfd):
    checkpoint = dict(type="CheckpointHook", by_epoch=by_epoch, interval=interval)
    train(tmp_path, num_iters=3, micro_steps=3, default_hooks=dict(checkpoint=checkpoint))
    lines = [line for line in capfd.readouterr().out.splitlines() if "lie within" in line]
    assert len(lines) == bool(told)
    assert all(f"{told} lie within optimizer steps of accumulative_counts=3" in x for x in lines)


def test_resuming_without_the_states_is_refused(tmp_path):
    train(tmp_path / "whole", num_iters=3)
    path = tmp_path / "whole" / "iter_3.pth"
    saved = torch.load(path, weights_only=False)
    states = saved["message_hub"]["runtime_info"].pop("carried_states")
    assert len(states) == 1
    torch.save(saved, tmp_path / "without.pth")
    resume = dict(load_from=str(tmp_path / "without.pth"), resume=True)
    with pytest.raises(RuntimeError, match="states must be those of step 2 of epoch 0, got None"):
        train(tmp_path / "resumed", **resume)
    saved["message_hub"]["runtime_info"]["carried_states"] = 2 * states
    torch.save(saved, tmp_path / "without.pth")
    with pytest.raises(RuntimeError, match="got 1 for 2; start as many, or train"):
        train(tmp_path / "by_one_of_two", **resume)


def test_resuming_other_rows_is_refused(tmp_path):
    """A row would go on with the state of another document, or of another place in it."""
    train(tmp_path / "whole", num_iters=3)
    resume = dict(load_from=str(tmp_path / "whole" / "iter_3.pth"), resume=True)
    swapped = make_rows().select([1, 0, *range(2, len(LENGTHS))])
    cases = (
        (dict(plan=dict(max_length=6)), r"\{'max_length': 8\} for \{'max_length': 6\}; resume"),
        (dict(plan=dict(shuffle=False)), r"\{'shuffle': True\} for \{'shuffle': False\}"),
        (dict(num_rows=3), r"'tokens_per_batch': 16\} for \{.*: 24\}"),
        (dict(plan=dict(seed=7)), r"\{'seed': 1\} for \{'seed': 7\}"),
        (dict(rows=swapped), r"\{'checksum of lengths': \d+\} for"),
    )
    for number, (changes, message) in enumerate(cases):
        with pytest.raises(RuntimeError, match=message):
            train(tmp_path / f"resumed_{number}", **resume, **changes)


def test_states_matter_and_evaluation_leaves_them_alone(tmp_path):
    plain = weights(train(tmp_path / "plain"))
    held_out = process_document_dataset(make_rows(), do_dataset_tokenization=False, max_length=64)
    evaluation = dict(type=LengthExtrapolationHook, dataset=held_out, max_length=8, every_n_iters=1)
    evaluated = train(tmp_path / "evaluated", custom_hooks=[*HOOKS, evaluation])
    assert torch.equal(weights(evaluated), plain)
    # and checkpointing runs the layers again on the same states
    checkpointed = train(tmp_path / "again", make_model(use_activation_checkpointing=True))
    assert torch.equal(weights(checkpointed), plain)


class NumBatches(BaseMetric):
    """Count batches."""

    default_prefix = "held_out"

    def process(self, data_batch, data_samples) -> None:
        self.results.append(1)

    def compute_metrics(self, results) -> dict:
        return {"batches": sum(results)}


def validate(work_dir: Path, **loader) -> Runner:
    loader = dict(
        batch_size=1, num_workers=0, sampler=dict(type=DefaultSampler, shuffle=False), **loader
    )
    return train(
        work_dir,
        train_cfg=dict(type=TrainLoop, max_iters=6, val_interval=2),
        val_dataloader=loader,
        val_cfg=dict(type=ValLoop),
        val_evaluator=dict(type=NumBatches),
    )


def test_validation_is_on_whole_documents_and_leaves_the_states_alone(tmp_path):
    options = dict(do_dataset_tokenization=False, max_length=41)
    packs = process_packed_dataset(make_rows(), **options)
    validated = validate(
        tmp_path / "validated", dataset=packs, collate_fn=dict(type=packed_collate_fn)
    )
    num_batches = validated.message_hub.get_scalar("val/held_out/batches").current()
    assert num_batches == len(packs)
    assert torch.equal(weights(validated), weights(train(tmp_path / "plain")))
    sampler = dict(type=CarriedChunkBatchSampler, max_length=8, tokens_per_batch=16)
    with pytest.raises(RuntimeError, match=r"must have whole documents, got .* of 11 steps"):
        validate(
            tmp_path / "refused",
            dataset=process_chunk_dataset(make_rows(), **options),
            batch_sampler=sampler,
            collate_fn=dict(type=carried_collate_fn),
        )


def test_token_steps_carry_from_micro_batch_to_micro_batch(tmp_path):
    def steps(name, tokens_per_step, max_iters):
        return train(
            tmp_path / name,
            train_cfg=dict(type=TokenStepLoop, max_iters=max_iters),
            optim_wrapper=dict(
                type=TokenAccumulationOptimWrapper,
                tokens_per_step=tokens_per_step,
                optimizer=dict(type=SGD, lr=0.5),
            ),
        )

    # a micro-batch a step is what the other loop does
    assert torch.equal(weights(steps("one", 1, 6)), weights(train(tmp_path / "plain")))
    # of several micro-batches none is left out, or it would be refused
    several = steps("several", 25, 4)
    assert several.message_hub.get_scalar("train/tokens_per_step").current() >= 25


def test_two_ranks_carry_the_rows_of_one_and_resume(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    subprocess.run([*torchrun, *rendezvous, __file__, str(tmp_path)], check=True, timeout=240)
    whole, resumed = (
        [torch.load(tmp_path / f"{name}_{r}.pt") for r in range(2)] for name in ("whole", "resumed")
    )
    assert torch.equal(*whole)
    assert torch.equal(whole[0], resumed[0])
    assert torch.equal(*resumed)
    alone = weights(train(tmp_path / "alone"))
    initial = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    moved = (alone - initial).abs().max()
    assert (whole[0] - alone).abs().max() < 1e-6 * moved


def train_on_this_rank(folder: Path) -> None:
    dist.init_process_group("gloo")
    for name, resume in (
        ("whole", {}),
        ("resumed", dict(load_from=str(folder / "whole" / "iter_3.pth"), resume=True)),
    ):
        model = MMDistributedDataParallel(make_model())
        runner = train(folder / name, model, num_rows=1, **resume)
        torch.save(weights(runner), folder / f"{name}_{dist.get_rank()}.pt")
        dist.barrier()
    dist.destroy_process_group()


def test_layers_that_carry_no_state_are_refused(tmp_path):
    packs = process_packed_dataset(make_rows(), do_dataset_tokenization=False, max_length=8)
    loader = dict(
        batch_size=1,
        num_workers=0,
        dataset=packs,
        sampler=dict(type=DefaultSampler, shuffle=True),
        collate_fn=dict(type=packed_collate_fn),
    )
    with pytest.raises(RuntimeError, match=r"got 0 states of \{'MambaMixer': 2\}; attention"):
        train(tmp_path, train_dataloader=loader)


def test_rows_that_go_on_need_the_hook(tmp_path, monkeypatch):
    # what a training that failed has left
    monkeypatch.setattr(carried_state_hook, "_states", None)
    with pytest.raises(RuntimeError, match=r"must hold CarriedStateHook .*, got none"):
        train(tmp_path, custom_hooks=HOOKS[:1])


if __name__ == "__main__":
    train_on_this_rank(Path(sys.argv[1]))
