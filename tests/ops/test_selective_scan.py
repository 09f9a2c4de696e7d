"""selective_scan without a GPU: against a closed form, and documents against themselves alone.

The closed form shares nothing with the code under test: no recurrence, no packing.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from xtuner_mamba.ops import selective_scan
from xtuner_mamba.ops.cpu_support import LANES
from xtuner_mamba.ops.selective_scan import cpu
from xtuner_mamba.testing import (
    assert_as_accurate_as_eager,
    documents,
    eighths,
    in_float64,
    make_scan_inputs,
    outputs_and_grads,
    pooled,
    relative_rms,
    scan_oracle,
    with_document_replaced,
)

DIM, DSTATE = 5, 3
# one token, shorter than the conv's filter, all alike, neighbours of one token, ragged
LENGTHS = [[1], [3, 4, 1], [16, 16], [1, 1, 1, 1, 1], [7, 1, 1, 40, 15, 16, 17]]
RESULTS = {"y", "final_states"} | {
    f"d{name}" for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
}


@pytest.fixture(params=["reference", "cpu", "cpu in small chunks"])
def impl(request, monkeypatch):
    """By name; small chunks cut documents every few tokens, where the real ones need long ones."""
    if request.param == "cpu in small chunks":
        monkeypatch.setattr(cpu, "_CHUNK", 4)
    return request.param.split()[0]


def run(inputs, impl, **options):
    return outputs_and_grads(selective_scan, inputs, impl=impl, **{"dt_softplus": True, **options})


def assert_exact(actual: dict, exact: dict) -> None:
    assert actual.keys() == exact.keys()
    errors = {name: relative_rms(actual[name], exact[name]) for name in exact}
    assert max(errors.values()) < 1e-12, errors


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    optional=st.sets(st.sampled_from(["D", "z", "dt_bias", "initial_states"])),
    dt_softplus=st.booleans(),
    chunk=st.integers(1, 13),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=120)
def test_outputs_and_gradients_are_exact(lengths, optional, dt_softplus, chunk, seed):
    inputs = make_scan_inputs(lengths, dim=DIM, dstate=DSTATE, dtype=torch.float64, seed=seed)
    for name in {"D", "z", "dt_bias", "initial_states"} - optional:
        del inputs[name]
    if not dt_softplus:
        inputs["dt"] = inputs["dt"].abs()
    exact = outputs_and_grads(scan_oracle, inputs, dt_softplus=dt_softplus)
    assert_exact(run(inputs, "reference", dt_softplus=dt_softplus), exact)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cpu, "_CHUNK", chunk)
        assert_exact(run(inputs, "cpu", dt_softplus=dt_softplus), exact)


def test_rates_may_come_as_logarithms(impl):
    def oracle(A, **others):
        return scan_oracle(A=-A.exp(), **others)

    inputs = make_scan_inputs([3, 4], dtype=torch.float64)
    inputs["A"] = inputs["A"].neg().log()
    exact = outputs_and_grads(oracle, inputs, dt_softplus=True)
    assert_exact(run(inputs, impl, A_is_log=True), exact)


def test_the_exactness_test_sees_every_result_and_every_boundary():
    inputs = make_scan_inputs([7, 4], dtype=torch.float64)
    exact = outputs_and_grads(scan_oracle, inputs, dt_softplus=True)
    assert exact.keys() == RESULTS
    # a state that leaks from the first document into the second is no rounding error
    leaking = dict(inputs, cu_seqlens=torch.tensor([0, 11], dtype=torch.int32))
    leaking["initial_states"] = inputs["initial_states"][:1]
    wrong = outputs_and_grads(scan_oracle, leaking, dt_softplus=True)
    # D sees no state, and the states of one document are not those of two
    for name in RESULTS - {"dD", "final_states", "dinitial_states"}:
        assert relative_rms(wrong[name], exact[name]) > 1e-3, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounds_no_worse_than_the_definition(dtype):
    draws = [
        make_scan_inputs(lengths, dim=16, dstate=8, dtype=dtype, seed=seed)
        for lengths in LENGTHS
        for seed in range(3)
    ]
    actual = pooled([run(inputs, "cpu") for inputs in draws])
    eager = pooled([run(inputs, "reference") for inputs in draws])
    exact = pooled(
        [outputs_and_grads(scan_oracle, in_float64(inputs), dt_softplus=True) for inputs in draws]
    )
    for name in RESULTS:
        assert_as_accurate_as_eager(name, actual[name], eager[name], exact[name])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_equals_each_document_alone(impl, lengths):
    inputs = make_scan_inputs(lengths, dtype=torch.float64)
    dy = eighths(inputs["x"].shape, seed=1)
    dfinal = eighths(inputs["initial_states"].shape, seed=2)
    packed = run(inputs, impl, incoming=(dy, dfinal))
    incoming = zip(dy.split(lengths, dim=1), dfinal.split(1))
    alone = [
        run(document, impl, incoming=parts) for document, parts in zip(documents(inputs), incoming)
    ]
    for name in RESULTS:
        parts = [results[name] for results in alone]
        if name in ("dA", "dD", "ddt_bias"):
            expected = sum(parts)
        else:
            expected = torch.cat(parts, dim=0 if "states" in name else 1)
        assert relative_rms(packed[name], expected) < 1e-12, name


@pytest.mark.parametrize("value", [torch.nan, 1e4], ids=["NaN", "large"])
@pytest.mark.parametrize("i_seq", range(5))
def test_a_document_leaves_the_bits_of_the_others_alone(impl, i_seq, value):
    inputs = make_scan_inputs([9, 1, 17, 2, 9])
    before = run(inputs, impl)
    inputs, others = with_document_replaced(inputs, i_seq, value)
    after = run(inputs, impl)
    for name in ("y", "dx", "ddt", "dB", "dC", "dz"):
        assert torch.equal(after[name][:, others], before[name][:, others]), name
        assert not torch.equal(after[name], before[name]), name
    states = torch.arange(5) != i_seq
    for name in ("final_states", "dinitial_states"):
        assert torch.equal(after[name][states], before[name][states]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_nan_stays_one_and_no_step_is_no_nan(impl, dtype):
    inputs = make_scan_inputs([4], dtype=dtype)
    # all bits set: a NaN that no arithmetic makes
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    inputs["A"][0, 0] = torch.tensor(-1, dtype=bits).view(dtype)
    y = selective_scan(**inputs, dt_softplus=True, impl=impl)
    assert y[0, :, 0].isnan().all()
    assert y[0, :, 1:].isfinite().all()
    # softplus of minus infinity is a step of zero
    inputs = make_scan_inputs([4], dtype=dtype)
    inputs["dt"][0, 2] = -torch.inf
    results = run(inputs, impl)
    assert all(result.isfinite().all() for result in results.values())


@pytest.mark.parametrize("cut", [1, 4, 10])
def test_final_states_carry_on(impl, cut):
    """Two halves, the state handed over, are the whole: values, and gradients through the state."""
    (whole,) = documents(make_scan_inputs([11], dtype=torch.float64))
    lengths = torch.tensor([0, cut, 11], dtype=torch.int32)
    head, tail = documents(dict(whole, cu_seqlens=lengths, initial_states=torch.zeros(2, DIM, 3)))

    def in_halves(cu_seqlens, return_final_states, **tensors):
        tokens = ("x", "dt", "B", "C", "z")
        first = {k: t[:, :cut] if k in tokens else t for k, t in tensors.items()}
        second = {k: t[:, cut:] if k in tokens else t for k, t in tensors.items()}
        y, carried = selective_scan(
            **first, impl=impl, cu_seqlens=head["cu_seqlens"], return_final_states=True
        )
        second["initial_states"] = carried
        y_2, final = selective_scan(
            **second, impl=impl, cu_seqlens=tail["cu_seqlens"], return_final_states=True
        )
        return torch.cat([y, y_2], dim=1), final

    assert_exact(outputs_and_grads(in_halves, whole, dt_softplus=True), run(whole, impl))


def test_rows_of_a_batch_are_documents(impl):
    inputs = make_scan_inputs([7, 7, 7])
    packed = run(inputs, impl)
    rows = {
        name: t.view(3, 7, -1) if t.ndim == 3 and t.shape[0] == 1 else t
        for name, t in inputs.items()
        if name != "cu_seqlens"
    }
    batch = run(rows, impl)
    for name in RESULTS:
        assert torch.equal(batch[name].view_as(packed[name]), packed[name]), name


def test_order_of_documents_does_not_matter(impl):
    lengths, order = [9, 1, 17, 2], [2, 0, 3, 1]
    inputs = make_scan_inputs(lengths, dtype=torch.float64)
    tokens = torch.cat([torch.arange(21 + 8).split(lengths)[i] for i in order])
    shuffled = {
        name: t[:, tokens] if t.ndim == 3 and t.shape[0] == 1 else t for name, t in inputs.items()
    }
    shuffled["initial_states"] = inputs["initial_states"][order]
    shuffled["cu_seqlens"] = torch.tensor([0, 17, 26, 28, 29], dtype=torch.int32)
    incoming = eighths(inputs["x"].shape), eighths(inputs["initial_states"].shape)
    before = run(inputs, impl, incoming=incoming)
    after = run(shuffled, impl, incoming=(incoming[0][:, tokens], incoming[1][order]))
    for name in ("y", "dx", "ddt", "dB", "dC", "dz"):
        assert relative_rms(after[name], before[name][:, tokens]) < 1e-12, name
    for name in ("final_states", "dinitial_states"):
        assert relative_rms(after[name], before[name][order]) < 1e-12, name
    for name in ("dA", "dD", "ddt_bias"):
        assert relative_rms(after[name], before[name]) < 1e-12, name


@pytest.mark.parametrize("lengths", [[1] * 3000, [3000]], ids=["one token each", "one document"])
def test_extreme_layouts(lengths):
    inputs = make_scan_inputs(lengths, dim=2, dstate=2, dtype=torch.float64)
    assert_exact(run(inputs, "cpu"), run(inputs, "reference"))


@pytest.mark.parametrize("dim", [1, LANES, LANES + 2, 3 * LANES])
def test_every_channel_of_every_block(dim):
    inputs = make_scan_inputs([70, 1], dim=dim, dtype=torch.float64)
    assert_exact(run(inputs, "cpu"), run(inputs, "reference"))


def test_same_bits_twice(impl):
    inputs = make_scan_inputs([9, 1, 17, 2])
    once, twice = run(inputs, impl), run(inputs, impl)
    for name in RESULTS:
        assert torch.equal(once[name], twice[name]), name


def test_slices_of_a_projection_need_no_copy(impl):
    inputs = make_scan_inputs([5, 9], dtype=torch.float64)
    expected = run(inputs, impl)["y"]
    wide = torch.cat([inputs["x"], inputs["z"], inputs["B"], inputs["C"]], dim=2)
    x, z, B, C = wide.split([DIM, DIM, DSTATE, DSTATE], dim=2)
    y = selective_scan(**inputs | dict(x=x, z=z, B=B, C=C), dt_softplus=True, impl=impl)
    assert not x.is_contiguous()
    assert relative_rms(y, expected) < 1e-12


def test_autocast_does_not_reach_the_state(impl):
    inputs = make_scan_inputs([5, 9])
    expected = run(inputs, impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(inputs, impl)
    for name in RESULTS:
        assert torch.equal(actual[name], expected[name]), name


def test_threads_do_not_share_memory():
    inputs = make_scan_inputs([200] * 8, dim=64)
    expected = run(inputs, "cpu")
    with ThreadPoolExecutor(2) as pool:
        for actual in pool.map(lambda _: run(inputs, "cpu"), range(6)):
            assert all(torch.equal(actual[name], expected[name]) for name in RESULTS)


def test_training_after_evaluation_in_inference_mode(impl):
    inputs = make_scan_inputs([5, 9])
    with torch.inference_mode():
        y = selective_scan(**inputs, dt_softplus=True, impl=impl)
    assert torch.equal(run(inputs, impl)["y"], y)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(impl, use_reentrant):
    inputs = make_scan_inputs([5, 9])

    def scan(x):
        return selective_scan(**inputs | dict(x=x), dt_softplus=True, impl=impl)

    x, x_again = (inputs["x"].clone().requires_grad_() for _ in range(2))
    scan(x).sum().backward()
    checkpoint(scan, x_again, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(x_again.grad, x.grad)


@pytest.mark.parametrize("lengths", [[1024], [128] * 8], ids=["one", "eight"])
def test_saves_a_small_part_of_the_states(lengths):
    dim, dstate = 512, 16
    inputs = make_scan_inputs(lengths, dim=dim, dstate=dstate)
    own = {t.data_ptr() for t in inputs.values()}
    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
    saved = []

    def note(t):
        if t.data_ptr() not in own:
            saved.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        selective_scan(**leaves, dt_softplus=True, impl="cpu")
    states = 1024 * dim * dstate
    assert 0 < sum(saved) < states / 8
    assert max(saved) < states / 50


def test_softplus_keeps_float64_exact_beyond_pytorchs_threshold(impl):
    inputs = make_scan_inputs([3], dtype=torch.float64)
    inputs["dt"] = inputs["dt"].abs() + 20.5
    inputs["dt_bias"] = torch.zeros_like(inputs["dt_bias"])
    inputs["A"] = inputs["A"] / 100
    assert_exact(run(inputs, impl), outputs_and_grads(scan_oracle, inputs, dt_softplus=True))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_of_results(impl, state_dtype):
    inputs = make_scan_inputs([3, 2], dtype=torch.bfloat16)
    inputs["initial_states"] = inputs["initial_states"].to(state_dtype)
    results = run(inputs, impl)
    assert results["y"].dtype == torch.bfloat16
    assert results["final_states"].dtype == torch.float32
    for name, t in inputs.items():
        assert name == "cu_seqlens" or results[f"d{name}"].dtype == t.dtype, name


def test_gradient_of_one_output_alone(impl):
    inputs = make_scan_inputs([3, 2], dtype=torch.float64)
    x = inputs["x"].requires_grad_()
    options = dict(dt_softplus=True, impl=impl)
    y, states = selective_scan(**inputs, **options, return_final_states=True)
    from_y, from_states, from_both = (
        torch.autograd.grad(total, x, retain_graph=True)[0]
        for total in (y.sum(), states.sum(), y.sum() + states.sum())
    )
    assert relative_rms(from_y + from_states, from_both) < 1e-12
    y = selective_scan(**inputs, **options)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], from_y)


def test_gradients_of_the_definition():
    inputs = make_scan_inputs([2, 4], dim=2, dstate=2, dtype=torch.float64)
    names = [name for name in inputs if name != "cu_seqlens"]
    rest = dict(cu_seqlens=inputs["cu_seqlens"], dt_softplus=True, impl="reference")

    def scan(*tensors):
        return tuple(selective_scan(**dict(zip(names, tensors)), **rest, return_final_states=True))

    assert torch.autograd.gradcheck(scan, [inputs[name].requires_grad_() for name in names])


def test_default_on_the_cpu_is_the_fast_one():
    inputs = make_scan_inputs([5, 9])
    y = selective_scan(**inputs, dt_softplus=True)
    assert torch.equal(y, run(inputs, "cpu")["y"])
    # the bits tell them apart
    assert not torch.equal(y, run(inputs, "reference")["y"])


SEVEN = dict(lengths=[3, 4], dim=5, dstate=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(x=torch.zeros(7, 5)), "x must have shape (batch, seqlen, dim), none of them 0, got"),
        (dict(x=torch.zeros(1, 0, 5)), "none of them 0, got (1, 0, 5)"),
        (dict(x=torch.zeros(1, 7, 5).int()), "floating-point dtype, got torch.int32"),
        (
            dict(dt=torch.zeros(1, 7, 5).long()),
            "dt must have a floating-point dtype, got",
        ),
        (
            dict(B=torch.zeros(1, 7, 3, device="meta")),
            "B must be on the device of x, cpu, got",
        ),
        (dict(cu_seqlens=[0, 7]), "cu_seqlens must be a tensor, got [0, 7]; build it with"),
        (dict(A=torch.zeros(4, 3)), "A must have shape (dim=5, dstate >= 1), got (4, 3)"),
        (dict(A=torch.zeros(5)), "A must have shape (dim=5, dstate >= 1), got (5,)"),
        (dict(A=torch.zeros(5, 0)), "A must have shape (dim=5, dstate >= 1), got (5, 0)"),
        (dict(A=torch.zeros(5, 3).double()), "A must be torch.float32 for x of torch.float32, got"),
        (dict(dt=torch.zeros(1, 7, 1)), "dt must have shape (1, 7, 5), got (1, 7, 1)"),
        (dict(B=torch.zeros(1, 7, 4)), "B must have shape (1, 7, 3), got (1, 7, 4)"),
        (dict(C=torch.zeros(1, 6, 3)), "C must have shape (1, 7, 3), got (1, 6, 3)"),
        (dict(D=torch.zeros(5, 1)), "D must have shape (5,), got (5, 1)"),
        (dict(z=torch.zeros(2, 7, 5)), "z must have shape (1, 7, 5), got (2, 7, 5)"),
        (dict(dt_bias=torch.zeros(3)), "dt_bias must have shape (5,), got (3,)"),
        (dict(initial_states=torch.zeros(1, 5, 3)), "shape (2, 5, 3), one state a document, got"),
        (dict(cu_seqlens=torch.tensor([0, 3, 6]).int()), "end at the row's 7 tokens, got 6"),
        (dict(impl="cuda"), "'gluon', 'triton', 'cpu' or 'reference', got 'cuda'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_say_what_was_given(changes, message):
    inputs = make_scan_inputs(**SEVEN)
    with pytest.raises(ValueError, match=re.escape(message)):
        selective_scan(**inputs | changes)


def test_another_device_is_refused_with_the_remedy():
    x, A, B = (torch.zeros(size, device="meta") for size in ((7, 5), (5, 3), (7, 3)))
    args = (x, x, A, B, B, None, None, None, None, torch.tensor([0, 7], device="meta"), True)
    with pytest.raises(RuntimeError, match="on the CPU with impl='cpu', got meta; take impl='ref"):
        cpu.selective_scan_cpu(*args, return_final_states=False)


def test_a_batch_of_packed_rows_is_refused_with_the_remedy():
    inputs = make_scan_inputs(**SEVEN)
    for name in ("x", "dt", "B", "C", "z"):
        inputs[name] = inputs[name].expand(2, -1, -1)
    with pytest.raises(ValueError, match=r"batch 1 with cu_seqlens, got \(2, 7, 5\); lay the rows"):
        selective_scan(**inputs)
