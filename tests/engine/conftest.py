from functools import partial
from pathlib import Path

import pytest
import torch
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner, loops
from torch.optim import SGD
from transformers import MambaConfig, MambaForCausalLM
from xtuner.dataset.collate_fns import default_collate_fn
from xtuner.engine.runner import TrainLoop

from xtuner_mamba.engine.hooks import PackedLayoutHook
from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import PackedSupervisedFinetune

VOCAB = 30


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch):
    # MMEngine waits between epochs for worker processes, of which there are none
    monkeypatch.setattr(loops.time, "sleep", lambda seconds: None)


@pytest.fixture(scope="session")
def make_llm():
    """A Mamba of two layers with random weights, the same every time."""

    def make(**changes) -> MambaForCausalLM:
        torch.manual_seed(0)
        sizes = dict(vocab_size=VOCAB, hidden_size=8, state_size=4, num_hidden_layers=2)
        return MambaForCausalLM(MambaConfig(**sizes, use_cache=False, **changes)).double()

    return make


@pytest.fixture(scope="session")
def make_pack():
    """A pack of documents of these lengths, in which every token is a label."""

    def make(lengths: list[int], seed: int = 0) -> dict:
        layout = PackedLayout.from_lengths(lengths)
        draw = torch.Generator().manual_seed(seed)
        input_ids = torch.randint(1, VOCAB, (layout.total,), generator=draw).tolist()
        return {
            "input_ids": input_ids,
            "labels": input_ids,
            "cumulative_len": layout.cu_seqlens.tolist(),
            "position_ids": layout.positions[0].tolist(),
        }

    return make


@pytest.fixture
def make_runner(make_llm):
    """A runner that trains on packs, one an iteration, with hooks beside PackedLayoutHook."""

    def make(work_dir: Path, packs: list[dict], hooks: list, **changes) -> Runner:
        model = PackedSupervisedFinetune(make_llm(), use_activation_checkpointing=True)
        options = dict(
            model=model,
            work_dir=str(work_dir),
            train_dataloader=dict(
                dataset=packs,
                sampler=dict(type="DefaultSampler", shuffle=False),
                batch_size=1,
                num_workers=0,
                collate_fn=partial(default_collate_fn, use_varlen_attn=True),
            ),
            train_cfg=dict(type=TrainLoop, max_iters=len(packs)),
            optim_wrapper=dict(type=OptimWrapper, optimizer=dict(type=SGD, lr=0.5)),
            custom_hooks=[dict(type=PackedLayoutHook), *hooks],
            default_hooks=dict(
                logger=dict(type="LoggerHook", interval=1),
                checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=2),
            ),
            log_processor=dict(by_epoch=False, window_size=1),
            visualizer=None,
            experiment_name=str(work_dir).replace("/", "_"),
        )
        return Runner(**options | changes)

    return make
