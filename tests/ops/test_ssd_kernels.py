"""Our kernels around those of mamba_ssm: rows into chunks, states from chunk to chunk, and all."""

import re
from types import SimpleNamespace

import pytest
import ssd_stand_ins
import torch
from ssd_inputs import LENGTHS, gate_and_norm, make_inputs, normed_ssd, with_norm

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.ops import GatedNorm, backward_follows, ssd
from xtuner_mamba.ops.ssd import mamba_ssm, mamba_ssm_function, triton_gated_norm
from xtuner_mamba.ops.ssd.chunk_grid import ChunkGrid
from xtuner_mamba.ops.ssd.triton_decays import decays_bwd, decays_fwd
from xtuner_mamba.ops.ssd.triton_rows import copy_rows
from xtuner_mamba.ops.ssd.triton_states import pass_states_bwd, pass_states_fwd
from xtuner_mamba.testing import (
    assert_errs_like_eager,
    eighths,
    in_float64,
    outputs_and_grads,
    relative_rms,
    with_document_replaced,
)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
CHUNK = 4


def make_grid(lengths, chunk_size=CHUNK):
    cu_seqlens = PackedLayout.from_lengths(lengths).to(DEVICE).cu_seqlens
    return ChunkGrid.from_cu_seqlens(cu_seqlens, chunk_size)


# a program takes many rows, two, or one in steps
@pytest.mark.parametrize("dim", [3, 900, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_are_copied_to_the_bit(dtype, dim):
    grid = make_grid([3, 1, 5])
    draw = torch.Generator().manual_seed(0)
    # a slice, as a layer may return one
    wide = torch.randn((9, 2, dim + 3), generator=draw).to(DEVICE, dtype)
    tokens = wide[..., 2 : 2 + dim]
    tokens[4] = torch.nan
    row = copy_rows(tokens, grid.sources)
    expected = grid.scatter(tokens).flatten(0, 1)
    torch.testing.assert_close(row, expected, rtol=0, atol=0, equal_nan=True)
    back = copy_rows(row, grid.slots)
    torch.testing.assert_close(back, tokens, rtol=0, atol=0, equal_nan=True)
    # into a part of wider rows, the rest of which stays as it is
    whole = torch.full((9, 2 * dim + 3), 7.0, dtype=dtype, device=DEVICE)
    part = whole[:, 2 : 2 + 2 * dim].view(9, 2, dim)
    assert copy_rows(row, grid.slots, part) is part
    torch.testing.assert_close(part, tokens, rtol=0, atol=0, equal_nan=True)
    assert whole[:, [0, 1, -1]].eq(7).all()


def make_states(grid, num_seqs, *, nheads=2, headdim=3, dstate=500, seed=0):
    """More of a state than a program holds."""
    draw = torch.Generator().manual_seed(seed)
    chunks = len(grid.chunk_order)
    added = torch.randn(1, chunks, nheads, headdim, dstate, generator=draw)
    dA_cumsum = -torch.rand(1, nheads, chunks, CHUNK, generator=draw).cumsum(-1)
    initial_states = torch.randn(num_seqs, nheads, headdim, dstate, generator=draw)
    return [t.to(DEVICE) for t in (added, dA_cumsum, initial_states)]


def pass_states(grid, added, dA_cumsum, initial_states, dstates, dfinal_states):
    """Results of both kernels, by name."""
    args = added, dA_cumsum, grid, initial_states, torch.float32
    states, final_states = pass_states_fwd(*args, return_final_states=True)
    dadded, ddecays, dinitial_states = pass_states_bwd(
        dstates, states, dA_cumsum, grid, initial_states, dfinal_states, torch.float32
    )
    results = dict(states=states, final_states=final_states, dadded=dadded, ddecays=ddecays)
    if initial_states is not None:
        results["dinitial_states"] = dinitial_states
    return results


def in_turns(grid, added, dA_cumsum, initial_states, dstates, dfinal_states):
    """The same from the reference in float64."""
    leaves = [t.double() for t in (added[0], dA_cumsum[0, ..., -1], initial_states)]
    added, last_sums, initial_states = (t.requires_grad_() for t in leaves)
    decays = last_sums.exp().t()[..., None, None]
    states, final_states = grid.pass_states(decays, added, initial_states)
    incoming = dstates[0].double(), dfinal_states.double()
    grads = torch.autograd.grad((states, final_states), leaves, incoming)
    return dict(
        states=states.detach()[None],
        final_states=final_states.detach(),
        dadded=grads[0][None],
        ddecays=grads[1][None],
        dinitial_states=grads[2],
    )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_states_pass_as_in_the_reference(lengths):
    grid = make_grid(lengths)
    added, dA_cumsum, initial_states = make_states(grid, len(lengths))
    incoming = [eighths(t.shape, seed).to(t) for seed, t in enumerate((added, initial_states))]
    actual = pass_states(grid, added, dA_cumsum, initial_states, *incoming)
    exact = in_turns(grid, added, dA_cumsum, initial_states, *incoming)
    errors = {name: relative_rms(actual[name], exact[name]) for name in exact}
    assert max(errors.values()) < 1e-6, errors


def test_no_states_given_are_zeros():
    grid = make_grid([9, 1, 6])
    added, dA_cumsum, initial_states = make_states(grid, 3)
    incoming = [eighths(t.shape, seed).to(t) for seed, t in enumerate((added, initial_states))]
    actual = pass_states(grid, added, dA_cumsum, None, incoming[0], None)
    incoming[1].zero_()
    zeros = pass_states(grid, added, dA_cumsum, torch.zeros_like(initial_states), *incoming)
    assert actual.keys() < zeros.keys()
    for name, result in actual.items():
        assert torch.equal(result, zeros[name]), name


def test_states_are_rounded_once():
    grid = make_grid([9, 1, 6])
    added, dA_cumsum, initial_states = make_states(grid, 3)
    args = added, dA_cumsum, grid, initial_states.half()
    states, final_states = pass_states_fwd(*args, torch.float32, return_final_states=True)
    rounded, unwanted = pass_states_fwd(*args, torch.float16, return_final_states=False)
    assert unwanted is None
    assert torch.equal(rounded, states.half())
    assert not torch.equal(rounded, states)
    _, again = pass_states_fwd(*args, torch.float16, return_final_states=True)
    assert torch.equal(again, final_states)
    assert final_states.dtype == torch.float32


def test_gradients_of_states_are_given_in_the_dtype_of_each():
    grid = make_grid([9, 1, 6])
    added, dA_cumsum, initial_states = make_states(grid, 3)
    args = added, added, dA_cumsum, grid
    wide = pass_states_bwd(*args, initial_states, None, torch.float32)
    low = pass_states_bwd(*args, initial_states.half(), None, torch.float16)
    assert torch.equal(low[0], wide[0].half())
    assert torch.equal(low[1], wide[1])
    assert torch.equal(low[2], wide[2].half())
    # nothing is computed in the dtype of the states
    rest = dA_cumsum, grid, None, None, torch.float32
    low, wide = (pass_states_bwd(added, t, *rest) for t in (added.half(), added.half().float()))
    assert torch.equal(low[1], wide[1])


def test_states_of_a_document_are_its_own():
    lengths, i_seq = [9, 1, 6, 2], 2
    grid = make_grid(lengths)
    added, dA_cumsum, initial_states = make_states(grid, len(lengths))
    incoming = [eighths(t.shape, seed).to(t) for seed, t in enumerate((added, initial_states))]
    before = pass_states(grid, added, dA_cumsum, initial_states, *incoming)
    first, end = grid.cu_chunks[i_seq : i_seq + 2].tolist()
    for tensor in (added, incoming[0]):
        tensor[:, first:end] = torch.nan
    dA_cumsum[:, :, first:end] = torch.nan
    for tensor in (initial_states, incoming[1]):
        tensor[i_seq] = torch.nan
    after = pass_states(grid, added, dA_cumsum, initial_states, *incoming)
    for name, result in after.items():
        axis = {"states": 1, "dadded": 1, "ddecays": 2}.get(name, 0)
        own = range(first, end) if axis else [i_seq]
        others = [i for i in range(result.shape[axis]) if i not in own]
        kept, changed = (
            t.index_select(axis, torch.tensor(others, device=DEVICE))
            for t in (before[name], result)
        )
        assert torch.equal(changed, kept), name
        assert result.isnan().any(), name


def make_decays(lengths, chunk_size, nheads):
    """Step sizes with one NaN, rates, and gradients of all that is made of them."""
    draw = torch.Generator().manual_seed(0)
    grid = make_grid(lengths, chunk_size)
    # a slice, as a layer may return one
    dt = torch.rand(sum(lengths), nheads + 1, generator=draw)[:, 1:]
    dt[3, 1] = torch.nan
    A = -torch.rand(nheads, generator=draw)
    shape = 1, nheads, len(grid.chunk_order), chunk_size
    incoming = [*torch.randn(4, *shape, generator=draw), torch.randn(shape[:3], generator=draw)]
    return grid, dt.to(DEVICE), A.to(DEVICE), [t.to(DEVICE) for t in incoming]


# a program takes all heads, or some of them and the last one the rest
@pytest.mark.parametrize(("chunk_size", "nheads"), [(2, 3), (256, 11), (1024, 3)])
def test_decays_are_summed_within_chunks(chunk_size, nheads):
    grid, dt, A, (within, to_end, dsums, dsteps, dlast) = make_decays(
        [5, 1, 300, 3], chunk_size, nheads
    )
    leaves = [t.double().requires_grad_() for t in (dt, A)]
    exact_steps = grid.scatter(leaves[0]).movedim(-1, 0)[None]
    logs = exact_steps * leaves[1][:, None, None]
    exact_sums = logs.cumsum(-1)
    exact = torch.autograd.grad(
        (logs, exact_sums, exact_sums[..., -1], exact_steps),
        leaves,
        [t.double() for t in (within + to_end, dsums, dlast, dsteps)],
    )
    steps, sums = decays_fwd(dt, A, grid)
    grads = decays_bwd(within, to_end, dsums, dlast, dsteps, steps, A, grid)
    assert torch.equal(steps.nan_to_num(9), exact_steps.float().nan_to_num(9))
    for name, actual, expected in (("sums", sums, exact_sums), *zip(("ddt", "dA"), grads, exact)):
        assert actual.dtype == torch.float32, name
        assert torch.equal(actual.isnan(), expected.isnan()), name
        assert relative_rms(actual.nan_to_num(), expected.nan_to_num()) < 1e-6, name
    assert sums.isnan().any()
    assert grads[1].isnan().any()


def test_nothing_of_a_document_reaches_the_decays_of_others():
    lengths, i_seq = [5, 1, 30, 3], 2
    grid, dt, A, incoming = make_decays(lengths, CHUNK, 3)
    own = slice(6, 36)
    first, end = grid.cu_chunks[i_seq : i_seq + 2].tolist()

    def run():
        steps, sums = decays_fwd(dt, A, grid)
        within, to_end, dsums, dsteps, dlast = incoming
        ddt, _ = decays_bwd(within, to_end, dsums, dlast, dsteps, steps, A, grid)
        return dict(sums=sums, ddt=ddt)

    dt[3, 1] = 0.5
    before = run()
    dt[own] = torch.nan
    for t in incoming:
        t[:, :, first:end] = torch.nan
    after = run()
    assert after["ddt"][own].isnan().all()
    assert torch.equal(after["ddt"][:6], before["ddt"][:6])
    assert torch.equal(after["ddt"][36:], before["ddt"][36:])
    chunks = [i for i in range(len(grid.chunk_order)) if not first <= i < end]
    assert torch.equal(after["sums"][:, :, chunks], before["sums"][:, :, chunks])


HALVES = [torch.float16, torch.bfloat16] if GPU else [torch.float16]


def run_norm(norm, inputs, *, grid=None):
    """Results by name; with a grid the first input is laid into it."""
    y, z, weight = (t.to(DEVICE) for t in inputs)
    if grid is not None:
        y = copy_rows(y, grid.sources)[None]
    leaves = [t.detach().requires_grad_() for t in (y, z, weight)]
    out = norm(*leaves)
    grads = torch.autograd.grad(out, leaves, eighths(out.shape).to(out))
    results = (out.detach(), *grads)
    return {n: t.cpu() for n, t in zip(("out", "dy", "dz", "dweight"), results)}


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("before_gate", [False, True])
# of one warp, of several, of a part of one
@pytest.mark.parametrize(("ngroups", "headdim"), [(1, 20), (1, 150), (4, 20)])
def test_gated_norm_errs_like_eager(ngroups, headdim, before_gate, dtype):
    # more than a program of the backward takes
    grid = make_grid([3, 1, 40, 2])

    def eager_norm(y, z, weight):
        return gate_and_norm(y, z, weight, ngroups, before_gate)

    def kernels(y, z, weight):
        norm = GatedNorm(weight, 1e-5, before_gate)
        return triton_gated_norm.gate_and_norm(y, z, norm, grid, ngroups, None)

    draws = []
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randn(46, 3, 8, headdim, generator=draw).to(dtype)
        # slices, as of what a layer has projected; and a weight that stays wide
        inputs = tokens[:, 0], tokens[:, 1], tokens[0, 2].flatten().float()
        exact = run_norm(eager_norm, [t.double() for t in inputs])
        eager = run_norm(eager_norm, [t.float() for t in inputs])
        eager = {n: t if n == "dweight" else t.to(dtype) for n, t in eager.items()}
        actual = run_norm(kernels, inputs, grid=grid)
        gaps = grid.sources.cpu() < 0
        assert actual["dy"][0, gaps].numel()
        assert actual["dy"][0, gaps].eq(0).all()
        actual["dy"] = actual["dy"][0, grid.slots.cpu()]
        draws.append((actual, eager, exact))
    # the special-function unit errs by 2 units in the last place
    assert_errs_like_eager(*zip(*draws), factor=3 if GPU else 2)
    rounded = run_norm(kernels, [*inputs[:2], inputs[2].to(dtype)], grid=grid)["dweight"]
    assert rounded.dtype == dtype
    assert relative_rms(rounded, exact["dweight"]) < 4 * torch.finfo(dtype).eps


def test_a_gated_norm_takes_tensors_in_any_order_of_memory():
    grid = make_grid([3, 1])
    draw = torch.Generator().manual_seed(0)
    shapes = (1, 8, 2, 4), (4, 2, 4), (8,), (4, 2, 4)
    tensors = [torch.randn(shape, generator=draw).to(DEVICE) for shape in shapes]

    def run(tensors):
        y, z, weight = leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        out = triton_gated_norm.gate_and_norm(y, z, GatedNorm(weight, 1e-5), grid, 2, None)
        return out, *torch.autograd.grad(out, leaves, tensors[3])

    expected = run(tensors)
    for i, tensor in enumerate(tensors):
        orders = [torch.stack([tensor, tensor], -1)[..., 0]]
        if tensor.ndim > 1:
            orders.append(tensor.mT.contiguous().mT)
        for other in orders:
            assert not other.is_contiguous()
            for result, of_contiguous in zip(
                run([*tensors[:i], other, *tensors[i + 1 :]]), expected
            ):
                assert torch.equal(result, of_contiguous)


def test_rows_of_a_gated_norm_may_lie_as_far_apart_as_memory_reaches():
    grid, dim, far = make_grid([2, 1]), 8, 2**30
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(3, 2, 4, generator=draw, dtype=torch.float16) for _ in range(3)]
    y, z, dout = (t.to(DEVICE) for t in inputs)
    # offsets that had 32 bits would lead into the first half, of which nothing is used
    memory = torch.empty(2**32 + 3 * dim, dtype=torch.float16, device=DEVICE)
    parts = [memory.as_strided((3, 2, 4), (far, 4, 1), 2**31 + i_part * dim) for i_part in range(3)]

    def run(z, dout, dz_out):
        leaves = copy_rows(y, grid.sources)[None].requires_grad_(), z.detach().requires_grad_()
        norm = GatedNorm(torch.ones(dim, device=DEVICE), 1e-5)
        out = triton_gated_norm.gate_and_norm(*leaves, norm, grid, 2, dz_out)
        return out, *torch.autograd.grad(out, leaves, dout)

    expected = run(z, dout, None)
    actual = run(
        parts[0].copy_(z), parts[1].copy_(dout), SimpleNamespace(allocate=lambda: parts[2])
    )
    assert actual[2].is_set_to(parts[2])
    for result, near in zip(actual, expected):
        assert torch.equal(result, near)


# -- between stand-ins of mamba_ssm's kernels -----------------------------------------------------


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(mamba_ssm, "why_not_mamba_ssm", lambda x: None)
    monkeypatch.setattr(mamba_ssm, "_kernels", lambda: ssd_stand_ins)


def run(inputs, *, op=ssd, **options):
    inputs = {name: t.to(DEVICE) for name, t in inputs.items()}
    return outputs_and_grads(op, inputs, dt_softplus=True, **options)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("without", [(), ("z",), ("D", "initial_states"), ("z", "D")], ids=str)
@pytest.mark.parametrize("chunk_size", [2, 16])
def test_the_kernels_in_their_order_are_the_op(chunk_size, without):
    inputs = make_inputs([7, 1, 1, 20, 3], dtype=torch.float32)
    for name in without:
        del inputs[name]
    exact = run(in_float64(inputs), impl="reference")
    actual = run(inputs, impl="mamba_ssm", chunk_size=chunk_size)
    assert actual.keys() == exact.keys()
    errors = {name: relative_rms(actual[name], exact[name]) for name in exact}
    # that of A, whose summands cancel each other, is the largest
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.usefixtures("stand_ins")
def test_skip_weights_of_every_channel():
    inputs = make_inputs([7, 1, 20], dtype=torch.float32)
    inputs["D"] = eighths((4, 3)).float()
    exact = run(in_float64(inputs), impl="reference")
    actual = run(inputs, impl="mamba_ssm", chunk_size=4)
    assert max(relative_rms(actual[name], exact[name]) for name in exact) < 3e-6


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("before_gate", [False, True])
@pytest.mark.parametrize("ngroups", [1, 2])
def test_the_norm_after_the_kernels(ngroups, before_gate):
    inputs = with_norm(make_inputs([7, 1, 1, 20, 3], ngroups=ngroups, dtype=torch.float32))
    options = dict(op=normed_ssd, before_gate=before_gate)
    exact = run(in_float64(inputs), impl="reference", **options)
    actual = run(inputs, impl="mamba_ssm", chunk_size=4, **options)
    errors = {name: relative_rms(actual[name], exact[name]) for name in exact}
    assert max(errors.values()) < 3e-6, errors


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("i_seq", range(4))
def test_a_document_leaves_the_bits_of_the_others_alone(i_seq, is_normed):
    inputs = make_inputs([7, 1, 20, 3], dtype=torch.float32)
    options = dict(impl="mamba_ssm", chunk_size=4)
    if is_normed:
        inputs = with_norm(inputs)
        options |= dict(op=normed_ssd, before_gate=False)
    before = run(inputs, **options)
    replaced, others = with_document_replaced(inputs, i_seq, torch.nan)
    after = run(replaced, **options)
    for name in ("y", "dx", "ddt", "dB", "dC", "dz"):
        assert torch.equal(after[name][:, others], before[name][:, others]), name
        assert after[name].isnan().any(), name
    states = torch.arange(4) != i_seq
    for name in ("final_states", "dinitial_states"):
        assert torch.equal(after[name][states], before[name][states]), name


@pytest.mark.usefixtures("stand_ins")
def test_states_are_kept_for_a_backward_that_follows_at_once():
    inputs = make_inputs([7, 1, 20, 3], dtype=torch.float32)

    def run_and_count():
        sizes = []

        def note(t):
            sizes.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            return run(inputs, impl="mamba_ssm", chunk_size=4), sizes

    made_again, without = run_and_count()
    with backward_follows():
        kept, sizes = run_and_count()
    for name in kept:
        assert torch.equal(kept[name], made_again[name]), name
    assert len(sizes) == len(without)
    # 9 chunks, 4 heads of 3 channels of 5 states
    assert sum(sizes) == sum(without) + 9 * 4 * 3 * 5


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("needed", [False, True])
def test_gradients_of_initial_states_are_made_if_needed(needed, monkeypatch):
    made = []

    def note(*args):
        result = pass_states_bwd(*args)
        made.append(result[-1])
        return result

    monkeypatch.setattr(mamba_ssm_function, "pass_states_bwd", note)
    inputs = {n: t.to(DEVICE) for n, t in make_inputs([7, 4], dtype=torch.float32).items()}
    x, initial_states = inputs["x"].requires_grad_(), inputs["initial_states"]
    initial_states.requires_grad_(needed)
    ssd(**inputs, impl="mamba_ssm").sum().backward()
    assert x.grad is not None
    assert (made[0] is not None) == (initial_states.grad is not None) == needed


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("output", ["y", "final_states"])
def test_either_output_alone_has_gradients(output):
    inputs = {n: t.to(DEVICE) for n, t in make_inputs([7, 4], dtype=torch.float32).items()}
    inputs["x"].requires_grad_()
    options = dict(dt_softplus=True, return_final_states=True)
    grads = []
    for impl in ("mamba_ssm", "reference"):
        result = getattr(ssd(**inputs, **options, impl=impl), output)
        grads.append(torch.autograd.grad(result.sum(), inputs["x"])[0])
    assert relative_rms(*grads) < 3e-6


def cut(lengths, chunk_size=None, *, heads=(128, 64), groups=(1, 128)):
    """Size of the chunks, by default for Bamba-9B."""
    cu_seqlens = PackedLayout.from_lengths(lengths).cu_seqlens
    x, B = (torch.empty(sum(lengths), *shape, device="meta") for shape in (heads, groups))
    return mamba_ssm._cut_into_chunks(cu_seqlens, chunk_size, x, B).chunk_size


def test_chunks_are_larger_where_the_kernels_could_not_count_as_many():
    assert cut(511 * [100]) == 32
    # 2620 chunks of 32 are too many
    assert cut(655 * [100]) == 64
    assert cut(1100 * [100]) == 128
    assert cut(655 * [100], 128) == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(lengths=655 * [100], chunk_size=32),
            "at most 2047 chunks of 32 tokens together for mamba_ssm, got 2620; "
            "take a larger chunk_size, put fewer documents",
        ),
        (
            dict(lengths=2048 * [1]),
            "at most 1023 chunks of 256 tokens together for mamba_ssm, got 2048; put fewer",
        ),
        (
            dict(lengths=4096 * [1], chunk_size=256, heads=(8, 16), groups=(8, 16)),
            "at most 4095 chunks of 256 tokens together for mamba_ssm, got 4096; put fewer",
        ),
        (
            dict(lengths=8192 * [1], chunk_size=32, heads=(8, 16), groups=(8, 16)),
            "at most 8191 chunks of 32 tokens together for mamba_ssm, got 8192; take a larger",
        ),
    ],
    ids=["states", "x", "products", "programs"],
)
def test_more_chunks_than_the_kernels_can_count_are_refused(arguments, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        cut(**arguments)
