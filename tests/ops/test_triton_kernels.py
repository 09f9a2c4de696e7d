"""The Triton kernels of both ops: on a GPU, or in Triton's interpreter where there is none.

The interpreter truncates where bfloat16 is stored, and is slow: bfloat16 and long rows are for
the GPU. Oracles run on the CPU in float64.
"""

import functools
import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from xtuner_mamba.layout import PackedLayout, check_cu_seqlens
from xtuner_mamba.ops import causal_conv1d, selective_scan
from xtuner_mamba.ops.causal_conv1d import triton_bwd as conv_bwd
from xtuner_mamba.ops.causal_conv1d.triton_fwd import GROUP, tokens_of_a_program
from xtuner_mamba.ops.parts import split_parts
from xtuner_mamba.ops.selective_scan import chunks, triton_bwd
from xtuner_mamba.ops.selective_scan.triton_fwd import CHUNK
from xtuner_mamba.testing import (
    assert_errs_like_eager,
    conv_oracle,
    documents,
    eighths,
    in_float64,
    lognormal_lengths,
    make_conv_inputs,
    make_scan_inputs,
    outputs_and_grads,
    relative_rms,
    scan_oracle,
    with_document_replaced,
)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU
needs_gpu = pytest.mark.skipif(not GPU, reason="asks something of a GPU, or too slow without one")

OPS = {"scan": selective_scan, "conv": causal_conv1d}
OPTIONS = {"scan": {"dt_softplus": True}, "conv": {"activation": "silu"}}
ORACLES = {"scan": scan_oracle, "conv": conv_oracle}
# a GPU compiles the scan for every number of states, the interpreter walks through each of them
DSTATE = 16 if GPU else 4
make_scan = functools.partial(make_scan_inputs, dstate=DSTATE)
MAKERS = {"scan": make_scan, "conv": make_conv_inputs}
OF_TOKENS = {"scan": ["y", "dx", "ddt", "dB", "dC", "dz"], "conv": ["y", "dx"]}
OF_STATES = ["final_states", "dinitial_states"]
RESULTS = ["y", "final_states"]


def run(op, inputs, *, impl="triton", **options):
    """Run forward and backward where ``impl`` belongs; results on the CPU."""
    device = DEVICE if impl == "triton" else torch.device("cpu")
    inputs = {name: t.to(device) for name, t in inputs.items()}
    results = outputs_and_grads(OPS[op], inputs, impl=impl, **OPTIONS[op] | options)
    return {name: t.cpu() for name, t in results.items()}


def assert_accurate(op, draws, *, select=lambda inputs, results: results, **options):
    kernels = [select(inputs, run(op, inputs, **options)) for inputs in draws]
    eager = [select(inputs, run(op, inputs, impl="reference", **options)) for inputs in draws]
    exact = [
        select(inputs, outputs_and_grads(ORACLES[op], in_float64(inputs), **OPTIONS[op] | options))
        for inputs in draws
    ]
    # in float32 the special-function unit errs by 2 units in the last place, a CPU's exp by half
    assert_errs_like_eager(kernels, eager, exact, factor=3 if GPU else 2)


# a document shorter than a filter, one longer than a group of the kernels
LENGTHS = [5, 1, 9, 2]


def make_small(op, **options):
    return MAKERS[op](LENGTHS, dim=24, **options)


@functools.cache
def small_results(op):
    return run(op, make_small(op))


@pytest.fixture(autouse=True)
def _inf_and_nan_are_silent():
    """NumPy, which interprets, would warn of them where a GPU does not."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield


@pytest.fixture(params=["scan", "conv"])
def op(request):
    return request.param


# one token; neighbours of one; the kernels' chunks and the groups inside them, one less, one more
SCAN_DRAWS = [
    dict(lengths=[1], dim=120, dstate=16),
    dict(lengths=[3, 4, 1], dim=136, dstate=16),
    dict(lengths=[1, 1, 1, 1, 1], dim=120, dstate=16),
    dict(lengths=[5, CHUNK + 1], dim=120, dstate=16),
    dict(lengths=[2 * CHUNK], dim=128, dstate=16),
    dict(lengths=[9, 4], dim=120, dstate=5),
    dict(lengths=[9, 4], dim=120, dstate=24),
    dict(lengths=[3], dim=120, dstate=64),
]
# of a program, forward and backward
EDGE = tokens_of_a_program(1)
assert conv_bwd.tokens_of_a_program(1, 1) == EDGE
CONV_DRAWS = [
    dict(lengths=[1], dim=100, width=4),
    dict(lengths=[3, 4, 1], dim=520, width=4),
    dict(lengths=[1, 1, 1, 1, 1], dim=100, width=3),
    dict(lengths=[EDGE - 1, EDGE + 1, EDGE], dim=100, width=4),
    # groups that start at the last token whose taps still reach the document before, and after it
    dict(lengths=[GROUP - 2, 2 * GROUP - 1, GROUP], dim=100, width=4),
    dict(lengths=[2 * EDGE + 3], dim=100, width=2),
    dict(lengths=[7, 1, 9], dim=100, width=8),
]
DRAWS = {"scan": SCAN_DRAWS, "conv": CONV_DRAWS}
LONG_DRAWS = {
    "scan": [
        dict(lengths=[1, 5, 70, 64, 257, 3], dim=200, dstate=16),
        dict(lengths=[130, 2, 31], dim=96, dstate=33),
    ],
    "conv": [dict(lengths=[1, 5, 70, 2, 3, 200, 600], dim=600, width=4)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounds_no_worse_than_eager(op, dtype):
    shapes = DRAWS[op] + LONG_DRAWS[op]
    if not GPU:
        # half precision differs in its loads and stores alone
        shapes = DRAWS[op] if dtype == torch.float32 else DRAWS[op][1::2]
    draws = [MAKERS[op](**shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    assert_accurate(op, draws)


def test_the_tolerance_sees_a_sum_in_half_precision(op, monkeypatch):
    original = OPS[op]

    def sums_in_half(impl, **tensors):
        y, states = original(impl="reference", **tensors)
        # what a partial sum of 8 would have done to the result
        return (y + 8) - 8 if impl == "triton" else y, states

    monkeypatch.setitem(OPS, op, sums_in_half)
    draws = [MAKERS[op]([3, 9], dim=24, dtype=torch.float16, seed=seed) for seed in range(4)]
    with pytest.raises(AssertionError, match=r"y: rms error"):
        assert_accurate(op, draws)


@pytest.mark.parametrize("absent", ["D", "z", "dt_bias", "initial_states", "dt_softplus", "all"])
def test_scan_without_what_is_optional(absent):
    draws = [make_scan([2, 5], dim=64, seed=seed) for seed in range(2)]
    names = ["D", "z", "dt_bias", "initial_states"] if absent == "all" else [absent]
    softplus = absent not in ("dt_softplus", "all")
    for inputs in draws:
        for name in names:
            inputs.pop(name, None)
        if not softplus:
            # without a softplus the caller sees to it that step sizes are positive
            inputs |= {name: inputs[name].abs() for name in ("dt", "dt_bias") if name in inputs}
    assert_accurate("scan", draws, dt_softplus=softplus)


def test_rates_may_come_as_logarithms(monkeypatch):
    def oracle(A, A_is_log, **others):
        return scan_oracle(A=-A.exp(), **others)

    monkeypatch.setitem(ORACLES, "scan", oracle)
    draws = [make_scan([2, 5], dim=72, seed=seed) for seed in range(2)]
    for inputs in draws:
        inputs["A"] = inputs["A"].neg().log()
    assert_accurate("scan", draws, A_is_log=True)


def test_a_result_may_be_written_into(op):
    """As one may not into a view that an autograd function returns."""
    inputs = {name: t.to(DEVICE) for name, t in make_small(op).items()}
    inputs["x"].requires_grad_()
    y = OPS[op](**inputs, impl="triton", **OPTIONS[op])
    dy = eighths(y.shape).to(y)
    (expected,) = torch.autograd.grad(y, inputs["x"], dy, retain_graph=True)
    (doubled,) = torch.autograd.grad(y.mul_(2), inputs["x"], dy)
    assert torch.equal(doubled, 2 * expected)


def test_gradient_of_one_input_alone(op):
    incoming = [eighths(small_results(op)[name].shape, i) for i, name in enumerate(RESULTS)]
    inputs = {name: t.to(DEVICE) for name, t in make_small(op).items()}
    for name in inputs.keys() - {"cu_seqlens"}:
        alone = inputs | {name: inputs[name].detach().clone().requires_grad_()}
        outputs = OPS[op](**alone, impl="triton", **OPTIONS[op], return_final_states=True)
        gradients = [t.to(DEVICE) for t in incoming]
        (gradient,) = torch.autograd.grad(outputs, alone[name], gradients, allow_unused=False)
        # without the others it is another kernel, in which a GPU may contract other products
        error = relative_rms(gradient.cpu(), small_results(op)[f"d{name}"])
        assert error < 1e-6 if GPU else error == 0, name


@pytest.mark.parametrize("absent", ["bias", "initial_states", "activation"])
def test_conv_without_what_is_optional(absent):
    draws = [make_conv_inputs([2, 17], dim=64, seed=seed) for seed in range(2)]
    for inputs in draws:
        inputs.pop(absent, None)
    activation = None if absent == "activation" else "silu"
    assert_accurate("conv", draws, activation=activation)


@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 30.0, 80.0])
@pytest.mark.parametrize("right", [True, False], ids=["positive", "negative"])
def test_step_sizes_of_every_magnitude(magnitude, right):
    """Softplus far to the left is exp, far to the right its argument.

    One sign at a time, or the errors of small step sizes would hide behind large ones.
    """
    draws = [make_scan([4], dim=128, seed=seed) for seed in range(3)]
    for inputs in draws:
        inputs["dt"] = inputs["dt"].sign() * magnitude
        inputs["A"] = inputs["A"] / 100
        del inputs["dt_bias"]

    def select(inputs, results):
        side = (inputs["dt"] > 0)[0] == right
        return {name: results[name][0][side] for name in ("y", "dx", "ddt")}

    assert_accurate("scan", draws, select=select)


@pytest.fixture
def cut(monkeypatch):
    """Documents of more than 5 tokens in chunks of 3, as if they were far too long."""
    monkeypatch.setattr(chunks, "_limits", lambda *_: (5, 3))


@pytest.mark.parametrize("absent", [None, "z", "dt_bias", "initial_states"])
def test_long_documents_run_in_chunks(cut, absent):
    draws = [make_scan([5, 6, 1, 11], dim=40, seed=seed) for seed in range(3)]
    for inputs in draws:
        inputs.pop(absent, None)
        layout = chunks.schedule_documents(inputs["cu_seqlens"], dim=40).chunks
        assert layout.cu_seqlens.tolist() == [0, 5, 8, 11, 12, 15, 18, 21, 23]
        assert layout.cu_chunks.tolist() == [0, 1, 3, 4, 8]
        assert layout.seqs.tolist() == [0, 1, 1, 2, 3, 3, 3, 3]
    assert_accurate("scan", draws)


def test_documents_in_chunks_leave_the_bits_of_the_others_alone(cut):
    inputs = make_scan([11, 6, 7], dim=24)
    before = run("scan", inputs)
    inputs, others = with_document_replaced(inputs, 1, torch.nan)
    after = run("scan", inputs)
    for name in OF_TOKENS["scan"]:
        assert torch.equal(after[name][:, others], before[name][:, others]), name
        assert after[name][:, ~others].isnan().all(), name


def test_chunks_forget_nothing(cut):
    """The first token of a document in chunks reaches its last."""
    inputs = make_scan([4, 13], dim=24)
    inputs["A"] = inputs["A"] / 100
    before = run("scan", inputs)["y"]
    inputs["x"][:, 4] += 1
    changed = (run("scan", inputs)["y"] != before).any(2)[0]
    assert changed.tolist() == [False] * 4 + [True] * 13


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    longest=st.integers(1, 40),
    size=st.integers(1, 40),
)
def test_chunks_cover_documents(lengths, longest, size):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(chunks, "_limits", lambda *_: (longest, size))
        cu_seqlens = PackedLayout.from_lengths(lengths).cu_seqlens
        cuts, order, layout, *_ = chunks.schedule_documents(cu_seqlens, dim=8)
    in_order = cuts.diff()[order].tolist()
    assert in_order == sorted(cuts.diff().tolist(), reverse=True)
    assert sorted(order.tolist()) == list(range(len(order)))
    if layout is None:
        assert cuts is cu_seqlens
        assert max(lengths) <= max(longest, size)
        return
    parts = layout.cu_seqlens.diff()
    assert layout.cu_seqlens[layout.cu_chunks.long()].tolist() == cu_seqlens.tolist()
    assert torch.bincount(layout.seqs).tolist() == layout.cu_chunks.diff().tolist()
    for i_seq, length in enumerate(lengths):
        expected = [length] if length <= longest else [size] * (length // size)
        if length > longest and length % size:
            expected.append(length % size)
        assert parts[layout.seqs == i_seq].tolist() == expected


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    mean=st.integers(0, 50),
    longest=st.integers(1, 60),
    look_ahead=st.integers(1, 16),
    cut=st.booleans(),
)
def test_runs_cover_parts(lengths, mean, longest, look_ahead, cut):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(chunks, "_MIN_MEAN", mean)
        monkeypatch.setattr(chunks, "_MAX_RUN", longest)
        monkeypatch.setattr(chunks, "_LOOK_AHEAD", look_ahead)
        if cut:
            monkeypatch.setattr(chunks, "_limits", lambda *_: (5, 3))
        cu_seqlens = PackedLayout.from_lengths(lengths).cu_seqlens
        cuts, order, _, runs, _ = chunks.schedule_documents(cu_seqlens, dim=8)
    parts = cuts.diff().tolist()
    if runs.cu_parts is None:
        assert runs[:2] == (cuts, order)
        assert runs.resets is None
        pairs = [sum(pair) for pair in pairwise(parts)]
        assert sum(parts) >= mean * len(parts) or min(pairs, default=61) > longest
        return
    assert sum(parts) < mean * len(parts)
    assert cuts[runs.cu_parts.long()].tolist() == runs.cu_seqlens.tolist()
    in_runs = runs.cu_seqlens.diff()
    assert in_runs[runs.order].tolist() == sorted(in_runs.tolist(), reverse=True)
    alone = runs.cu_parts.diff() == 1
    assert (in_runs[~alone] <= longest).all()
    # none could take the first part of the next
    assert all(in_runs[i] + parts[first] > longest for i, first in enumerate(runs.cu_parts[1:-1]))
    inside = set(cuts.tolist()) - set(runs.cu_seqlens.tolist())
    for t, bits in enumerate(runs.resets.tolist()):
        assert bits == sum(1 << i for i in range(look_ahead) if t + i in inside)


def test_runs_are_as_documented(monkeypatch):
    monkeypatch.setattr(chunks, "_MAX_RUN", 4)
    cu_seqlens = PackedLayout.from_lengths([2, 1, 3, 4]).cu_seqlens
    runs = chunks.schedule_documents(cu_seqlens, dim=8).runs
    assert runs.cu_seqlens.tolist() == [0, 3, 6, 10]
    assert runs.order.tolist() == [2, 0, 1]
    assert runs.cu_parts.tolist() == [0, 2, 3, 4]
    assert runs.resets.tolist() == [4, 2, 1, 0, 0, 0, 0, 0, 0, 0]


def test_only_documents_that_keep_others_waiting_are_cut():
    packed = PackedLayout.from_lengths([2048] * 32).cu_seqlens
    assert chunks.schedule_documents(packed, dim=4096).chunks is None
    alone = PackedLayout.from_lengths([65_536]).cu_seqlens
    assert len(chunks.schedule_documents(alone, dim=4096).chunks.seqs) == 99
    # found once, and again after a change
    once, again = (chunks.schedule_documents(alone, dim=4096).order for _ in range(2))
    assert once is again
    # two launches more would cost as much as they save
    for length, is_cut in ((2048, False), (2049, True)):
        alone[1] = length
        check_cu_seqlens(alone, length)
        assert (chunks.schedule_documents(alone, dim=4096).chunks is not None) == is_cut


@pytest.mark.parametrize("dim", [768, 1536, 2560, 4096, 5120, 8192])
@pytest.mark.parametrize("total", [16_384, 65_536, 262_144, 1_000_000])
def test_chunks_of_one_document_fill_the_waves_of_every_kernel(total, dim):
    cuts = chunks.schedule_documents(PackedLayout.from_lengths([total]).cu_seqlens, dim).cu_seqlens
    size = cuts.diff().max().item()
    assert 128 <= size <= 1024
    # channels of a program, and programs at once: forward, backward, and first pass in Triton
    for block_d, num_programs in ((256, 3 * 132), (128, 2 * 132), (256, 4 * 132)):
        at_once = block_d * num_programs
        waves = math.ceil((len(cuts) - 1) * dim / at_once)
        assert total * dim > 0.98 * waves * size * at_once or size == 128


@pytest.mark.parametrize(
    ("lengths", "dim", "is_uneven"),
    [
        # all tokens are a GPU's share of 2,648, 1,324 and 993
        (lognormal_lengths(65_536), 4096, False),
        (lognormal_lengths(32_768), 4096, True),
        (lognormal_lengths(65_536), 1536, True),
        ([300] * 100, 4096, False),
    ],
)
def test_a_schedule_says_if_the_longest_outlasts_the_others(lengths, dim, is_uneven):
    cu_seqlens = PackedLayout.from_lengths(lengths).cu_seqlens
    assert chunks.schedule_documents(cu_seqlens, dim).is_uneven == is_uneven


def test_boundaries_must_not_change_before_the_backward():
    inputs = {name: t.to(DEVICE) for name, t in make_scan([3, 5], dim=24).items()}
    inputs["x"].requires_grad_()
    y = selective_scan(**inputs, impl="triton")
    inputs["cu_seqlens"][1] = 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_packed_equals_each_document_alone(op):
    inputs = make_small(op)
    dy = eighths(inputs["x"].shape, seed=1)
    dfinal = eighths(inputs["initial_states"].shape, seed=2)
    packed = run(op, inputs, incoming=(dy, dfinal))
    incoming = zip(dy.split(LENGTHS, dim=1), dfinal.split(1))
    alone = [run(op, document, incoming=g) for document, g in zip(documents(inputs), incoming)]
    for name in OF_TOKENS[op] + OF_STATES:
        dim = 0 if name in OF_STATES else 1
        expected = torch.cat([results[name] for results in alone], dim=dim)
        assert relative_rms(packed[name], expected) < 3e-7, name
    for name in packed.keys() - OF_TOKENS[op] - set(OF_STATES):
        expected = sum(results[name].double() for results in alone)
        assert relative_rms(packed[name], expected) < 1e-6, name


def test_a_leak_is_no_rounding_error(op):
    """The tolerances above see a boundary that is missing."""
    inputs = MAKERS[op]([7, 9], dim=24)
    leaking = dict(inputs, cu_seqlens=PackedLayout.from_lengths([16]).cu_seqlens)
    leaking["initial_states"] = inputs["initial_states"][:1]
    right, wrong = run(op, inputs), run(op, leaking)
    for name in OF_TOKENS[op]:
        assert relative_rms(wrong[name], right[name]) > 1e-3, name


@pytest.mark.parametrize(("i_seq", "value"), [(0, torch.nan), (1, torch.nan), (2, 1e4)])
def test_a_document_leaves_the_bits_of_the_others_alone(op, i_seq, value, monkeypatch):
    before = small_results(op)
    # all documents in one program, as thousands of them would be
    monkeypatch.setattr(triton_bwd, "_MAX_PROGRAMS", 1)
    inputs, others = with_document_replaced(make_small(op), i_seq, value)
    after = run(op, inputs)
    states = torch.arange(4) != i_seq
    for name in OF_TOKENS[op]:
        assert torch.equal(after[name][:, others], before[name][:, others]), name
        assert not torch.equal(after[name], before[name]), name
    for name in OF_STATES:
        assert torch.equal(after[name][states], before[name][states]), name


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_stays_in_its_document(op, value):
    inputs = MAKERS[op]([5, 1, 5], dim=24)
    dy, dfinal = eighths(inputs["x"].shape), eighths(inputs["initial_states"].shape)
    before = run(op, inputs, incoming=(dy, dfinal))
    dy[:, 5:6], dfinal[1] = value, value
    after = run(op, inputs, incoming=(dy, dfinal))
    others = torch.tensor([True] * 5 + [False] + [True] * 5)
    for name in OF_TOKENS[op]:
        assert torch.equal(after[name][:, others], before[name][:, others]), name
    assert not after["dx"][:, ~others].isfinite().any()


def test_documents_that_share_a_program_do_not_meet(monkeypatch):
    apart = small_results("scan")
    monkeypatch.setattr(triton_bwd, "_MAX_PROGRAMS", 1)
    together = run("scan", make_small("scan"))
    for name in OF_TOKENS["scan"] + OF_STATES:
        assert torch.equal(together[name], apart[name]), name
    for name in ("dA", "dD", "ddt_bias"):
        assert relative_rms(together[name], apart[name]) < 3e-7, name
    # summed in another order: the documents did share a program
    assert any(not torch.equal(together[name], apart[name]) for name in ("dA", "dD", "ddt_bias"))


def test_offsets_that_change_in_place_are_read_anew(op):
    """What is made of offsets is kept with them."""
    cu_seqlens = PackedLayout.from_lengths([5, 9]).to(DEVICE).cu_seqlens
    inputs = {n: t.to(DEVICE) for n, t in MAKERS[op]([5, 9], dim=24).items()}
    inputs.pop("initial_states")
    inputs |= OPTIONS[op] | {"cu_seqlens": cu_seqlens}
    first = OPS[op](**inputs, impl="triton")
    cu_seqlens[1] = 2
    fresh = PackedLayout.from_lengths([2, 12]).to(DEVICE).cu_seqlens
    expected = OPS[op](**inputs | {"cu_seqlens": fresh}, impl="triton")
    assert torch.equal(OPS[op](**inputs, impl="triton"), expected)
    assert not torch.equal(first, expected)


def test_same_bits_twice(op):
    once, twice = small_results(op), run(op, make_small(op))
    for name in once:
        assert torch.equal(once[name], twice[name]), name


@pytest.mark.parametrize("cut", [1, 10])
def test_final_states_carry_on(op, cut):
    """Two halves, the state handed over, are the whole: values, and gradients through the state."""
    whole = MAKERS[op]([14], dim=24)
    options = OPTIONS[op] | {"impl": "triton", "return_final_states": True}

    def in_halves(cu_seqlens, initial_states, return_final_states, **tensors):
        tokens = {name: t for name, t in tensors.items() if t.ndim == 3}
        rest = {name: t for name, t in tensors.items() if t.ndim < 3}
        head = {name: t[:, :cut] for name, t in tokens.items()}
        tail = {name: t[:, cut:] for name, t in tokens.items()}
        y_1, carried = OPS[op](**head, **rest, initial_states=initial_states, **options)
        y_2, final = OPS[op](**tail, **rest, initial_states=carried, **options)
        return torch.cat([y_1, y_2], dim=1), final

    on_device = {name: t.to(DEVICE) for name, t in whole.items()}
    halves = outputs_and_grads(in_halves, on_device)
    for name, expected in run(op, whole).items():
        assert relative_rms(halves[name].cpu(), expected) < 1e-6, name


def test_scan_of_slices_of_a_projection():
    inputs = make_scan([5, 9], dim=24)
    tokens = ["x", "z", "B", "C", "dt"]
    wide = torch.cat([inputs[name] for name in tokens], dim=2).to(DEVICE).requires_grad_()
    slices = dict(zip(tokens, wide.split([inputs[name].shape[2] for name in tokens], dim=2)))
    rest = {name: t.to(DEVICE) for name, t in inputs.items() if name not in tokens}
    y = selective_scan(**slices, **rest, dt_softplus=True, impl="triton")
    # a gradient that is itself a slice
    dy = eighths(inputs["x"].shape).to(DEVICE).repeat(1, 1, 2)[..., :24]
    (dwide,) = torch.autograd.grad(y, wide, dy)

    expected = run("scan", inputs, incoming=(dy, torch.zeros(2, 24, DSTATE)))
    assert not slices["x"].is_contiguous()
    assert not dy.is_contiguous()
    assert torch.equal(y.cpu(), expected["y"])
    gradient = torch.cat([expected[f"d{name}"] for name in tokens], dim=2)
    # other strides are another kernel, which may contract other products
    assert relative_rms(dwide.cpu(), gradient) < 1e-6


def test_conv_of_slices_and_transposed_rows():
    inputs = make_conv_inputs([5, 9], dim=24)
    expected = run("conv", inputs)["y"]
    inputs = {name: t.to(DEVICE) for name, t in inputs.items()}
    wide = torch.cat([inputs["x"], inputs["x"]], dim=2)
    for x in (wide[..., :24], inputs["x"].mT.contiguous().mT):
        assert not x.is_contiguous()
        y = causal_conv1d(**inputs | {"x": x}, activation="silu", impl="triton")
        assert torch.equal(y.cpu(), expected)


def test_vectors_may_be_slices(op):
    inputs = MAKERS[op]([5, 9], dim=24)
    incoming = eighths(inputs["x"].shape), torch.zeros_like(inputs["initial_states"])
    expected = run(op, inputs, incoming=incoming)
    vectors = [name for name, tensor in inputs.items() if tensor.shape == (24,)]
    assert vectors
    for name in vectors:
        inputs[name] = torch.stack([inputs[name], torch.full((24,), torch.nan)], dim=1)[:, 0]
        assert not inputs[name].is_contiguous()
    actual = run(op, inputs, incoming=incoming)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


HALF = {"scan": ("z", "dz_out"), "conv": ("x", "dx_out")}


@pytest.mark.parametrize("i_half", [0, 1])
def test_a_gradient_is_written_where_it_is_told(op, i_half):
    inputs = MAKERS[op]([5, 9], dim=24)
    name, out = HALF[op]
    dy = eighths(inputs["x"].shape)
    expected = run(op, inputs, incoming=(dy, torch.zeros_like(inputs["initial_states"])))
    leaves = {k: t.to(DEVICE) for k, t in inputs.items()}
    whole = torch.cat(2 * [leaves[name]], dim=2).requires_grad_()
    halves, gradients = split_parts(whole, [24, 24])
    leaves |= {name: halves[i_half], out: gradients[i_half]}
    y = OPS[op](**leaves, **OPTIONS[op], impl="triton")
    (gradient,) = torch.autograd.grad(y, halves[i_half], dy.to(DEVICE))
    # other strides are another kernel, which may contract other products
    assert relative_rms(gradient.cpu(), expected[f"d{name}"]) < 1e-6
    assert gradient.stride(1) == 2 * 24
    assert gradient.storage_offset() == 24 * i_half


def gradients_of_halves(split):
    """Run the conv on one half and the scan of its result, gated by the other, as a mixer does."""
    scan = {k: t.to(DEVICE) for k, t in make_scan(LENGTHS, dim=24).items()}
    conv = {k: t.to(DEVICE) for k, t in make_conv_inputs(LENGTHS, dim=24).items()}
    whole = torch.cat([scan["x"], scan["z"]], dim=2).requires_grad_()
    (x, z), (dx_out, dz_out) = split(whole, [24, 24])
    x = causal_conv1d(**conv | {"x": x}, activation="silu", dx_out=dx_out, impl="triton")
    y = selective_scan(**scan | {"x": x, "z": z}, dt_softplus=True, dz_out=dz_out, impl="triton")
    return torch.autograd.grad(y, [whole, x, z], eighths(y.shape).to(DEVICE))


@pytest.mark.parametrize("is_cut", [False, True])
def test_gradients_of_two_halves_are_written_side_by_side(is_cut, request):
    if is_cut:
        request.getfixturevalue("cut")
    apart = gradients_of_halves(lambda *args: (torch.split(*args, dim=2), (None, None)))
    together = gradients_of_halves(split_parts)
    assert all(map(torch.equal, together, apart))
    dwhole, _, dz = together
    assert dz.data_ptr() == dwhole.data_ptr() + 24 * dwhole.element_size()


@pytest.mark.parametrize("read", ["both", "the first", "the second"])
def test_gradients_of_two_readers_are_added(read):
    inputs = make_small("conv")
    shape, dfinal = inputs["x"].shape, eighths(inputs["initial_states"].shape, seed=2)
    incoming = [eighths(shape, seed=seed).to(DEVICE) for seed in range(2)]
    # a slice, with a stride of its own
    incoming[1] = incoming[1].repeat(1, 1, 2)[..., : shape[2]]
    leaves = {name: t.to(DEVICE) for name, t in inputs.items()}
    wanted = {name: t.requires_grad_() for name, t in leaves.items() if t.is_floating_point()}
    options = dict(OPTIONS["conv"], return_final_states=True, impl="triton")
    y, y_fork, final_states = causal_conv1d(**leaves, **options, fork=True)
    assert y.data_ptr() == y_fork.data_ptr()
    readers = {"both": slice(2), "the first": slice(1), "the second": slice(1, 2)}[read]
    outputs = [*(y, y_fork)[readers], final_states]
    grads = [*incoming[readers], dfinal.to(DEVICE)]
    actual = torch.autograd.grad(outputs, list(wanted.values()), grads)
    expected = run("conv", inputs, incoming=(sum(incoming[readers]), dfinal))
    for name, gradient in zip(wanted, actual):
        assert torch.equal(gradient.cpu(), expected[f"d{name}"]), name


def test_the_sum_of_two_gradients_is_not_rounded():
    x = torch.ones(1, 1, 1, dtype=torch.float16, device=DEVICE)
    weight = torch.ones(1, 1, device=DEVICE, requires_grad=True)
    y, y_fork, _ = causal_conv1d(x, weight, fork=True, impl="triton")
    small = 2.0**-12
    assert 1 + torch.full_like(y, small) == 1
    grads = torch.ones_like(y), torch.full_like(y, small)
    (dweight,) = torch.autograd.grad([y, y_fork], weight, grads)
    assert dweight == 1 + small


def test_neither_reader_changes_what_the_other_reads():
    inputs = {name: t.to(DEVICE) for name, t in make_small("conv").items()}
    y, y_fork, _ = causal_conv1d(
        **inputs | {"x": inputs["x"].requires_grad_()}, fork=True, impl="triton"
    )
    with pytest.raises(RuntimeError, match="is a view and"):
        y_fork.mul_(2)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="is a view and its base"):
        y_fork.sum().backward()


def test_rows_of_a_batch_are_documents(op):
    inputs = MAKERS[op]([7, 7], dim=24)
    packed = run(op, inputs)
    rows = {
        name: t.view(2, 7, -1) if t.ndim == 3 and t.shape[0] == 1 else t
        for name, t in inputs.items()
        if name != "cu_seqlens"
    }
    batch = run(op, rows)
    for name in packed:
        assert torch.equal(batch[name].view_as(packed[name]), packed[name]), name


def test_gradients_that_nobody_wants_cost_the_others_no_bit(op):
    """As with frozen weights under LoRA: the kernels then leave part of their work out."""
    inputs = MAKERS[op]([9, 4], dim=24)
    dy = eighths(inputs["x"].shape)
    full = run(op, inputs, incoming=(dy, torch.zeros_like(inputs["initial_states"])))
    leaves = {name: t.to(DEVICE) for name, t in inputs.items()}
    leaves["x"] = leaves["x"].clone().requires_grad_()
    y = OPS[op](**leaves, **OPTIONS[op], impl="triton")
    (dx,) = torch.autograd.grad(y, leaves["x"], dy.to(y))
    assert torch.equal(dx.cpu(), full["dx"])


def test_gradient_through_the_final_states_alone(op):
    inputs = MAKERS[op]([5, 2], dim=24)
    dfinal = eighths(inputs["initial_states"].shape)
    both = run(op, inputs, incoming=(torch.zeros_like(inputs["x"]), dfinal))
    leaves = {name: t.to(DEVICE) for name, t in inputs.items()}
    leaves["x"] = leaves["x"].clone().requires_grad_()
    _, states = OPS[op](**leaves, **OPTIONS[op], impl="triton", return_final_states=True)
    (dx,) = torch.autograd.grad(states, leaves["x"], dfinal.to(states))
    assert torch.equal(dx.cpu(), both["dx"])
    assert dx.any()


def test_saves_one_state_a_chunk():
    inputs = make_scan([CHUNK + 6, CHUNK - 6], dim=24)
    inputs = {name: t.to(DEVICE) for name, t in inputs.items() if name != "initial_states"}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        selective_scan(**inputs | {"x": inputs["x"].requires_grad_()}, impl="triton")
    assert [t.shape for t in saved if t.ndim == 3] == [(2, DSTATE, 24)]


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes_of_results(op, state_dtype):
    inputs = MAKERS[op]([3, 2], dtype=torch.float16)
    inputs["initial_states"] = inputs["initial_states"].to(state_dtype)
    results = run(op, inputs)
    assert results["y"].dtype == torch.float16
    assert results["final_states"].dtype == (torch.float32 if op == "scan" else torch.float16)
    for name, t in inputs.items():
        assert name == "cu_seqlens" or results[f"d{name}"].dtype == t.dtype, name


def test_float64_is_refused(op):
    inputs = {k: t.to(DEVICE) for k, t in MAKERS[op]([3], dtype=torch.float64).items()}
    instead = "take impl='cpu' or impl='reference'" if op == "scan" else "take impl='reference'"
    message = f"bfloat16 with impl='triton', got torch.float64; {instead}"
    with pytest.raises(ValueError, match=re.escape(message)):
        OPS[op](**inputs, impl="triton")


def test_tensors_of_the_cpu_are_refused(op, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(RuntimeError, match="on a GPU with impl='triton', got cpu; take impl="):
        OPS[op](**MAKERS[op]([3]), impl="triton")


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_launches_wait_for_nothing(op):
    inputs = {k: t.to(DEVICE) for k, t in MAKERS[op]([70, 1, 200], dim=64).items()}
    # made on the host, and known there
    inputs["cu_seqlens"] = PackedLayout.from_lengths([70, 1, 200]).to(DEVICE).cu_seqlens
    inputs["x"].requires_grad_()
    dy = torch.ones_like(inputs["x"])
    for mode in ("default", "error"):
        # the first time compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            y, _ = OPS[op](**inputs, **OPTIONS[op], impl="triton", return_final_states=True)
            torch.autograd.grad(y, inputs["x"], dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            y.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_a_gpu_takes_the_kernels_by_default(op):
    inputs = {k: t.to(DEVICE) for k, t in MAKERS[op]([5, 9], dim=24).items()}
    y = OPS[op](**inputs, **OPTIONS[op])
    assert torch.equal(y, OPS[op](**inputs, **OPTIONS[op], impl="triton"))
    # the bits tell them apart
    assert not torch.equal(y, OPS[op](**inputs, **OPTIONS[op], impl="reference"))


@needs_gpu
@pytest.mark.parametrize(
    "lengths", [[1] * 70_000, [65_536]], ids=["70000 documents of one token", "one document"]
)
def test_extreme_layouts(op, lengths):
    inputs = MAKERS[op](lengths, dim=8)
    if op == "scan":
        # fast decays, so that errors of float32 cannot add up over 65,536 tokens
        inputs["A"] = inputs["A"] - 1
    impl = "cpu" if op == "scan" else "reference"
    actual, expected = run(op, inputs), run(op, in_float64(inputs), impl=impl)
    for name in expected:
        assert relative_rms(actual[name], expected[name]) < 3e-6, name
