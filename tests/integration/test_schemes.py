"""Fixed rows, buckets and packs: one model, one optimizer step, one replay."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from mmengine.config import Config
from mmengine.dataset import DefaultSampler
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner, loops
from torch.optim import SGD
from transformers import MambaConfig, MambaForCausalLM
from xtuner.engine.runner import TrainLoop

from xtuner_mamba.dataset import (
    BucketBatchSampler,
    TokenBudgetBatchSampler,
    packed_collate_fn,
    padded_collate_fn,
    process_document_dataset,
    process_packed_dataset,
)
from xtuner_mamba.engine.hooks import PackedLayoutHook
from xtuner_mamba.integration.templates import templates
from xtuner_mamba.model import PackedSupervisedFinetune

VOCAB = 30
MAX_LENGTH = 24
LENGTHS = [9, 3, 24, 5, 5, 2, 17, 4, 12, 3, 8, 21, 6]
PACKED = dict(dataset=process_packed_dataset, collate_fn=packed_collate_fn)
BUCKET = dict(
    dataset=process_document_dataset,
    collate_fn=padded_collate_fn,
    batch_sampler=dict(type=BucketBatchSampler, boundaries=[4, 9, 24], tokens_per_batch=24),
)
ROLLING = BUCKET | dict(batch_sampler=dict(type=TokenBudgetBatchSampler, tokens_per_batch=30))
ONE_BY_ONE = dict(dataset=process_document_dataset, collate_fn=padded_collate_fn)
CHUNKS = dict(
    dataset=process_packed_dataset,
    options=dict(packing="wrap"),
    collate_fn=padded_collate_fn,
    batch_sampler=dict(type=TokenBudgetBatchSampler, tokens_per_batch=48),
)


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch):
    # MMEngine waits between epochs for worker processes, of which there are none
    monkeypatch.setattr(loops.time, "sleep", lambda seconds: None)


def make_rows() -> Dataset:
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, VOCAB, (n,), generator=draw).tolist() for n in LENGTHS]
    # a third of every document is a prompt
    labels = [[-100] * (len(ids) // 3) + ids[len(ids) // 3 :] for ids in documents]
    return Dataset.from_dict({"input_ids": documents, "labels": labels})


def make_llm() -> MambaForCausalLM:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=8, state_size=4, num_hidden_layers=2, use_cache=False
    )
    return MambaForCausalLM(config).double()


def train(
    work_dir: Path, scheme: dict, micro_steps: int = 1, num_steps: int | None = None, **extra
):
    """Train for a number of optimizer steps; by default for one, over the whole epoch."""
    loader = dict(
        batch_size=1,
        num_workers=0,
        dataset=scheme["dataset"](
            make_rows(),
            do_dataset_tokenization=False,
            max_length=MAX_LENGTH,
            **scheme.get("options", {}),
        ),
        sampler=dict(type=DefaultSampler, shuffle=True),
        collate_fn=dict(type=scheme["collate_fn"]),
    )
    if "batch_sampler" in scheme:
        loader["batch_sampler"] = scheme["batch_sampler"]
    loader = Runner.build_dataloader(loader, seed=1)
    if num_steps is None:
        micro_steps, num_steps = len(loader), 1
    runner = Runner(
        model=PackedSupervisedFinetune(make_llm(), use_activation_checkpointing=False),
        work_dir=str(work_dir),
        train_dataloader=loader,
        train_cfg=dict(type=TrainLoop, max_iters=num_steps * micro_steps),
        optim_wrapper=dict(
            type=OptimWrapper, optimizer=dict(type=SGD, lr=0.5), accumulative_counts=micro_steps
        ),
        custom_hooks=[dict(type=PackedLayoutHook)],
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=micro_steps)
        ),
        log_processor=dict(by_epoch=False, window_size=1),
        visualizer=None,
        log_level="WARNING",
        experiment_name=str(work_dir).replace("/", "_"),
        **extra,
    )
    runner.train()
    return runner


def weights(runner: Runner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in runner.model.parameters()])


def test_all_schemes_take_the_same_first_step(tmp_path):
    initial = torch.cat([parameter.detach().flatten() for parameter in make_llm().parameters()])
    packed = weights(train(tmp_path / "packed", PACKED))
    moved = (packed - initial).abs().max()
    assert moved > 1e-2
    for name, scheme in dict(bucket=BUCKET, rolling=ROLLING, one_by_one=ONE_BY_ONE).items():
        difference = (weights(train(tmp_path / name, scheme)) - packed).abs().max()
        # transformers rounds norms and logits to float32
        assert difference < 1e-6 * moved, name
    # chunks that cut documents and do not reset at their starts take another
    chunks = weights(train(tmp_path / "chunks", CHUNKS))
    assert (chunks - packed).abs().max() > 1e-2 * moved


# optimizer steps of two micro-batches: the middle of the second epoch
@pytest.mark.parametrize("sampling", ["natural", "sqrt_tokens", "stratified"])
def test_resuming_in_an_epoch_of_buckets_gives_the_same_bits(tmp_path, sampling):
    scheme = BUCKET | dict(batch_sampler=BUCKET["batch_sampler"] | dict(sampling=sampling))
    whole = train(tmp_path / "whole", scheme, micro_steps=2, num_steps=8)
    steps = len(whole.train_dataloader)
    assert steps < 10 < 2 * steps - 1
    checkpoint = str(tmp_path / "whole" / "iter_10.pth")
    resumed = train(tmp_path / "resumed", scheme, 2, num_steps=8, load_from=checkpoint, resume=True)
    assert torch.equal(weights(resumed), weights(whole))
    untouched = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert not torch.equal(
        untouched["llm.backbone.embeddings.weight"], whole.model.llm.backbone.embeddings.weight
    )


def test_templates_of_the_schemes_differ_in_their_data_alone():
    names = [
        f"mamba_130m_full_alpaca_e3_{scheme}" for scheme in ("varlen", "bucket", "fixed_chunk")
    ]
    configs = [Config.fromfile(templates()[name]).to_dict() for name in names]
    others = [
        {
            key: value
            for key, value in config.items()
            if key.partition("_")[0] in ("model", "optim", "train", "custom", "default")
        }
        for config in configs
    ]
    for config in others:
        for key in ("train_dataset", "train_dataloader"):
            assert config.pop(key)
        config["optim_wrapper"].pop("accumulative_counts")
    assert others[0] == others[1] == others[2]
    assert others[0]["custom_hooks"]
