"""causal_conv1d without a GPU: against PyTorch's convolution of each document alone."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from xtuner_mamba.ops import causal_conv1d
from xtuner_mamba.ops.causal_conv1d import cpu
from xtuner_mamba.ops.cpu_support import LANES
from xtuner_mamba.testing import (
    assert_as_accurate_as_eager,
    conv_oracle,
    documents,
    eighths,
    in_float64,
    make_conv_inputs,
    outputs_and_grads,
    pooled,
    relative_rms,
    with_document_replaced,
)

# one token, shorter than the filter, exactly the filter, neighbours of one token, ragged
LENGTHS = [[1], [3, 4, 1], [4, 4], [1, 1, 1, 1, 1], [7, 1, 1, 40, 2, 3, 17]]
RESULTS = {"y", "final_states", "dx", "dweight", "dbias", "dinitial_states"}


@pytest.fixture(params=["reference", "cpu", "cpu in small chunks"])
def impl(request, monkeypatch):
    """By name; small chunks cut documents every few tokens, where the real ones need long ones."""
    if request.param == "cpu in small chunks":
        monkeypatch.setattr(cpu, "_CHUNK", 2)
    return request.param.split()[0]


def run(inputs, impl, **options):
    return outputs_and_grads(causal_conv1d, inputs, impl=impl, **{"activation": "silu", **options})


def assert_exact(actual: dict, exact: dict) -> None:
    assert actual.keys() == exact.keys()
    errors = {name: relative_rms(actual[name], exact[name]) for name in exact}
    assert max(errors.values()) < 1e-12, errors


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    width=st.integers(1, 5),
    optional=st.sets(st.sampled_from(["bias", "initial_states"])),
    activation=st.sampled_from([None, "silu"]),
    chunk=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=100)
def test_outputs_and_gradients_are_exact(lengths, width, optional, activation, chunk, seed):
    inputs = make_conv_inputs(lengths, width=width, dtype=torch.float64, seed=seed)
    for name in {"bias", "initial_states"} - optional:
        del inputs[name]
    exact = outputs_and_grads(conv_oracle, inputs, activation=activation)
    assert_exact(run(inputs, "reference", activation=activation), exact)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cpu, "_CHUNK", chunk)
        assert_exact(run(inputs, "cpu", activation=activation), exact)


def test_the_exactness_test_sees_every_result_and_every_boundary():
    inputs = make_conv_inputs([7, 4], dtype=torch.float64)
    exact = outputs_and_grads(conv_oracle, inputs)
    assert exact.keys() == RESULTS
    leaking = dict(inputs, cu_seqlens=torch.tensor([0, 11], dtype=torch.int32))
    leaking["initial_states"] = inputs["initial_states"][:1]
    wrong = outputs_and_grads(conv_oracle, leaking)
    # a bias sees no neighbour, and the states of one document are not those of two
    for name in ("y", "dx", "dweight"):
        assert relative_rms(wrong[name], exact[name]) > 1e-3, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounds_once(impl, dtype):
    draws = [
        make_conv_inputs(lengths, dtype=dtype, seed=seed)
        for lengths in LENGTHS
        for seed in range(3)
    ]
    actual = pooled([run(inputs, impl) for inputs in draws])
    alone = pooled([run_documents_alone(inputs, "reference") for inputs in draws])
    exact = pooled(
        [outputs_and_grads(conv_oracle, in_float64(i), activation="silu") for i in draws]
    )
    for name in RESULTS:
        assert_as_accurate_as_eager(name, actual[name], alone[name], exact[name])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_equals_each_document_alone(impl, lengths):
    inputs = make_conv_inputs(lengths, dtype=torch.float64)
    assert_exact(run(inputs, impl), run_documents_alone(inputs, impl))


def run_documents_alone(inputs, impl):
    alone = documents(inputs)
    lengths = [document["x"].shape[1] for document in alone]
    dy = eighths(inputs["x"].shape, seed=0).split(lengths, dim=1)
    dfinal = eighths(inputs["initial_states"].shape, seed=1).split(1)
    runs = [run(document, impl, incoming=grads) for document, grads in zip(alone, zip(dy, dfinal))]
    joined = {}
    for name in RESULTS:
        parts = [results[name] for results in runs]
        if name in ("dweight", "dbias"):
            joined[name] = torch.stack(parts).sum(0)
        else:
            joined[name] = torch.cat(parts, dim=0 if "states" in name else 1)
    return joined


@pytest.mark.parametrize("value", [torch.nan, 1e4], ids=["NaN", "large"])
@pytest.mark.parametrize("i_seq", range(5))
def test_a_document_leaves_the_bits_of_the_others_alone(impl, i_seq, value):
    inputs = make_conv_inputs([9, 1, 17, 2, 9])
    before = run(inputs, impl, activation=None)
    inputs, others = with_document_replaced(inputs, i_seq, value)
    after = run(inputs, impl, activation=None)
    assert torch.equal(after["y"][:, others], before["y"][:, others])
    assert not torch.equal(after["y"], before["y"])
    states = torch.arange(5) != i_seq
    assert torch.equal(after["final_states"][states], before["final_states"][states])
    assert not torch.equal(after["final_states"], before["final_states"])
    # the silu's slope carries the values into the gradients
    before, after = run(make_conv_inputs([9, 1, 17, 2, 9]), impl), run(inputs, impl)
    assert torch.equal(after["dx"][:, others], before["dx"][:, others])
    assert torch.equal(after["dinitial_states"][states], before["dinitial_states"][states])
    assert not torch.equal(after["dx"], before["dx"])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_stays_in_its_document(impl, value):
    inputs = make_conv_inputs([5, 1, 5])
    dy, dfinal = eighths(inputs["x"].shape), eighths(inputs["initial_states"].shape)
    before = run(inputs, impl, incoming=(dy, dfinal))
    dy[:, 5:6] = value
    after = run(inputs, impl, incoming=(dy, dfinal))
    others = torch.tensor([True] * 5 + [False] + [True] * 5)
    assert torch.equal(after["dx"][:, others], before["dx"][:, others])
    assert not after["dx"][:, ~others].isfinite().any()


@pytest.mark.parametrize("cut", [1, 2, 4, 10])
def test_final_states_carry_on(impl, cut):
    """Two halves, the state handed over, are the whole: values, and gradients through the state."""
    whole = make_conv_inputs([11], dtype=torch.float64)

    def in_halves(x, cu_seqlens, initial_states, return_final_states, **rest):
        y, carried = causal_conv1d(
            x[:, :cut], initial_states=initial_states, return_final_states=True, impl=impl, **rest
        )
        y_2, final = causal_conv1d(
            x[:, cut:], initial_states=carried, return_final_states=True, impl=impl, **rest
        )
        return torch.cat([y, y_2], dim=1), final

    assert_exact(outputs_and_grads(in_halves, whole, activation="silu"), run(whole, impl))


def test_rows_of_a_batch_are_documents(impl):
    inputs = make_conv_inputs([7, 7, 7])
    packed = run(inputs, impl)
    del inputs["cu_seqlens"]
    batch = run(inputs | dict(x=inputs["x"].view(3, 7, -1)), impl)
    for name in RESULTS:
        assert torch.equal(batch[name].view_as(packed[name]), packed[name]), name


def test_slices_of_a_projection_need_no_copy(impl):
    inputs = make_conv_inputs([5, 9], dtype=torch.float64)
    wide = torch.cat([inputs["x"], inputs["x"]], dim=2)
    x, _ = wide.chunk(2, dim=2)
    assert not x.is_contiguous()
    y = causal_conv1d(**inputs | dict(x=x), activation="silu", impl=impl)
    assert relative_rms(y, run(inputs, impl)["y"]) < 1e-12


@pytest.mark.parametrize("dim", [1, LANES, LANES + 2, 3 * LANES])
def test_every_channel_of_every_block(dim):
    inputs = make_conv_inputs([70, 1], dim=dim, dtype=torch.float64)
    assert_exact(run(inputs, "cpu"), run(inputs, "reference"))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(impl, use_reentrant):
    inputs = make_conv_inputs([5, 9])

    def conv(x):
        return causal_conv1d(**inputs | dict(x=x), activation="silu", impl=impl)

    x, x_again = (inputs["x"].clone().requires_grad_() for _ in range(2))
    conv(x).sum().backward()
    checkpoint(conv, x_again, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(x_again.grad, x.grad)


def test_gradient_of_one_output_alone(impl):
    inputs = make_conv_inputs([3, 2], dtype=torch.float64)
    x = inputs["x"].requires_grad_()
    y, states = causal_conv1d(**inputs, impl=impl, return_final_states=True)
    from_y, from_states, from_both = (
        torch.autograd.grad(total, x, retain_graph=True)[0]
        for total in (y.sum(), states.sum(), y.sum() + states.sum())
    )
    assert relative_rms(from_y + from_states, from_both) < 1e-12
    y = causal_conv1d(**inputs, impl=impl)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], from_y)


@pytest.mark.parametrize("return_final_states", [False, True])
def test_two_readers(impl, return_final_states):
    inputs = make_conv_inputs([3, 2], dtype=torch.float64)
    x = inputs["x"].requires_grad_()
    options = dict(activation="silu", impl=impl, return_final_states=return_final_states)
    y, y_fork, final_states = causal_conv1d(**inputs, **options, fork=True)
    expected = run(inputs, impl)
    assert torch.equal(y, expected["y"])
    assert torch.equal(y_fork, expected["y"])
    assert (final_states is not None) is return_final_states
    assert final_states is None or torch.equal(final_states, expected["final_states"])
    dy, dy_fork = eighths(y.shape, seed=0), eighths(y.shape, seed=1)
    (actual,) = torch.autograd.grad([y, y_fork], x, [dy.double(), dy_fork.double()])
    incoming = dy + dy_fork, torch.zeros_like(inputs["initial_states"])
    assert torch.equal(actual, run(inputs, impl, incoming=incoming)["dx"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes_of_results(impl, dtype):
    inputs = make_conv_inputs([3, 2], dtype=dtype)
    inputs["weight"] = inputs["weight"].float()
    results = run(inputs, impl)
    assert results["y"].dtype == results["final_states"].dtype == dtype
    for name, t in inputs.items():
        assert name == "cu_seqlens" or results[f"d{name}"].dtype == t.dtype, name


def test_default_on_the_cpu_is_the_fast_one():
    inputs = make_conv_inputs([5, 9])
    y = causal_conv1d(**inputs, activation="silu")
    assert torch.equal(y, run(inputs, "cpu")["y"])
    # the bits tell them apart
    assert not torch.equal(y, run(inputs, "reference")["y"])


def test_same_bits_twice(impl):
    inputs = make_conv_inputs([9, 1, 17, 2])
    once, twice = run(inputs, impl), run(inputs, impl)
    for name in RESULTS:
        assert torch.equal(once[name], twice[name]), name


def test_autocast_does_not_reach_the_sums(impl):
    inputs = make_conv_inputs([5, 9])
    expected = run(inputs, impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(inputs, impl)
    for name in RESULTS:
        assert torch.equal(actual[name], expected[name]), name


def test_thousands_of_documents(impl):
    inputs = make_conv_inputs([1] * 3000, dim=3, dtype=torch.float64)
    history = torch.cat([inputs["initial_states"], inputs["x"][0, :, :, None]], dim=2)
    y = causal_conv1d(**inputs, impl=impl)[0]
    assert relative_rms(y, (history * inputs["weight"]).sum(2) + inputs["bias"]) < 1e-12


def test_gradients_of_the_definition():
    inputs = make_conv_inputs([2, 5], dim=2, dtype=torch.float64)
    names = [name for name in inputs if name != "cu_seqlens"]
    rest = dict(cu_seqlens=inputs["cu_seqlens"], activation="silu", impl="reference")

    def conv(*tensors):
        return tuple(causal_conv1d(**dict(zip(names, tensors)), **rest, return_final_states=True))

    assert torch.autograd.gradcheck(conv, [inputs[name].requires_grad_() for name in names])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(cu_seqlens=[0, 7]), "cu_seqlens must be a tensor, got [0, 7]; build it with"),
        (dict(x=torch.zeros(7, 5)), "x must have shape (batch, seqlen, dim), none of them 0, got"),
        (dict(x=torch.zeros(1, 0, 5)), "none of them 0, got (1, 0, 5)"),
        (dict(x=torch.zeros(1, 7, 5).int()), "floating-point dtype, got torch.int32"),
        (dict(weight=torch.zeros(5, 4).int()), "weight must have a floating-point dtype, got"),
        (dict(x=torch.zeros(2, 7, 5)), "batch 1 with cu_seqlens, got (2, 7, 5); lay the rows end"),
        (dict(weight=torch.zeros(5, 1, 4)), "shape (dim=5, width >= 1), got (5, 1, 4); take conv"),
        (dict(weight=torch.zeros(4, 4)), "weight must have shape (dim=5, width >= 1), got (4, 4)"),
        (dict(weight=torch.zeros(5, 0)), "weight must have shape (dim=5, width >= 1), got (5, 0)"),
        (dict(bias=torch.zeros(4)), "bias must have shape (5,), got (4,)"),
        (dict(initial_states=torch.zeros(2, 5, 4)), "have shape (2, 5, 3), the width - 1 inputs"),
        (dict(initial_states=torch.zeros(2, 5, 4)), "before each document, got (2, 5, 4)"),
        (dict(cu_seqlens=torch.tensor([0, 3, 8]).int()), "end at the row's 7 tokens, got 8"),
        (dict(activation="gelu"), "activation must be None or 'silu', got 'gelu'"),
        (dict(impl="cuda"), "impl must be None, 'triton', 'cpu' or 'reference', got 'cuda'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_say_what_was_given(changes, message):
    inputs = make_conv_inputs([3, 4])
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_conv1d(**inputs | changes)


def test_another_device_is_refused_with_the_remedy():
    x, weight = torch.zeros(7, 5, device="meta"), torch.zeros(5, 4, device="meta")
    offsets = torch.tensor([0, 7], device="meta")
    with pytest.raises(RuntimeError, match="on the CPU with impl='cpu', got meta; take impl='ref"):
        cpu.causal_conv1d_cpu(x, weight, None, None, offsets, None, return_final_states=False)
