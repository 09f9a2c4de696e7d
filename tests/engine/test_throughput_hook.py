"""Throughput: the tokens, the places and the FLOPs, each counted another way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel
from xtuner.dataset.collate_fns import default_collate_fn

from xtuner_mamba.engine import TokenAccumulationOptimWrapper, TokenStepLoop
from xtuner_mamba.engine.flops import training_flops_per_token
from xtuner_mamba.engine.hooks import ThroughputHook
from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.ops import selective_scan
from xtuner_mamba.testing import make_scan_inputs

PACKS = [[9], [1, 2, 1], [5, 5], [2, 1]]


class CountStateFlops(TorchDispatchMode):
    """Count products, sums and exponentials of tensors with a number a channel and state."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.flops = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        of = args[0] if name == "sum" else result
        if name in ("mul", "add", "exp", "sum") and of.shape == self.shape:
            self.flops += of.numel()
        return result


def test_scan_costs_seven_flops_a_state():
    dim, dstate = 5, 3
    inputs = make_scan_inputs([4, 2], dim=dim, dstate=dstate)
    with CountStateFlops((dim, dstate)) as counted:
        selective_scan(**inputs, dt_softplus=True, impl="reference")
    assert counted.flops == 6 * 7 * dim * dstate


@pytest.mark.parametrize("freeze", [False, True])
def test_flops_are_those_that_pytorch_counts_and_those_of_conv_and_scan(make_llm, freeze):
    llm = make_llm()
    dispatch_packed(llm)
    if freeze:
        for block in llm.backbone.layers:
            block.mixer.in_proj.weight.requires_grad_(False)
    lengths = [7, 4]
    layout = PackedLayout.from_lengths(lengths)
    with FlopCounterMode(display=False) as counted, layout.published():
        llm(torch.ones(1, 11, dtype=torch.int64)).logits.sum().backward()
    # conv and scan are ops of our own, which PyTorch does not look into
    mixers = [block.mixer for block in llm.backbone.layers]
    conv = 3 * 2 * sum(mixer.conv1d.weight.numel() for mixer in mixers)
    scan = 3 * 7 * sum(mixer.A_log.numel() for mixer in mixers)
    total = counted.get_total_flops() + layout.total * (conv + scan)
    assert training_flops_per_token(llm) * layout.total == total
    assert conv > 0
    assert scan > 0


def test_flops_of_other_mixers_are_not_guessed():
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10)
    assert training_flops_per_token(GPT2LMHeadModel(config)) is None


@pytest.fixture
def _whole_seconds(monkeypatch):
    """Let a second go by whenever somebody looks at the clock."""
    clock = iter(range(10_000))
    monkeypatch.setattr("mmengine.hooks.iter_timer_hook.time.time", lambda: float(next(clock)))


def means(runner):
    names = ("tokens_per_sec", "tflops", "padding_percent", "packing_percent")
    return {name: runner.message_hub.get_scalar(f"train/{name}").current() for name in names}


@pytest.mark.usefixtures("_whole_seconds")
def test_means_are_of_tokens_and_time(tmp_path, make_runner, make_pack):
    hook = dict(type=ThroughputHook, tokens_per_batch=12)
    runner = make_runner(tmp_path, [make_pack(lengths) for lengths in PACKS], [hook])
    runner.train()
    spent = runner.message_hub.get_scalar("train/time").data[0].sum()
    assert spent >= len(PACKS)
    got = means(runner)
    assert got["tokens_per_sec"] == pytest.approx(26 / spent)
    flops = training_flops_per_token(runner.model.llm)
    assert got["tflops"] == pytest.approx(flops * 26 / spent / 1e12)
    assert got["padding_percent"] == 0
    assert got["packing_percent"] == pytest.approx(100 * 26 / 48)
    log = next(tmp_path.rglob("*.log")).read_text()
    assert "tokens_per_sec: " in log
    assert "packing_percent: 54.1667" in log


def test_every_micro_batch_of_a_step_is_counted(tmp_path, make_runner, make_pack):
    runner = make_runner(
        tmp_path,
        [make_pack(lengths) for lengths in PACKS],
        [dict(type=ThroughputHook, tokens_per_batch=12)],
        train_cfg=dict(type=TokenStepLoop, max_iters=1),
        optim_wrapper=dict(
            type=TokenAccumulationOptimWrapper,
            tokens_per_step=15,
            optimizer=dict(type="SGD", lr=0.1),
        ),
    )
    runner.train()
    # 8, 1 and 8 targets
    assert means(runner)["packing_percent"] == pytest.approx(100 * 23 / 36)


def test_padding_that_is_executed_is_told(make_llm):
    hook = ThroughputHook()
    rows = [dict(input_ids=[5] * n, labels=[5] * n) for n in (4, 1)]
    model = torch.nn.Linear(1, 1)
    batch = default_collate_fn(rows)
    hook._count(model, (), dict(data=batch["data"], mode="loss"))
    hook._count(model, (), dict(data=batch["data"], mode="predict"))
    hook._count(model.eval(), (), dict(data=batch["data"], mode="loss"))
    assert (hook._counts.batches, hook._counts.places, hook._counts.tokens) == (1, 8, 5)


def test_room_that_is_none_is_refused():
    for room in (0, "x"):
        with pytest.raises(ValueError, match=f"tokens_per_batch must be .* 1, got {room!r}"):
            ThroughputHook(tokens_per_batch=room)
