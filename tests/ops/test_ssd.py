"""ssd: against the closed form of each document alone, head by head; on a GPU its kernels too."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ssd_inputs import LENGTHS, gate_and_norm, make_inputs, normed_ssd, with_norm

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.ops import GatedNorm, ssd
from xtuner_mamba.ops.ssd import api, mamba_ssm, tuning
from xtuner_mamba.ops.ssd.chunk_grid import ChunkGrid, chunk_size_for
from xtuner_mamba.testing import (
    assert_errs_like_eager,
    documents,
    in_float64,
    outputs_and_grads,
    relative_rms,
    scan_oracle,
    with_document_replaced,
)

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="mamba_ssm's kernels need a GPU")
# a process tries many variants of each kernel; one of several is enough
pytestmark = pytest.mark.xdist_group("mamba_ssm")
OPTIONAL = {"D", "z", "dt_bias", "initial_states"}


def oracle(
    x, dt, A, B, C, *, D=None, z=None, dt_bias=None, initial_states=None, dt_limit=None, **options
):
    """A head is a selective scan whose channels share their step size and decay."""
    headdim, dstate, results = x.shape[3], B.shape[3], []
    if dt_bias is not None:
        dt = dt + dt_bias
    if options.pop("dt_softplus", False):
        dt = torch.logaddexp(dt, torch.zeros_like(dt))
    if dt_limit is not None:
        dt = dt.clamp(*dt_limit)
    for head in range(x.shape[2]):
        group = head // (x.shape[2] // B.shape[2])
        results.append(
            scan_oracle(
                x[:, :, head],
                dt[:, :, head, None].expand(-1, -1, headdim),
                A[head].expand(headdim, dstate),
                B[:, :, group],
                C[:, :, group],
                D=None if D is None else D[head].expand(headdim),
                z=None if z is None else z[:, :, head],
                initial_states=None if initial_states is None else initial_states[:, head],
                **options,
            )
        )
    ys, final_states = zip(*results)
    return torch.stack(ys, dim=2), torch.stack(final_states, dim=1)


def run(inputs, **options):
    return outputs_and_grads(ssd, inputs, dt_softplus=True, impl="reference", **options)


def assert_exact(actual, exact):
    assert actual.keys() == exact.keys()
    errors = {name: relative_rms(actual[name], exact[name]) for name in exact}
    assert max(errors.values()) < 1e-12, errors


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    ngroups=st.sampled_from([1, 2, 4]),
    optional=st.sets(st.sampled_from(sorted(OPTIONAL))),
    chunk_size=st.sampled_from([None, 1, 2, 4, 16]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_outputs_and_gradients_are_exact(lengths, ngroups, optional, chunk_size, seed):
    inputs = make_inputs(lengths, ngroups=ngroups, seed=seed)
    for name in OPTIONAL - optional:
        del inputs[name]
    exact = outputs_and_grads(oracle, inputs, dt_softplus=True)
    assert_exact(run(inputs, chunk_size=chunk_size), exact)


def test_the_exactness_test_sees_every_boundary():
    inputs = make_inputs([7, 4])
    del inputs["initial_states"]
    exact = outputs_and_grads(oracle, inputs, dt_softplus=True)
    leaking = dict(inputs, cu_seqlens=torch.tensor([0, 11], dtype=torch.int32))
    wrong = outputs_and_grads(oracle, leaking, dt_softplus=True)
    for name in ("y", "dx", "dB", "dC", "ddt", "dA"):
        assert relative_rms(wrong[name], exact[name]) > 1e-3, name


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_equals_each_document_alone(lengths):
    inputs = make_inputs(lengths)
    options = dict(dt_softplus=True, return_final_states=True)
    packed = ssd(**inputs, **options)
    alone = [ssd(**document, **options) for document in documents(inputs)]
    assert relative_rms(packed.y, torch.cat([r.y for r in alone], dim=1)) < 1e-12
    assert relative_rms(packed.final_states, torch.cat([r.final_states for r in alone])) < 1e-12


def test_limits_of_the_step_size():
    inputs = make_inputs([5, 9])
    exact = outputs_and_grads(oracle, inputs, dt_softplus=True, dt_limit=(0.1, 0.3))
    assert_exact(run(inputs, dt_limit=(0.1, 0.3)), exact)
    assert relative_rms(run(inputs)["y"], exact["y"]) > 1e-3


def normed_oracle(*, norm_weight, before_gate, z, **inputs):
    y, final_states = oracle(**inputs)
    y = gate_and_norm(y[0], z[0], norm_weight, inputs["B"].shape[2], before_gate)
    return y[None], final_states


@pytest.mark.parametrize("before_gate", [False, True])
@pytest.mark.parametrize("ngroups", [1, 2])
def test_a_norm_beside_the_gate(ngroups, before_gate):
    inputs = with_norm(make_inputs([5, 9], ngroups=ngroups))
    options = dict(dt_softplus=True, before_gate=before_gate)
    exact = outputs_and_grads(normed_oracle, inputs, **options)
    actual = outputs_and_grads(normed_ssd, inputs, impl="reference", **options)
    assert_exact(actual, exact)
    assert relative_rms(run(make_inputs([5, 9], ngroups=ngroups))["y"], exact["y"]) > 1e-3


def test_skip_weights_of_every_channel():
    inputs = make_inputs([5, 9])
    D = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    inputs |= dict(z=None, dt_softplus=True)
    expected = ssd(**inputs | dict(D=None)) + D * inputs["x"]
    assert relative_rms(ssd(**inputs | dict(D=D)), expected) < 1e-12


@pytest.mark.parametrize("value", [torch.nan, 1e4], ids=["NaN", "large"])
@pytest.mark.parametrize("i_seq", range(5))
def test_a_document_leaves_the_bits_of_the_others_alone(i_seq, value):
    inputs = make_inputs([9, 1, 17, 2, 9], dtype=torch.float32)
    before = run(inputs)
    replaced, others = with_document_replaced(inputs, i_seq, value)
    after = run(replaced)
    for name in ("y", "dx", "ddt", "dB", "dC", "dz"):
        assert torch.equal(after[name][:, others], before[name][:, others]), name
        assert not torch.equal(after[name], before[name]), name
    states = torch.arange(5) != i_seq
    for name in ("final_states", "dinitial_states"):
        assert torch.equal(after[name][states], before[name][states]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounds_once(dtype):
    draws = [make_inputs(lengths, dtype=dtype) for lengths in LENGTHS]
    exact = [outputs_and_grads(oracle, in_float64(i), dt_softplus=True) for i in draws]
    actual = [run(i) for i in draws]
    eager = []
    for inputs, results in zip(draws, actual):
        wide = {n: t.float() if t.is_floating_point() else t for n, t in inputs.items()}
        in_float32 = outputs_and_grads(oracle, wide, dt_softplus=True)
        eager.append({name: t.to(results[name].dtype) for name, t in in_float32.items()})
    assert_errs_like_eager(actual, eager, exact)


def test_same_bits_twice_and_under_autocast():
    inputs = make_inputs([9, 1, 17], dtype=torch.float32)
    leaves = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
    y = ssd(**leaves, dt_softplus=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = ssd(**leaves, dt_softplus=True)
    assert torch.equal(again, y)
    once, twice = (torch.autograd.grad(t.sum(), leaves["x"])[0] for t in (y, again))
    assert torch.equal(once, twice)


def test_rows_of_a_batch_are_documents():
    inputs = make_inputs([7, 7, 7])
    packed = ssd(**inputs, dt_softplus=True)
    del inputs["cu_seqlens"]
    rows = {
        name: t.view(3, 7, *t.shape[2:]) if name in ("x", "dt", "B", "C", "z") else t
        for name, t in inputs.items()
    }
    assert torch.equal(ssd(**rows, dt_softplus=True).view_as(packed), packed)


def test_thousands_of_documents():
    inputs = make_inputs([1] * 3000)
    B, C = (inputs[name].repeat_interleave(2, dim=2)[0] for name in ("B", "C"))
    dt = torch.nn.functional.softplus(inputs["dt"] + inputs["dt_bias"])[0, ..., None]
    x = inputs["x"][0]
    h = torch.exp(dt * inputs["A"][:, None])[..., None] * inputs["initial_states"]
    y = ((h + (dt * x)[..., None] * B[..., None, :]) @ C[..., None])[..., 0]
    y = (y + inputs["D"][:, None] * x) * torch.nn.functional.silu(inputs["z"][0])
    assert relative_rms(ssd(**inputs, dt_softplus=True)[0], y) < 1e-12


@pytest.mark.parametrize("cut", [1, 8, 10])
def test_final_states_carry_on(cut):
    inputs = make_inputs([11])
    del inputs["cu_seqlens"]
    inputs |= dict(dt_softplus=True, return_final_states=True)
    whole = ssd(**inputs)
    tokens = {name: inputs.pop(name) for name in ("x", "dt", "B", "C", "z")}
    first = {name: t[:, :cut] for name, t in tokens.items()}
    rest = {name: t[:, cut:] for name, t in tokens.items()}
    y_1, carried = ssd(**first, **inputs)
    y_2, final = ssd(**rest, **inputs | dict(initial_states=carried))
    assert relative_rms(torch.cat([y_1, y_2], dim=1), whole.y) < 1e-12
    assert relative_rms(final, whole.final_states) < 1e-12


def test_a_grid_starts_a_chunk_with_every_document():
    cu_seqlens = PackedLayout.from_lengths([3, 1, 5]).cu_seqlens
    grid = ChunkGrid.from_cu_seqlens(cu_seqlens, 2)
    assert grid.slots.tolist() == [0, 1, 2, 4, 6, 7, 8, 9, 10]
    assert grid.sources.tolist() == [0, 1, 2, -1, 3, -1, 4, 5, 6, 7, 8, -1]
    assert grid.cu_chunks.tolist() == [0, 2, 3, 6]
    assert grid.doc_order.tolist() == [2, 0, 1]
    assert grid.chunk_order.tolist() == [3, 0, 2, 4, 1, 5]
    assert grid.turns == (3, 2, 1)
    chunks = grid.scatter(torch.arange(1, 10))
    assert chunks.tolist() == [[1, 2], [3, 0], [4, 0], [5, 6], [7, 8], [9, 0]]
    assert grid.gather(chunks).tolist() == list(range(1, 10))
    # made once for all layers, and for every size of the chunks
    assert ChunkGrid.from_cu_seqlens(cu_seqlens, 2) is grid
    assert ChunkGrid.from_cu_seqlens(cu_seqlens, 4).turns == (3, 1)


def test_states_pass_from_chunk_to_chunk_of_a_document():
    grid = ChunkGrid.from_cu_seqlens(PackedLayout.from_lengths([3, 1, 5]).cu_seqlens, 2)
    added = torch.tensor([1.0, 2, 3, 4, 5, 6])
    before, after = grid.pass_states(torch.full((6,), 0.5), added, torch.tensor([8.0, 0, 4]))
    assert before.tolist() == [8, 5, 0, 4, 6, 8]
    assert after.tolist() == [4.5, 3, 10]
    before, after = grid.pass_states(torch.full((6,), 0.5), added, None)
    assert before.tolist() == [0, 1, 0, 0, 4, 7]
    assert after.tolist() == [2.5, 3, 9.5]


@pytest.mark.parametrize(
    ("lengths", "size"), [([1] * 9, 16), ([400], 64), ([260, 251], 32), ([1000, 2000], 256)]
)
def test_chunks_leave_few_gaps(lengths, size):
    assert chunk_size_for(PackedLayout.from_lengths(lengths).cu_seqlens, 16, 256) == size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(cu_seqlens=[0, 7]), "cu_seqlens must be a tensor, got [0, 7]; build it with"),
        (dict(x=torch.zeros(1, 7, 12)), "x must have shape (batch, seqlen, nheads, headdim), none"),
        (dict(B=torch.zeros(1, 7, 3, 5)), "a divisor of the 4 heads, got (1, 7, 3, 5)"),
        (dict(C=torch.zeros(1, 7, 1, 5)), "C must have shape (1, 7, 2, 5), got (1, 7, 1, 5)"),
        (dict(dt=torch.zeros(1, 7, 3)), "dt must have shape (1, 7, 4), got (1, 7, 3)"),
        (dict(A=torch.zeros(4, 5)), "A must have shape (4,), got (4, 5)"),
        (dict(A=torch.zeros(4).half()), "A must be torch.float32 for x of torch.float32, got"),
        (dict(D=torch.zeros(12)), "D must have shape (4,) or (4, 3), got (12,)"),
        (dict(z=torch.zeros(1, 7, 4, 3).int()), "z must have a floating-point dtype, got"),
        (dict(cu_seqlens=torch.tensor([0, 3, 8]).int()), "end at the row's 7 tokens, got 8"),
        (dict(x=torch.zeros(2, 7, 4, 3)), "B must have shape (2, 7, ngroups, dstate)"),
        (dict(initial_states=torch.zeros(1, 4, 3, 5)), "one state a document, got (1, 4, 3, 5)"),
        (dict(dt_limit=(0.5, 0.1)), "dt_limit must be a range of positive step sizes, got (0.5"),
        (dict(chunk_size=48), "chunk_size must be a power of 2, got 48"),
        (
            dict(norm=GatedNorm(torch.zeros(9), 1e-5)),
            "norm.weight must have shape (12,), got (9,)",
        ),
        (
            dict(norm=GatedNorm(torch.zeros(12), 1e-5), z=None),
            "z must be given with norm, got None beside norm.eps=1e-05; pass",
        ),
        (dict(impl="cuda"), "impl must be None, 'mamba_ssm' or 'reference', got 'cuda'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_say_what_was_given(changes, message):
    inputs = make_inputs([3, 4], dtype=torch.float32)
    with pytest.raises(ValueError, match=re.escape(message)):
        ssd(**inputs | changes)


def test_a_batch_with_boundaries_is_refused_with_the_remedy():
    inputs = make_inputs([3, 4], dtype=torch.float32)
    inputs = {n: t.expand(2, *t.shape[1:]) if len(t) == 1 else t for n, t in inputs.items()}
    with pytest.raises(ValueError, match=r"batch 1 with cu_seqlens, got \(2, 7, 4, 3\); lay the"):
        ssd(**inputs)


# -- mamba_ssm's kernels --------------------------------------------------------------------------


@pytest.fixture
def _forget_what_was_asked():
    def forget():
        mamba_ssm.why_not_installed.cache_clear()
        kernels.cache_clear()

    # a test may put something else in its place
    kernels = mamba_ssm._kernels
    forget()
    yield
    forget()


@pytest.mark.usefixtures("_forget_what_was_asked")
@pytest.mark.parametrize("version", ["2.2.4", "2.2.6.post3"])
def test_versions_with_wrong_gradients_are_refused(monkeypatch, version):
    monkeypatch.setattr(mamba_ssm.importlib.metadata, "version", lambda name: version)
    assert f"must be 2.3.0 or newer, got {version}, whose" in mamba_ssm.why_not_installed()


@pytest.mark.usefixtures("_forget_what_was_asked")
def test_a_missing_package_is_named_with_the_remedy(monkeypatch):
    def missing(name):
        raise mamba_ssm.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(mamba_ssm.importlib.metadata, "version", missing)
    assert "must be installed, got none: `pip install 'mamba-ssm>=2.3.0'`" in (
        mamba_ssm.why_not_installed()
    )


@pytest.mark.usefixtures("_forget_what_was_asked")
@pytest.mark.parametrize("error", [ImportError("undefined symbol"), RuntimeError("no driver")])
def test_a_package_that_cannot_be_imported_is_named(error, monkeypatch):
    def import_module(name):
        raise error

    monkeypatch.setattr(mamba_ssm.importlib.metadata, "version", lambda name: "2.3.2.post1")
    for name in ("mamba_ssm", "mamba_ssm.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    determinism = SimpleNamespace(set_deterministic_mode=None)
    monkeypatch.setitem(sys.modules, "mamba_ssm.utils.determinism", determinism)
    monkeypatch.setattr(mamba_ssm.importlib, "import_module", import_module)
    reason = mamba_ssm.why_not_installed()
    assert reason == f"mamba-ssm must be importable, got {error!r}"


@pytest.mark.usefixtures("_forget_what_was_asked")
def test_a_package_without_one_of_the_kernels_is_named(monkeypatch):
    for name in ("mamba_ssm", "mamba_ssm.utils", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    switches, kept = [], []
    monkeypatch.setattr(tuning, "keep_timings", kept.append)
    determinism = SimpleNamespace(set_deterministic_mode=switches.append)
    monkeypatch.setitem(sys.modules, "mamba_ssm.utils.determinism", determinism)
    for module, names in mamba_ssm._KERNELS.items():
        found = SimpleNamespace(**{name: f"the {name}" for name in names})
        monkeypatch.setitem(sys.modules, f"mamba_ssm.ops.triton.{module}", found)
    monkeypatch.setattr(mamba_ssm.importlib.metadata, "version", lambda name: "2.3.2.post1")
    assert mamba_ssm.why_not_installed() is None
    assert mamba_ssm._kernels()._bmm_chunk_fwd == "the _bmm_chunk_fwd"
    assert switches == [True]
    assert kept == [sys.modules[f"mamba_ssm.ops.triton.{module}"] for module in mamba_ssm._KERNELS]
    mamba_ssm.why_not_installed.cache_clear()
    mamba_ssm._kernels.cache_clear()
    del found._chunk_scan_chunk_state_bwd_dx
    assert mamba_ssm.why_not_installed() == (
        "mamba-ssm must be importable, got "
        "ImportError('mamba_ssm.ops.triton.ssd_combined has no _chunk_scan_chunk_state_bwd_dx')"
    )


def test_the_kernels_are_refused_without_a_gpu():
    with pytest.raises(RuntimeError, match=r"on a GPU for mamba_ssm, got cpu; take impl='refer"):
        ssd(**make_inputs([3]), impl="mamba_ssm")


def test_why_the_kernels_are_not_used_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(mamba_ssm, "why_not_mamba_ssm", lambda x: "because, got 1")
    api._warn_once.cache_clear()

    class OnGpu:
        is_cuda = True

    assert [api._choose_impl(OnGpu()) for _ in range(2)] == ["reference"] * 2
    assert [record.message for record in caplog.records] == [
        "ssd runs in plain PyTorch, not on mamba_ssm's faster kernels: because, got 1"
    ]
    monkeypatch.setattr(mamba_ssm, "why_not_mamba_ssm", lambda x: None)
    assert api._choose_impl(OnGpu()) == "mamba_ssm"


SIZES = dict(nheads=4, headdim=64, ngroups=2, dstate=64)
GPU_LENGTHS = [200, 1, 64, 333, 31]


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kernels_err_like_eager(dtype):
    draws = [make_inputs(GPU_LENGTHS, dtype=dtype, seed=seed, **SIZES) for seed in range(3)]
    exact = [run(in_float64(inputs)) for inputs in draws]
    eager = [run(inputs) for inputs in draws]
    actual = [run_kernels(inputs) for inputs in draws]
    # mamba_ssm rounds what it multiplies, and the states before chunks, to 16 bits
    halves = [name for name, value in eager[0].items() if value.dtype == dtype]
    assert_errs_like_eager(
        *([{n: draw[n] for n in halves} for draw in draws] for draws in (actual, eager, exact)),
        factor=16,
    )
    # and so a sum in float32 is no better than those; that of a head may nearly cancel
    for name in eager[0].keys() - halves:
        for draw, oracle in zip(actual, exact):
            assert relative_rms(draw[name], oracle[name]) < 4 * torch.finfo(dtype).eps, name


@needs_gpu
@pytest.mark.parametrize("is_normed", [False, True])
def test_kernels_give_the_same_bits_twice(is_normed):
    inputs, options = make_inputs(GPU_LENGTHS, dtype=torch.bfloat16, **SIZES), {}
    if is_normed:
        inputs, options = with_norm(inputs), dict(op=normed_ssd, before_gate=False)
    once, twice = (run_kernels(inputs, **options) for _ in range(2))
    for name in once:
        assert torch.equal(once[name], twice[name]), name


@needs_gpu
@pytest.mark.parametrize("value", [torch.nan, 0.5])
@pytest.mark.parametrize("i_seq", range(4))
def test_kernels_leave_the_bits_of_other_documents_alone(i_seq, value):
    inputs = make_inputs(GPU_LENGTHS, dtype=torch.bfloat16, **SIZES)
    before = run_kernels(inputs)
    replaced, others = with_document_replaced(inputs, i_seq, value)
    after = run_kernels(replaced)
    for name in ("y", "dx", "ddt", "dB", "dC", "dz"):
        assert torch.equal(after[name][:, others], before[name][:, others]), name
        assert not torch.equal(after[name], before[name]), name
    states = torch.arange(len(GPU_LENGTHS)) != i_seq
    for name in ("final_states", "dinitial_states"):
        assert torch.equal(after[name][states], before[name][states]), name


@needs_gpu
def test_kernels_hide_no_step_size_that_is_nan():
    inputs = make_inputs(GPU_LENGTHS, dtype=torch.bfloat16, **SIZES)
    document = slice(sum(GPU_LENGTHS[:-1]), None)
    inputs["dt"][:, document.start + 1, 1] = torch.nan
    results = run_kernels(inputs)
    # before it nothing is, after it all of that head
    expected = torch.zeros_like(results["y"], dtype=torch.bool)
    expected[:, document.start + 1 :, 1] = True
    assert torch.equal(results["y"].isnan(), expected)
    assert results["final_states"][-1, 1].isnan().all()
    for name in ("dA", "ddt_bias"):
        assert results[name].isnan().tolist() == [i == 1 for i in range(len(results[name]))], name


def run_kernels(inputs, *, op=ssd, **options):
    inputs = {name: t.cuda() for name, t in inputs.items()}
    results = outputs_and_grads(op, inputs, dt_softplus=True, impl="mamba_ssm", **options)
    return {name: t.cpu() for name, t in results.items()}
