"""The Gluon kernels: on a Hopper GPU, or compiled for one and emulated where there is none.

Triton's interpreter does not know Gluon, and a process that it has been chosen for cannot compile:
without a GPU the first test runs all others in a process of their own.
"""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.ops import backward_follows, selective_scan
from xtuner_mamba.ops.parts import split_parts
from xtuner_mamba.ops.selective_scan import api, chunks, gluon_support
from xtuner_mamba.testing import (
    assert_errs_like_eager,
    documents,
    eighths,
    in_float64,
    make_scan_inputs,
    outputs_and_grads,
    relative_rms,
    scan_oracle,
    with_document_replaced,
)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
EMULATED = os.environ.get("TRITON_INTERPRET") == "0"
DEVICE = torch.device("cuda" if HOPPER else "cpu")
runs_kernels = pytest.mark.skipif(
    not (HOPPER or EMULATED), reason="test_all_of_this_file_in_the_emulator runs it"
)
asks_the_emulator = pytest.mark.skipif(
    HOPPER or not EMULATED, reason="asks the emulator something that a GPU does not tell"
)
OF_TOKENS = ["y", "dx", "ddt", "dB", "dC", "dz"]
OF_STATES = ["final_states", "dinitial_states"]


@pytest.mark.skipif(HOPPER or EMULATED, reason="the tests below run by themselves")
def test_all_of_this_file_in_the_emulator():
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", here]
    command += ["-o", f"pythonpath={here.parent}"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 skipped" in run.stdout, run.stdout


def set_channels(monkeypatch, channels):
    """Let a thread of the forward have one channel, as in these small rows, or two as in others."""
    # what a GPU of so many multiprocessors takes at once
    monkeypatch.setattr(chunks, "_PARALLEL", 1584 if channels == 1 else 1e-3)


@pytest.fixture(autouse=True)
def _emulated_kernels(monkeypatch):
    set_channels(monkeypatch, 2)
    if not EMULATED or HOPPER:
        return
    for module, name in kernels():
        monkeypatch.setattr(module, name, emulated(module, name))
    from xtuner_mamba.ops.selective_scan import gluon

    monkeypatch.setattr(gluon, "why_not_gluon", lambda *args: None)


def kernels():
    from xtuner_mamba.ops.selective_scan import gluon_bwd, gluon_fwd, gpu_layout

    return [
        (gluon_fwd, "_scan_fwd_kernel"),
        (gluon_bwd, "_scan_bwd_kernel"),
        (gpu_layout, "_weights_kernel"),
        (gpu_layout, "_sum_kernel"),
    ]


@functools.cache
def emulated(module, name):
    from ptx_emulator import EmulatedKernel

    return EmulatedKernel(getattr(module, name))


def run(inputs, op=selective_scan, **options):
    inputs = {name: t.to(DEVICE) for name, t in inputs.items()}
    options = {"dt_softplus": True, "impl": "gluon"} | options
    return {n: t.cpu() for n, t in outputs_and_grads(op, inputs, **options).items()}


def scan_without_states(return_final_states, **arguments):
    return (selective_scan(**arguments),)


def eager_results(inputs, **options):
    return outputs_and_grads(selective_scan, inputs, impl="reference", **options)


def assert_accurate(draws, *, dt_softplus=True, impl="gluon", on_gpu=3):
    actual = [run(inputs, dt_softplus=dt_softplus, impl=impl) for inputs in draws]
    eager = [eager_results(inputs, dt_softplus=dt_softplus) for inputs in draws]
    exact = [outputs_and_grads(scan_oracle, in_float64(i), dt_softplus=dt_softplus) for i in draws]
    # in float32 the special-function unit errs by 2 units in the last place, a CPU's exp by half
    assert_errs_like_eager(actual, eager, exact, factor=on_gpu if HOPPER else 2)


# around tiles of 8 and 16 tokens and intervals of 64; one, two and four warps; in runs
SHAPES = [
    dict(lengths=[1, 7, 8, 9, 64, 65, 130], dim=64),
    dict(lengths=[15, 16, 17], dim=128),
    dict(lengths=[66, 1], dim=256),
    dict(lengths=[1] * 9 + [4, 2, 33], dim=64),
]


@runs_kernels
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_no_worse_than_eager(dtype, channels, monkeypatch):
    set_channels(monkeypatch, channels)
    assert_accurate(
        [make_scan_inputs(**s, dstate=16, dtype=dtype, seed=i) for i, s in enumerate(SHAPES)]
    )


@runs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_thread_has_one_channel_or_two(shape, monkeypatch):
    results = []
    for channels in (1, 2):
        set_channels(monkeypatch, channels)
        # boundaries whose schedule is not known yet
        inputs = make_scan_inputs(**shape, dstate=16, dtype=torch.bfloat16)
        cu_seqlens = PackedLayout.from_lengths(shape["lengths"]).cu_seqlens
        assert chunks.schedule_documents(cu_seqlens, shape["dim"]).is_uneven == (channels == 1)
        results.append(run(inputs))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@runs_kernels
@pytest.mark.parametrize("absent", ["D", "z", "dt_bias", "initial_states", "dt_softplus"])
def test_without_what_is_optional(absent):
    draws = [
        make_scan_inputs(lengths, dim=64, dstate=16, dtype=torch.bfloat16, seed=seed)
        for seed, lengths in enumerate([[20, 9], [20, 9], [1, 3, 1, 1, 15]])
    ]
    for inputs in draws:
        inputs.pop(absent, None)
        if absent == "dt_softplus":
            inputs["dt"], inputs["dt_bias"] = inputs["dt"].abs() / 8, inputs["dt_bias"].abs() / 8
    assert_accurate(draws, dt_softplus=absent != "dt_softplus")


@pytest.mark.skipif(not HOPPER, reason="the chunks' own kernels are Triton's, tested there")
@pytest.mark.parametrize("lengths", [[5, 70, 31, 100], [1] * 20 + [5, 70, 1, 1, 31]], ids=str)
def test_long_documents_run_in_chunks(lengths, monkeypatch):
    monkeypatch.setattr(chunks, "_limits", lambda *_: (30, 20))
    assert_accurate(
        [
            make_scan_inputs(lengths, dim=256, dstate=16, dtype=torch.bfloat16, seed=seed)
            for seed in range(3)
        ],
        # of a document of one token dinitial_states is a product of three such numbers: 3.3 times
        on_gpu=4,
    )


LENGTHS = [5, 1, 17, 2]


@pytest.fixture(params=["one by one", "in runs"])
def walk(request, monkeypatch):
    """Whether a program walks these few documents one after another, or in runs."""
    monkeypatch.setattr(chunks, "_MIN_MEAN", 16 if request.param == "in runs" else 0)
    return request.param


def make_small():
    return make_scan_inputs(LENGTHS, dim=128, dstate=16, dtype=torch.bfloat16)


@runs_kernels
def test_slices_of_channels_and_groups_of_documents_change_no_rounding(monkeypatch):
    from xtuner_mamba.ops.selective_scan import gluon_bwd, gluon_fwd

    # three runs
    monkeypatch.setattr(chunks, "_MAX_RUN", 6)
    whole = run(make_scan_inputs(LENGTHS, dim=192, dstate=16, dtype=torch.bfloat16))
    assert gluon_bwd._slice_width(25, 192) == 192
    monkeypatch.setattr(gluon_bwd, "MAX_SCRATCH_BYTES", 1)
    monkeypatch.setattr(gluon_bwd, "_MAX_SUM_BYTES", 2 * 64 * 64)
    monkeypatch.setattr(gluon_fwd, "_MAX_PROGRAMS", 1)
    assert gluon_bwd._slice_width(25, 192) == 64
    sliced = run(make_scan_inputs(LENGTHS, dim=192, dstate=16, dtype=torch.bfloat16))
    for name in ["y", "dx", "ddt", "dz", *OF_STATES]:
        assert torch.equal(sliced[name], whole[name]), name
    for name in sliced.keys() - {"y", "dx", "ddt", "dz", *OF_STATES}:
        assert relative_rms(sliced[name], whole[name]) < 1e-3, name


@runs_kernels
def test_states_that_the_forward_has_kept_change_the_rounding_alone():
    apart = run(make_small())
    saved = []
    with (
        backward_follows(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        together = run(make_small())
    assert (sum(LENGTHS) // 4, 1, 16, 128) in [tuple(t.shape) for t in saved]
    for name in apart:
        assert relative_rms(together[name], apart[name]) < 1e-4, name


@runs_kernels
@pytest.mark.parametrize("absent", [None, "z"])
def test_the_backward_makes_what_a_layer_multiplies(absent):
    inputs = make_small()
    inputs.pop(absent, None)
    weight = eighths((24, 128), seed=3).bfloat16()
    incoming = eighths((1, sum(LENGTHS), 24), seed=4), torch.zeros(len(LENGTHS), 128, 16)
    dweight = run(inputs | {"out_proj_weight": weight}, incoming=incoming)["dout_proj_weight"]
    y = scan_oracle(**in_float64(inputs), dt_softplus=True)[0].view(-1, 128)
    assert relative_rms(dweight, incoming[0][0].double().T @ y) < 4e-3


@runs_kernels
def test_packed_equals_each_document_alone(walk):
    inputs = make_small()
    dy = eighths(inputs["x"].shape, seed=1)
    dfinal = eighths(inputs["initial_states"].shape, seed=2)
    packed = run(inputs, incoming=(dy, dfinal))
    incoming = zip(dy.split(LENGTHS, dim=1), dfinal.split(1))
    alone = [run(document, incoming=g) for document, g in zip(documents(inputs), incoming)]
    for name in OF_TOKENS + OF_STATES:
        dim = 0 if name in OF_STATES else 1
        assert torch.equal(packed[name], torch.cat([r[name] for r in alone], dim)), name
    for name in packed.keys() - set(OF_TOKENS + OF_STATES):
        expected = sum(results[name].double() for results in alone)
        assert relative_rms(packed[name], expected) < 1e-6, name
    leaking = dict(inputs, cu_seqlens=PackedLayout.from_lengths([sum(LENGTHS)]).cu_seqlens)
    leaking["initial_states"] = inputs["initial_states"][:1]
    assert relative_rms(run(leaking)["y"], packed["y"]) > 1e-3


@runs_kernels
@pytest.mark.parametrize("op", [selective_scan, scan_without_states])
def test_documents_in_runs_have_the_bits_of_those_one_by_one(op, monkeypatch):
    # more than a tile; a long one, of which the last group is not full, before short ones
    lengths = [1] * 20 + [2, 3, 1, 5, 37, 1, 1, 1, 9, 2]
    monkeypatch.setattr(chunks, "_MAX_RUN", 32)
    inputs = make_scan_inputs(lengths, dim=64, dstate=16, dtype=torch.bfloat16)
    if op is scan_without_states:
        del inputs["initial_states"]
    schedule = chunks.schedule_documents(inputs["cu_seqlens"], dim=64)
    assert schedule.runs.cu_parts.tolist() == [0, 24, 25, 30]
    in_runs = run(inputs, op)
    monkeypatch.setattr(chunks, "_MIN_MEAN", 0)
    one_by_one = run(inputs, op)
    for name in OF_TOKENS + OF_STATES * (op is selective_scan):
        bits = (t[name].contiguous().view(torch.int8) for t in (in_runs, one_by_one))
        assert torch.equal(*bits), name
    for name in in_runs.keys() - set(OF_TOKENS + OF_STATES):
        assert relative_rms(in_runs[name], one_by_one[name]) < 1e-6, name


@runs_kernels
@pytest.mark.parametrize("value", [torch.nan, 1e4])
def test_a_document_leaves_the_bits_of_the_others_alone(value, walk, monkeypatch):
    from xtuner_mamba.ops.selective_scan import gluon_bwd, gluon_fwd

    before = run(make_small())
    # all documents in one program, as thousands of them would be
    monkeypatch.setattr(gluon_bwd, "_MAX_SUM_BYTES", 1)
    monkeypatch.setattr(gluon_fwd, "_MAX_PROGRAMS", 1)
    inputs, others = with_document_replaced(make_small(), 2, value)
    after = run(inputs)
    states = torch.arange(len(LENGTHS)) != 2
    for name in OF_TOKENS:
        assert torch.equal(after[name][:, others], before[name][:, others]), name
        assert not torch.equal(after[name], before[name]), name
    for name in OF_STATES:
        assert torch.equal(after[name][states], before[name][states]), name


@runs_kernels
def test_the_gradient_of_the_gate_is_written_where_it_is_told():
    inputs = {name: t.to(DEVICE) for name, t in make_small().items()}
    whole = torch.cat(2 * [inputs["z"]], dim=2).requires_grad_()
    dy = eighths(inputs["x"].shape).to(DEVICE)
    (_, part), (_, told) = split_parts(whole, [128, 128])
    grads = []
    for z, dz_out in ((whole.chunk(2, dim=2)[1], None), (part, told)):
        y = selective_scan(**inputs | {"z": z, "dz_out": dz_out}, dt_softplus=True, impl="gluon")
        grads += torch.autograd.grad(y, z, dy.to(y))
    plain, told = grads
    assert torch.equal(told, plain)
    assert (plain.stride(1), told.stride(1), told.storage_offset()) == (128, 256, 128)


@runs_kernels
def test_rows_need_not_be_contiguous():
    inputs = make_small()
    strided = dict(inputs)
    for name in ("x", "dt", "z", "B", "C"):
        wide = torch.cat([inputs[name], inputs[name]], 2)
        strided[name] = wide[..., : inputs[name].shape[2]]
    leaves = [{k: t.to(DEVICE) for k, t in i.items()} for i in (inputs, strided)]
    ys = [selective_scan(**i, dt_softplus=True, impl="gluon") for i in leaves]
    assert torch.equal(*ys)


@runs_kernels
@pytest.mark.parametrize("has_fork", [False, True])
def test_the_convs_dx_has_the_same_bits_without_its_filters_gradient(has_fork, monkeypatch):
    # of Triton, but no matter of what an interpreter does: the compiler may round differently
    triton_bwd = importlib.import_module("xtuner_mamba.ops.causal_conv1d.triton_bwd")
    if not HOPPER:
        for name in ("_conv_bwd_kernel", "_sum_filter_kernel"):
            monkeypatch.setattr(triton_bwd, name, emulated(triton_bwd, name))
    layout = PackedLayout.from_lengths([5, 40, 3, 1, 30, 17]).to(DEVICE)
    draw = torch.Generator().manual_seed(0)
    x, dy, fork = (torch.randn(96, 32, generator=draw).to(DEVICE) for _ in range(3))
    weight = torch.randn(32, 4, generator=draw).to(DEVICE)
    dxs = []
    for dweight in (torch.empty_like(weight), None):
        dxs.append(torch.empty_like(x))
        triton_bwd._conv_bwd(
            x, weight, None, None, layout.cu_seqlens, layout.seq_idx.flatten(), "silu",
            dy, fork if has_fork else None, None, dxs[-1], dweight, None,
        )  # fmt: skip
    assert torch.equal(*dxs)


@asks_the_emulator
def test_emulator_notices_a_missing_barrier(monkeypatch):
    import ptx_emulator

    without_barriers = lambda ptx, *args: run_kernel(ptx.replace("bar.sync", "//"), *args)  # noqa: E731
    run_kernel = ptx_emulator.run_kernel
    monkeypatch.setattr(ptx_emulator, "run_kernel", without_barriers)
    with pytest.raises(ptx_emulator.Race, match="shared words"):
        run(make_small())


@asks_the_emulator
def test_emulator_notices_an_address_between_two_words():
    import ptx_emulator

    load = ".entry f(\n) {\nld.param.b64 %rd1, [f_param_0]; ld.global.b32 %r1, [%rd1+2]; ret;"
    with pytest.raises(ptx_emulator.Misaligned, match=r"4 bytes at \[4098\]"):
        ptx_emulator.run_kernel(load, 1, 32, 0, [torch.zeros(8)])


@asks_the_emulator
@pytest.mark.parametrize("missing", ["group_states", "BC"])
def test_emulator_notices_memory_of_no_tensor(missing, monkeypatch):
    import ptx_emulator

    from xtuner_mamba.ops.selective_scan import gluon_bwd

    allocate, launch = gluon_bwd.allocate_group_states, gluon_bwd._launch_fwd

    def allocate_less(A, total, *widths):
        return allocate(A, total - 4, *widths)

    def launch_with_less(x, dt, A, BC, *args, **options):
        launch(x, dt, A, BC[:-1].clone(), *args, **options)

    if missing == "group_states":
        monkeypatch.setattr(gluon_bwd, "allocate_group_states", allocate_less)
    else:
        monkeypatch.setattr(gluon_bwd, "_launch_fwd", launch_with_less)
    with pytest.raises(ptx_emulator.OutOfBounds, match="global bytes"):
        run(make_small())


@asks_the_emulator
@pytest.mark.parametrize("limits", [None, (30, 20)], ids=["whole", "in chunks"])
def test_plain_triton_compiles_to_the_same(limits, monkeypatch):
    # the interpreter sees no compiler, no race, and no address outside of a tensor
    from xtuner_mamba.ops.selective_scan import triton as plain
    from xtuner_mamba.ops.selective_scan import triton_bwd, triton_fwd

    monkeypatch.setattr(plain, "check_triton_takes", lambda *args: None)
    names = {triton_fwd: ["_scan_fwd_kernel"], triton_bwd: ["_scan_bwd_kernel"]}
    if limits is not None:
        monkeypatch.setattr(chunks, "_limits", lambda *_: limits)
        names[chunks] = ["_chunk_kernel", "_carry_kernel"]
    for module in names:
        for name in names[module]:
            monkeypatch.setattr(module, name, emulated(module, name))
    draws = [
        make_scan_inputs([5, 1, 17, 2, 70], dim=40, dstate=16, dtype=torch.bfloat16, seed=seed)
        for seed in range(3)
    ]
    assert_accurate(draws, impl="triton")


def test_a_gpu_without_gluon_takes_triton_and_says_why_once(monkeypatch, caplog):
    x = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(api, "_logged", set())
    choices = []
    for reason in (None, "dstate must be 16, got 8", "dstate must be 16, got 4"):
        monkeypatch.setattr(gluon_support, "why_not_gluon", lambda *args, r=reason: r)
        choices.append(api._choose_impl(x, x, None, None))
    assert choices == ["gluon", "triton", "triton"]
    (record,) = caplog.records
    assert record.getMessage().endswith("the faster Gluon: dstate must be 16, got 8")


def test_says_what_it_does_not_take():
    x, A = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, 16)
    reason = gluon_support.why_not_gluon(x, x, A, None)
    assert reason == "the device must be a GPU of compute capability 9.0, got cpu"
