"""Fused norms, the loss without logits and recomputed mixers: the same model, on a GPU if any."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import MambaConfig, MambaForCausalLM
from transformers.models.mamba.modeling_mamba import MambaMixer

from xtuner_mamba import layout as layouts
from xtuner_mamba.layout import IGNORE_INDEX, PackedLayout
from xtuner_mamba.model import dispatch_packed, loss
from xtuner_mamba.model.dispatch import mamba, mamba_lm
from xtuner_mamba.model.loss import packed_loss
from xtuner_mamba.ops import causal_conv1d, parts, selective_scan
from xtuner_mamba.ops.causal_conv1d import ForkedConv
from xtuner_mamba.ops.causal_conv1d import triton as conv_triton
from xtuner_mamba.ops.selective_scan import triton
from xtuner_mamba.testing import relative_rms

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_gpu = pytest.mark.skipif(not GPU, reason="asks something of a GPU")
VOCAB, LAYERS = 50, 3
LENGTHS = [5, 17, 1, 9, 1, 40]
FUSED = dict(fuse_norm=True, recompute=True)
PLAIN = dict(fuse_norm=False, recompute=False)


@pytest.fixture(autouse=True)
def _forget_what_was_said():
    loss._say_once.cache_clear()


@pytest.fixture
def kernels(monkeypatch):
    """Run the Triton kernels of norm and loss, in the interpreter where there is no GPU."""
    for name in ("rms_norm", "linear_cross_entropy"):
        op = functools.partial(getattr(mamba_lm, name), impl="triton")
        monkeypatch.setattr(mamba_lm, name, op)
    monkeypatch.setattr(mamba_lm, "_runs_kernels", lambda x: True)


def make_model(dtype=torch.float32, seed=0, **overrides) -> MambaForCausalLM:
    """Build a model whose every parameter matters; the dynamics stay in float32."""
    settings = dict(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=LAYERS)
    torch.manual_seed(seed)
    model = MambaForCausalLM(MambaConfig(**{**settings, "use_cache": False, **overrides}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "norm_f.weight", "conv1d.bias")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name.endswith("embeddings.weight"):
                parameter.mul_(10)
            if not name.endswith(("A_log", "D")) or dtype == torch.float64:
                parameter.data = parameter.data.to(dtype)
    return model.to(DEVICE).train()


def make_batch(lengths=LENGTHS, seed=0):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (1, sum(lengths)), generator=draw)
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=draw) < 0.2, IGNORE_INDEX)
    return tokens.to(DEVICE), labels.to(DEVICE), PackedLayout.from_lengths(lengths).to(DEVICE)


def step(model, batch, *, fuse, mean_targets=None):
    """Loss and every gradient of a step."""
    tokens, labels, layout = batch
    model.zero_grad()
    with layout.published():
        value = packed_loss(model, {"input_ids": tokens}, labels, layout, mean_targets, fuse=fuse)
        value.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": value.detach()} | grads


def assert_close(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, f"{name} has nothing to compare"
        assert relative_rms(actual[name], value) < tolerance, name


@pytest.mark.parametrize("residual_in_fp32", [True, False])
def test_a_fused_step_equals_the_plain_one(kernels, residual_in_fp32):
    fused, plain = (make_model(residual_in_fp32=residual_in_fp32) for _ in range(2))
    dispatch_packed(fused, **FUSED)
    dispatch_packed(plain, **PLAIN)
    batch = make_batch()
    expected = step(plain, batch, fuse=False)
    assert_close(step(fused, batch, fuse=True), expected, 1e-5)


@pytest.mark.skipif(GPU, reason="kernels take no float64")
def test_a_fused_step_is_exact_in_float64():
    fused, plain = (make_model(torch.float64) for _ in range(2))
    dispatch_packed(fused, **FUSED)
    dispatch_packed(plain, **PLAIN)
    batch = make_batch()
    # transformers rounds norms, residuals and logits to float32
    assert_close(step(fused, batch, fuse=True), step(plain, batch, fuse=False), 1e-6)


def eager_step(model, batch, monkeypatch):
    """One document at a time through transformers' own PyTorch."""
    tokens, labels, layout = batch
    monkeypatch.setattr(MambaMixer, "forward", MambaMixer.slow_forward)
    for block in model.backbone.layers:
        # in float32 it would lift what follows to float32, which the next projection refuses
        block.mixer.D.data = block.mixer.D.data.to(model.dtype)
    model.zero_grad()
    parts = (t.split(list(layout.lengths), dim=1) for t in (tokens, labels))
    total, count = 0.0, 0
    for part, wanted in zip(*parts):
        count += (wanted[:, 1:] != IGNORE_INDEX).sum()
        logits = model(part).logits[:, :-1].flatten(0, 1)
        wanted = wanted[:, 1:].flatten()
        total += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
    (total / count).backward()
    return {"loss": (total / count).detach()} | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16, torch.float16] * GPU, ids=str)
def test_errs_at_most_twice_as_much_as_eager_documents_alone(kernels, monkeypatch, dtype):
    """Each error is a mean over draws and layers: which of two right results errs more is luck."""
    errors = {}
    for seed in range(6):
        lengths = [*LENGTHS, *[64, 65, 130] * GPU]
        batch = make_batch(lengths, seed)
        fused = make_model(dtype, seed)
        dispatch_packed(fused, **FUSED)
        actual = step(fused, batch, fuse=True)
        eager = eager_step(make_model(dtype, seed), batch, monkeypatch)
        # the values of the low-precision model, in float64
        oracle = make_model(dtype, seed).double()
        exact = eager_step(oracle, batch, monkeypatch)
        for name, value in exact.items():
            pair = relative_rms(actual[name], value), relative_rms(eager[name], value)
            errors.setdefault(re.sub(r"layers\.\d", "layers", name), []).append(pair)
    for name, pairs in errors.items():
        # one correct rounding errs by eps / 4 over many numbers, and by eps / 2 in a single one
        rounding = torch.finfo(dtype).eps / (2 if name == "loss" else 4)
        ours, theirs = (sum(error) / len(pairs) for error in zip(*pairs))
        # the special-function unit errs by 2 units in the last place, a CPU's exp by half
        factor = 3 if GPU else 2
        assert ours <= factor * max(theirs, rounding), f"{name}: {ours:.2e}, eager {theirs:.2e}"


@pytest.mark.parametrize("options", [PLAIN, FUSED], ids=["plain", "fused"])
def test_norms_and_blocks_run_fused_only_if_asked(monkeypatch, options):
    calls = []
    norm = mamba_lm.rms_norm
    monkeypatch.setattr(mamba_lm, "rms_norm", lambda *a, **k: calls.append(1) or norm(*a, **k))
    model = make_model()
    dispatch_packed(model, **options)
    step(model, make_batch(), fuse=False)
    assert len(calls) == (LAYERS + 1 if options["fuse_norm"] else 0)


# -- blocks that add and norm at once -------------------------------------------------------------


@pytest.fixture
def ahead(kernels, monkeypatch):
    """Count the sums that a block has normed for the next one."""
    sums = []
    add = mamba_lm.add_before_norm
    monkeypatch.setattr(mamba_lm, "add_before_norm", lambda *a, **k: sums.append(1) or add(*a, **k))
    return sums


def test_a_block_norms_its_sum_for_the_next_one(ahead):
    model, batch = make_model(), make_batch()
    dispatch_packed(model, **FUSED)
    step(model, batch, fuse=False)
    assert len(ahead) == LAYERS
    with torch.no_grad(), batch[2].published():
        model(batch[0])
    assert len(ahead) == LAYERS


def hook_block(model):
    model.backbone.layers[1].register_forward_pre_hook(lambda *_: None)


def hook_norm(model):
    model.backbone.layers[1].norm.register_forward_hook(lambda *_: None)


def wrap_block(model):
    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **options):
            return self.inner(*args, **options)

    model.backbone.layers[1] = Wrapped(model.backbone.layers[1])


def drop_block(model):
    del model.backbone.layers[0]


def change_output(model):
    model.backbone.layers[0].register_forward_hook(lambda *a: a[-1] * 2)


def change_output_in_place(model):
    def double(block, inputs, output):
        output.mul_(2)

    model.backbone.layers[0].register_forward_hook(double)


def change_gradient(model):
    def scale(block, inputs, output):
        output.register_hook(lambda gradient: 2 * gradient)

    model.backbone.layers[0].register_forward_hook(scale)


@pytest.mark.parametrize(
    ("change", "sums"),
    [
        (hook_block, LAYERS - 1),
        (hook_norm, LAYERS - 1),
        # neither the one before knows it, nor does it know its place
        (wrap_block, LAYERS - 2),
        # none is where it was, but the last two of them
        (drop_block, 0),
        (change_output, LAYERS),
        (change_output_in_place, LAYERS),
        (change_gradient, LAYERS),
    ],
)
def test_a_norm_ahead_changes_nothing(ahead, change, sums):
    actual, expected = (changed_step(change, options) for options in (FUSED, PLAIN))
    assert_close(actual, expected, 1e-5)
    assert len(ahead) == sums


def changed_step(change, options):
    model = make_model()
    dispatch_packed(model, **options)
    change(model)
    return step(model, make_batch(), fuse=False)


def test_hidden_states_have_their_gradients(kernels):
    results = []
    for options in (FUSED, PLAIN):
        model, (tokens, _, layout) = make_model(), make_batch()
        dispatch_packed(model, **options)
        with layout.published():
            output = model(tokens, output_hidden_states=True)
        results.append(torch.autograd.grad(output.logits.square().sum(), output.hidden_states))
    assert len(results[0]) == LAYERS + 1
    for actual, expected in zip(*results):
        assert relative_rms(actual, expected) < 1e-5


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_blocks_norm_for_themselves(ahead, use_reentrant):
    model = make_model()
    dispatch_packed(model, **FUSED)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    step(model, make_batch(), fuse=False)
    assert not ahead


def test_a_script_may_checkpoint_blocks_itself(ahead):
    results = []
    for options in (FUSED, PLAIN):
        model, (tokens, _, layout) = make_model(), make_batch()
        dispatch_packed(model, **options)
        with layout.published():
            h = model.backbone.embeddings(tokens)
            for block in model.backbone.layers:
                h = checkpoint(block, h, use_reentrant=False)
            model.backbone.norm_f(h).square().sum().backward()
        parameters = model.backbone.named_parameters()
        results.append({name: parameter.grad for name, parameter in parameters})
    assert ahead
    for name, expected in results[1].items():
        assert relative_rms(results[0][name], expected) < 1e-5, name


def test_by_default_only_a_gpu_gets_the_fused_ops(monkeypatch):
    calls = []
    for module, name in ((mamba_lm, "rms_norm"), (mamba_lm, "linear_cross_entropy")):
        op = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, op=op, name=name, **k: calls.append(name) or op(*a, **k)
        )
    monkeypatch.setattr(mamba, "checkpoint", lambda f, x, **k: calls.append("checkpoint") or f(x))
    monkeypatch.setattr(mamba, "_MIN_RECOMPUTED", 64)
    model = make_model()
    dispatch_packed(model)
    step(model, make_batch(), fuse=None)
    everything = {"rms_norm", "linear_cross_entropy", "checkpoint"}
    assert set(calls) == (everything if GPU else set())


def test_a_second_dispatch_changes_the_options_and_undo_gives_them_back():
    model = make_model()
    first = dispatch_packed(model, **PLAIN)
    before = model.backbone.layers[0].mixer.forward
    second = dispatch_packed(model, **FUSED)
    assert second.counts == {}, "they were dispatched before"
    assert model.backbone.layers[0].mixer.forward.keywords["recompute"] is True
    second.undo()
    assert model.backbone.layers[0].mixer.forward is before
    first.undo()
    assert not [m for m in model.modules() if "forward" in m.__dict__]


# -- recomputed mixers ----------------------------------------------------------------------------


def test_recomputing_changes_no_bit():
    kept, recomputed = make_model(), make_model()
    dispatch_packed(kept, fuse_norm=False, recompute=False)
    dispatch_packed(recomputed, fuse_norm=False, recompute=True)
    batch = make_batch()
    expected = step(kept, batch, fuse=False)
    for name, value in step(recomputed, batch, fuse=False).items():
        assert torch.equal(value, expected[name]), name


def test_recomputed_scans_may_keep_more_than_the_first_ones(monkeypatch):
    """As the Gluon kernels do, whose second run keeps the states that the backward starts from."""
    original, kept_at_last = triton._KERNELS, []

    def forward(*args, backward_follows, **options):
        final_states, kept = original.forward(*args, backward_follows=backward_follows, **options)
        return final_states, kept if backward_follows else None

    def backward(*args, **options):
        kept_at_last.append(args[10])
        return original.backward(*args, **options)

    kept, recomputed = make_model(), make_model()
    monkeypatch.setattr(mamba, "selective_scan", functools.partial(selective_scan, impl="triton"))
    dispatch_packed(kept, fuse_norm=False, recompute=False)
    dispatch_packed(recomputed, fuse_norm=False, recompute=True)
    batch = make_batch()
    expected = step(kept, batch, fuse=False)
    monkeypatch.setattr(triton, "_KERNELS", original._replace(forward=forward, backward=backward))
    for name, value in step(recomputed, batch, fuse=False).items():
        assert torch.equal(value, expected[name]), name
    assert [states.ndim for states in kept_at_last] == LAYERS * [3]


def kept_bytes(model, batch) -> int:
    """Count what autograd holds on to between forward and backward, but for the parameters."""
    seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
    size = 0

    def pack(tensor):
        nonlocal size
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            size += storage.nbytes()
        return tensor

    with batch[2].published(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hidden = model.backbone(batch[0]).last_hidden_state
    assert hidden.requires_grad
    return size


def test_recomputing_keeps_little_but_what_in_proj_made():
    plain, recomputed = make_model(), make_model()
    dispatch_packed(plain, fuse_norm=True, recompute=False)
    dispatch_packed(recomputed, fuse_norm=True, recompute=True)
    batch = make_batch([64] * 8)
    assert kept_bytes(recomputed, batch) < 0.6 * kept_bytes(plain, batch)


def count_calls(model):
    """Count how often each projection of the first mixer came to its end."""
    counts = dict.fromkeys(("in_proj", "x_proj", "dt_proj", "out_proj"), 0)

    def count(name):
        def hook(*_):
            counts[name] += 1

        return hook

    class Standin(torch.nn.Sequential):
        """Called as a module, as LoRA is; dt_proj itself is not, for its bias."""

    mixer = model.backbone.layers[0].mixer
    for name in counts:
        setattr(mixer, name, Standin(getattr(mixer, name)))
        getattr(mixer, name).register_forward_hook(count(name))
    return counts


def test_only_what_stands_between_the_projections_runs_again():
    model = make_model()
    dispatch_packed(model, recompute=True)
    counts = count_calls(model)
    step(model, make_batch(), fuse=False)
    assert counts == {"in_proj": 1, "x_proj": 2, "dt_proj": 2, "out_proj": 1}


def test_a_plain_x_proj_does_not_run_again(monkeypatch):
    model = make_model()
    dispatch_packed(model, recompute=True)
    weight = model.backbone.layers[0].mixer.x_proj.weight
    widths = []

    def linear(x, given, *bias):
        if given.data_ptr() == weight.data_ptr():
            widths.append(x.shape[-1])
        return original(x, given, *bias)

    original = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    step(model, make_batch(), fuse=False)
    assert widths == [weight.shape[1]]


def test_a_retained_graph_is_recomputed_for_each_backward():
    model, (tokens, _, layout) = make_model(), make_batch()
    dispatch_packed(model, recompute=True)
    with layout.published():
        logits = model(tokens).logits
    parameters = list(model.parameters())
    first = torch.autograd.grad(logits.sum(), parameters, retain_graph=True)
    second = torch.autograd.grad(logits.sum(), parameters)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_hooks_on_x_proj_during_one_run_alone_change_no_gradient(when):
    """As of somebody who looks at what passes there, and has done so when the backward comes."""
    gradients = []
    for recompute in (False, True):
        model, (tokens, _, layout) = make_model(), make_batch()
        dispatch_packed(model, recompute=recompute)
        layer = model.backbone.layers[1].mixer.x_proj
        handle = layer.register_forward_hook(lambda *_: None) if when == "forward" else None
        with layout.published():
            logits = model(tokens).logits
        if handle is None:
            layer.register_forward_hook(lambda *_: None)
        else:
            handle.remove()
        gradients.append(torch.autograd.grad(logits.square().sum(), list(model.parameters())))
    assert all(map(torch.equal, *gradients))


def test_a_float32_input_under_autocast_is_recomputed(monkeypatch):
    losses = []
    for recompute in (False, True):
        model, batch = make_model(), make_batch()
        dispatch_packed(model, fuse_norm=False, recompute=recompute)
        for layer in model.backbone.layers:
            layer.mixer.in_proj.register_forward_hook(lambda *args: args[-1].float())
        with torch.autocast(DEVICE.type, torch.bfloat16):
            losses.append(step(model, batch, fuse=False))
    assert_close(*losses, 1e-6)


def hook_output(layer):
    layer.register_forward_hook(lambda *_: None)


def hook_gradient(layer):
    layer.register_full_backward_hook(lambda *_: None)


def own_forward(layer):
    layer.forward = layer.forward


def partition(layer):
    layer.weight.ds_id = 0


def stand_in(layer):
    layer.__class__ = type("Standin", (torch.nn.Linear,), {})


@pytest.mark.parametrize("change", [hook_output, hook_gradient, own_forward, partition, stand_in])
def test_an_out_proj_that_must_be_called_is_called(monkeypatch, change):
    given = []
    monkeypatch.setattr(
        mamba, "selective_scan", lambda *a, **k: given.append(k) or selective_scan(*a, **k)
    )
    model, batch = make_model(), make_batch()
    dispatch_packed(model, **PLAIN)
    expected = step(model, batch, fuse=False)
    change(model.backbone.layers[1].mixer.out_proj)
    for name, value in step(model, batch, fuse=False).items():
        torch.testing.assert_close(value, expected[name])
    assert ["out_proj_weight" in options for options in given] == [True] * 3 + [True, False, True]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_block_runs_again_once_and_not_twice(use_reentrant):
    model = make_model()
    dispatch_packed(model, recompute=True)
    counts = count_calls(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    step(model, make_batch(), fuse=False)
    assert counts["in_proj"] == counts["x_proj"] == 2


def test_nothing_is_recomputed_without_gradients(monkeypatch):
    monkeypatch.setattr(mamba, "checkpoint", lambda *_, **__: pytest.fail("recomputes"))
    model = make_model()
    dispatch_packed(model, recompute=True)
    tokens, _, layout = make_batch()
    with layout.published(), torch.no_grad():
        model(tokens)


def test_dropout_in_lora_falls_the_same_way_again():
    grads = []
    for recompute in (True, False):
        torch.manual_seed(1)
        model = make_model()
        dispatch_packed(model, recompute=recompute)
        config = LoraConfig(r=2, target_modules=["x_proj", "dt_proj"], lora_dropout=0.5)
        model = get_peft_model(model, config).to(DEVICE)
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.1)
        grads.append(step(model, make_batch(), fuse=False))
        torch.manual_seed(3)
        other = step(model, make_batch(), fuse=False)
        assert not torch.equal(other["loss"], grads[-1]["loss"]), "nothing was dropped"
    assert len(grads[0]) == 1 + LAYERS * 2 * 2
    for name, value in grads[0].items():
        assert torch.equal(value, grads[1][name]), name


def test_what_a_hook_drops_falls_the_same_way_again():
    grads = []
    for recompute in (True, False):
        model = make_model()
        dispatch_packed(model, recompute=recompute)
        model.backbone.layers[1].mixer.x_proj.register_forward_hook(
            lambda _, __, selection: F.dropout(selection, 0.5)
        )
        torch.manual_seed(2)
        grads.append(step(model, make_batch(), fuse=False))
    for name, value in grads[0].items():
        assert torch.equal(value, grads[1][name]), name


def test_generators_are_left_alone_where_nothing_draws(monkeypatch):
    given = []
    monkeypatch.setattr(mamba, "checkpoint", lambda *a, **k: given.append(k) or checkpoint(*a, **k))
    model = make_model()
    dispatch_packed(model, recompute=True)
    step(model, make_batch(), fuse=False)
    assert [options["preserve_rng_state"] for options in given] == LAYERS * [False]


def test_a_backward_after_the_batch_still_knows_its_boundaries(monkeypatch):
    model = make_model()
    dispatch_packed(model, recompute=True)
    tokens, labels, layout = batch = make_batch()
    expected = step(model, batch, fuse=False)
    model.zero_grad()
    with layout.published():
        value = packed_loss(model, {"input_ids": tokens}, labels, layout, fuse=False)
    # and reads them from a tensor that was checked, without waiting for a GPU
    if GPU:
        monkeypatch.setattr(layouts, "_check_offsets", lambda *_: pytest.fail("checked again"))
    with PackedLayout.from_lengths([layout.total]).to(DEVICE).published():
        value.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_zero3_recomputes_nothing(monkeypatch):
    monkeypatch.setattr(mamba, "checkpoint", lambda *_, **__: pytest.fail("recomputes"))
    model = make_model()
    dispatch_packed(model, recompute=True)
    for parameter in model.parameters():
        parameter.ds_id = 0
    step(model, make_batch(), fuse=False)


# -- gradients written where they are read ---------------------------------------------------------


@pytest.fixture
def mixer_kernels(monkeypatch):
    """Run the Triton kernels of conv and scan, in the interpreter where there is no GPU."""
    for op in (causal_conv1d, selective_scan):
        monkeypatch.setattr(mamba, op.__name__, functools.partial(op, impl="triton"))


@pytest.fixture
def autograd_lays_and_adds(mixer_kernels, monkeypatch):
    """Leave to PyTorch what the kernels do while they read and write gradients anyway."""

    def split_by_autograd(whole, sizes):
        return whole.split(sizes, dim=-1), len(sizes) * [None]

    def conv_for_one_reader(*args, fork, dx_out, **options):
        y = causal_conv1d(*args, impl="triton", **options)
        return ForkedConv(y, y, None)

    def use():
        monkeypatch.setattr(mamba, "causal_conv1d", conv_for_one_reader)
        monkeypatch.setattr(mamba, "split_parts", split_by_autograd)

    return use


def as_it_is(model):
    return model


def with_lora(model):
    """Freeze in_proj, and all that comes before the first one."""
    config = LoraConfig(r=2, target_modules=["x_proj", "dt_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, config).to(DEVICE)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def without_silu(model):
    for block in model.backbone.layers:
        block.mixer.activation, block.mixer.act = "gelu", torch.nn.GELU()
    return model


@pytest.mark.parametrize(
    ("change", "recompute"),
    [(as_it_is, False), (as_it_is, True), (with_lora, True), (without_silu, False)],
)
def test_gradients_are_those_that_autograd_lays_and_adds(autograd_lays_and_adds, change, recompute):
    def grads():
        model = make_model(hidden_size=8, num_hidden_layers=2)
        dispatch_packed(model, fuse_norm=False, recompute=recompute)
        return step(change(model), make_batch([3, 1]), fuse=False)

    actual = grads()
    autograd_lays_and_adds()
    expected = grads()
    if change is with_lora:
        # three gradients, added in another order
        assert_close(actual, expected, 1e-6)
        return
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_of_in_proj_is_where_conv_and_scan_wrote_it(
    mixer_kernels, monkeypatch, recompute
):
    original, written = parts.GradientPart.allocate, []

    def allocate(self):
        written.append(original(self))
        return written[-1]

    monkeypatch.setattr(parts.GradientPart, "allocate", allocate)
    model, arrived = make_model(hidden_size=8, num_hidden_layers=1), []
    dispatch_packed(model, fuse_norm=False, recompute=recompute)
    model.backbone.layers[0].mixer.in_proj.register_forward_hook(
        lambda _, __, xz: xz.register_hook(arrived.append) and None
    )
    step(model, make_batch([3, 1]), fuse=False)
    (dxz,), (dz, dx) = arrived, written
    assert dx.is_set_to(dxz[..., :16])
    assert dz.is_set_to(dxz[..., 16:])


def test_the_conv_adds_the_gradients_of_its_two_readers(mixer_kernels, monkeypatch):
    original, shapes = conv_triton._conv_bwd, []

    def conv_bwd(*args, **options):
        shapes.append([args[7].shape, args[8].shape])
        return original(*args, **options)

    monkeypatch.setattr(conv_triton, "_conv_bwd", conv_bwd)
    model = make_model(hidden_size=8, num_hidden_layers=1)
    dispatch_packed(model, fuse_norm=False, recompute=True)
    step(model, make_batch([3, 1]), fuse=False)
    assert shapes == [2 * [(4, 16)]]


# -- the loss without logits ----------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(loss, "print_log", lambda message, *_: lines.append(message))
    return lines


def no_logits(monkeypatch):
    monkeypatch.setattr(loss, "packed_token_loss", lambda *_: pytest.fail("took the logits"))


@pytest.mark.parametrize("mean_targets", [None, 7.5])
def test_loss_without_logits_equals_that_of_the_logits(kernels, monkeypatch, mean_targets):
    model = make_model()
    dispatch_packed(model, **PLAIN)
    if mean_targets:
        mean_targets = torch.tensor(mean_targets, device=DEVICE)
    batch = make_batch()
    expected = step(model, batch, fuse=False, mean_targets=mean_targets)
    no_logits(monkeypatch)
    actual = step(model, batch, fuse=True, mean_targets=mean_targets)
    # the head is the embedding: its gradient comes from both ends
    assert model.lm_head.weight is model.backbone.embeddings.weight
    assert_close(actual, expected, 1e-5)


def test_rows_of_packs_give_the_loss_of_one_row(monkeypatch):
    lengths = [3, 4, 1, 6]
    model = make_model()
    dispatch_packed(model)
    tokens, labels, layout = make_batch(lengths)
    no_logits(monkeypatch)
    one_row = step(model, (tokens, labels, layout), fuse=True)
    two_rows = step(model, (tokens.view(2, 7), labels.view(2, 7), layout), fuse=True)
    assert_close(two_rows, one_row, 1e-5)


def test_lora_trains_without_logits(monkeypatch):
    model = make_model()
    dispatch_packed(model)
    model = get_peft_model(
        model, LoraConfig(r=2, target_modules=["in_proj"], task_type="CAUSAL_LM")
    )
    model = model.to(DEVICE)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    batch = make_batch()
    expected = step(model, batch, fuse=False)
    no_logits(monkeypatch)
    assert_close(step(model, batch, fuse=True), expected, 1e-5)


class AdaptedLinear(torch.nn.Linear):
    """Stands for a layer of PEFT or bitsandbytes, which does more than its weight tells."""


def adapt(head):
    head.__class__ = AdaptedLinear


def add_bias(head):
    head.bias = torch.nn.Parameter(torch.zeros(VOCAB, device=DEVICE))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (adapt, r"must be a linear layer without bias, got AdaptedLinear\("),
        (add_bias, r"must be a linear layer without bias, got Linear\(.*bias=True"),
        (hook_output, "the head has hooks"),
        (partition, "ZeRO-3 gathers the head for its own forward only"),
    ],
)
def test_a_head_that_must_be_called_is_called_and_the_log_says_why_once(said, change, reason):
    model = make_model()
    dispatch_packed(model, **PLAIN)
    batch = make_batch()
    expected = step(model, batch, fuse=False)["loss"]
    change(model.lm_head)
    for _ in range(2):
        torch.testing.assert_close(step(model, batch, fuse=True)["loss"], expected)
    (line,) = said
    assert re.search(reason, line)


def test_a_model_without_such_a_forward_gets_the_loss_of_its_logits(said):
    model = make_model()
    dispatch_packed(model, **PLAIN)
    batch = make_batch()
    expected = step(model, batch, fuse=False)["loss"]
    del model.forward
    assert torch.equal(step(model, batch, fuse=True)["loss"], expected)
    assert "MambaForCausalLM has no forward that leaves the logits out" in said[0]


# -- on a GPU -------------------------------------------------------------------------------------


@needs_gpu
def test_float64_on_a_gpu_gets_the_loss_of_its_logits(said):
    head = make_model(torch.float64)
    dispatch_packed(head, **PLAIN)
    assert loss._obstacle(head) == "the kernels take no float64"


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("autocast", [False, True])
def test_no_step_waits_for_the_gpu(autocast):
    model = make_model(torch.float32 if autocast else torch.bfloat16)
    dispatch_packed(model)
    batch = make_batch()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        tokens, labels, layout = batch

        def forward():
            with layout.published():
                return packed_loss(model, {"input_ids": tokens}, labels, layout)

        forward().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            forward().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability() != (9, 0), reason="asks something of Hopper"
)
def test_recomputing_on_the_kernels_for_hopper(monkeypatch):
    """Their first run and the one that keeps the states round exponentials differently."""
    # named, they are never switched
    monkeypatch.setattr(mamba, "selective_scan", functools.partial(selective_scan, impl="gluon"))
    batch = make_batch([100, 300, 17])
    results = []
    for recompute in (False, True):
        model = make_model(torch.bfloat16, hidden_size=64, state_size=16)
        dispatch_packed(model, recompute=recompute)
        results.append(step(model, batch, fuse=None))
    kept, recomputed = results
    assert torch.equal(recomputed["loss"], kept["loss"])
    assert_close(recomputed, kept, 1e-2)


@needs_gpu
def test_memory_of_a_step():
    """What a step of long packs holds on to, with everything fused and with nothing."""
    peaks = {}
    for name, options, fuse in (("fused", FUSED, True), ("plain", PLAIN, False)):
        model = make_model(torch.bfloat16, hidden_size=256, vocab_size=20000)
        dispatch_packed(model, **options)
        batch = make_batch([256] * 32)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(model, batch, fuse=fuse)
        peaks[name] = torch.cuda.max_memory_allocated() - before
    assert peaks["fused"] < 0.5 * peaks["plain"], peaks
