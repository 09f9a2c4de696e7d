"""selective_scan with the linear layer that follows, whose input a GPU makes in the backward."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from xtuner_mamba.ops import backward_follows, selective_scan
from xtuner_mamba.ops.selective_scan import chunks, triton
from xtuner_mamba.testing import (
    in_float64,
    make_scan_inputs,
    outputs_and_grads,
    relative_rms,
    scan_oracle,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# longer than a chunk of the kernels, one token
LENGTHS, DIM, OUT_DIM = [5, 70, 1], 24, 6
LAYER = ("out_proj_weight", "out_proj_bias")


@pytest.fixture(autouse=True)
def _inf_and_nan_are_silent():
    """NumPy, which interprets, would warn of them where a GPU does not."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield


@pytest.fixture(params=["reference", "cpu", "triton"])
def impl(request):
    return request.param


def make_inputs(dtype=torch.float32, without=()):
    draw = torch.Generator().manual_seed(1)
    inputs = make_scan_inputs(LENGTHS, dim=DIM, dstate=4, dtype=dtype)
    inputs["out_proj_weight"] = torch.randn(OUT_DIM, DIM, generator=draw).to(dtype)
    inputs["out_proj_bias"] = torch.randn(OUT_DIM, generator=draw).to(dtype)
    return {name: t for name, t in inputs.items() if name not in without}


def scan_then_layer(scan=scan_oracle, **inputs):
    weight, bias = (inputs.pop(name, None) for name in LAYER)
    y, final_states = scan(**inputs)
    return F.linear(y, weight, bias), final_states


def run(inputs, impl):
    device = DEVICE if impl == "triton" else "cpu"
    inputs = {name: t.to(device) for name, t in inputs.items()}
    return outputs_and_grads(selective_scan, inputs, impl=impl, dt_softplus=True)


@pytest.mark.parametrize("without", [(), ("z",), ("D", "out_proj_bias"), ("z", "D")], ids=str)
def test_is_the_scan_and_a_layer(impl, without):
    inputs = make_inputs(without=without)
    exact = outputs_and_grads(scan_then_layer, in_float64(inputs), dt_softplus=True)
    actual = run(inputs, impl)
    assert {"dout_proj_weight", "dx"} <= actual.keys() == exact.keys()
    for name, value in actual.items():
        assert relative_rms(value.cpu(), exact[name]) < 2e-6, name


def test_long_documents_in_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "_limits", lambda *_: (30, 20))
    inputs = make_inputs()
    exact = outputs_and_grads(scan_then_layer, in_float64(inputs), dt_softplus=True)
    for name, value in run(inputs, "triton").items():
        assert relative_rms(value.cpu(), exact[name]) < 2e-6, name


def leaves_on_device():
    inputs = {name: t.to(DEVICE) for name, t in make_inputs(without="initial_states").items()}
    return {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}


def numbers_kept(run_forward):
    """Count what autograd holds on to, but for the inputs."""
    inputs = leaves_on_device()
    seen, kept = {t.data_ptr() for t in inputs.values()}, []

    def note(t):
        if t.data_ptr() not in seen:
            seen.add(t.data_ptr())
            kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        run_forward(**inputs, dt_softplus=True, impl="triton")
    return sum(kept)


def test_what_the_layer_multiplies_is_not_kept():
    def apart(out_proj_weight, out_proj_bias, **inputs):
        F.linear(selective_scan(**inputs), out_proj_weight, out_proj_bias)

    assert numbers_kept(apart) - numbers_kept(selective_scan) == sum(LENGTHS) * DIM


def spy_on(monkeypatch):
    """Note whether the kernels' forwards and backwards made y."""
    original, made = triton._KERNELS, []

    def forward(*args, **options):
        made.append(("forward", args[-1] is not None))
        return original.forward(*args, **options)

    def backward(*args, **options):
        made.append(("backward", args[-1] is not None))
        return original.backward(*args, **options)

    monkeypatch.setattr(triton, "_KERNELS", original._replace(forward=forward, backward=backward))
    return made


def gradients(outputs, inputs):
    wanted = {name: t for name, t in inputs.items() if t.requires_grad}
    incoming = torch.linspace(-1, 1, outputs.numel(), device=DEVICE).view_as(outputs)
    return dict(zip(wanted, torch.autograd.grad(outputs, wanted.values(), incoming)))


def test_a_recomputation_does_not_make_it_twice(monkeypatch):
    inputs = leaves_on_device()

    def scan():
        return selective_scan(**inputs, dt_softplus=True, impl="triton")

    expected = scan()
    expected_gradients = gradients(expected, inputs)
    made = spy_on(monkeypatch)
    outputs = checkpoint(
        scan,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), backward_follows()),
        determinism_check="none",
    )
    assert torch.equal(outputs, expected)
    for name, gradient in gradients(outputs, inputs).items():
        assert torch.equal(gradient, expected_gradients[name]), name
    assert made == [("forward", True), ("forward", False), ("backward", True)]


def test_a_frozen_layer_needs_no_input(monkeypatch):
    inputs = leaves_on_device()
    for name in LAYER:
        inputs[name] = inputs[name].detach()
    made = spy_on(monkeypatch)
    outputs = selective_scan(**inputs, dt_softplus=True, impl="triton")
    assert "x" in gradients(outputs, inputs)
    assert made == [("forward", True), ("backward", False)]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (dict(out_proj_weight=None), r"must come with out_proj_weight, got shape \(6,\) alone"),
        (dict(out_proj_weight=torch.ones(6, 23)), r"\(out_dim, dim=24\), got \(6, 23\)"),
        (dict(out_proj_bias=torch.ones(5)), r"out_proj_bias must have shape \(6,\), got \(5,\)"),
        (
            dict(out_proj_weight=torch.ones(6, 24).half()),
            r"out_proj_weight must have the dtype of x, torch.float32, got torch.float16",
        ),
        (dict(out_proj_bias=torch.ones(6).double()), "out_proj_bias .* got torch.float64"),
    ],
    ids=str,
)
def test_refusals(replaced, message):
    with pytest.raises(ValueError, match=message):
        selective_scan(**make_inputs() | replaced)
