"""rms_norm: the kernels against float64 and against transformers' own block, and its refusals."""

import pytest
import torch
from transformers.models.mamba.modeling_mamba import MambaRMSNorm

from xtuner_mamba.ops import add_before_norm, rms_norm
from xtuner_mamba.ops.rms_norm import triton
from xtuner_mamba.testing import assert_as_accurate_as_eager, eighths, relative_rms

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# x, weight and what x is rounded to: in half precision a block rounds a float32 residual
LOW = [torch.float16] + [torch.bfloat16] * GPU
DTYPES = [(torch.float32, torch.float32, None)]
DTYPES += [(low, low, None) for low in LOW] + [(torch.float32, low, low) for low in LOW]
DTYPES += [(torch.float32, low, None) for low in LOW]
# one token, one less and one more than a program of the backward takes, and no power of two
SHAPES = [(1, 1, 8), (1, 31, 24), (1, 32, 24), (2, 33, 100)] + [(1, 3000, 2048)] * GPU
EPS = 1e-5


def make_inputs(shape, x_dtype=torch.float32, weight_dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(shape, generator=draw)
    weight = 1 + 0.5 * torch.randn(shape[-1], generator=draw)
    return x.to(x_dtype), weight.to(weight_dtype)


def run(inputs, *, impl, **options):
    """Both results and both gradients, on the CPU."""
    device = DEVICE if impl == "triton" else "cpu"
    leaves = [t.to(device).detach().requires_grad_() for t in inputs]
    results = rms_norm(*leaves, eps=EPS, impl=impl, **options)
    incoming = [eighths(t.shape, seed).to(t) for seed, t in enumerate(results)]
    grads = torch.autograd.grad(results, leaves, incoming)
    named = dict(zip(("y", "residual", "dx", "dweight"), (*results, *grads)))
    return {name: t.detach().cpu() for name, t in named.items()}


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_are_as_accurate_as_eager(shape, dtypes):
    x_dtype, weight_dtype, dtype = dtypes
    inputs = make_inputs(shape, x_dtype, weight_dtype)
    options = dict(dtype=dtype, residual_dtype=torch.float32)
    actual = run(inputs, impl="triton", **options)
    eager = run(inputs, impl="reference", **options)
    options = dict(dtype=torch.float64, residual_dtype=torch.float64)
    exact = run([t.double() for t in inputs], impl="reference", **options)
    for name in exact:
        assert_as_accurate_as_eager(name, actual[name], eager[name], exact[name])


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_equals_transformers_norm(impl):
    x, weight = make_inputs((2, 33, 100))
    norm = MambaRMSNorm(100, eps=EPS)
    norm.weight.data.copy_(weight)
    actual = run((x, weight), impl=impl)["y"]
    torch.testing.assert_close(actual, norm(x).detach(), rtol=1e-6, atol=1e-6)


def test_reference_gradients_are_exact():
    inputs = [t.double().requires_grad_() for t in make_inputs((1, 3, 5))]
    assert torch.autograd.gradcheck(lambda *t: rms_norm(*t, eps=EPS, impl="reference"), inputs)


def test_a_token_changes_no_bit_of_the_others():
    x, weight = make_inputs((1, 70, 24))
    poisoned = x.clone()
    poisoned[:, 40] = torch.nan
    others = torch.arange(70) != 40
    before, after = (run((t, weight), impl="triton") for t in (x, poisoned))
    for name in ("y", "residual", "dx"):
        assert torch.equal(before[name][:, others], after[name][:, others]), name
        assert after[name][:, 40].isnan().any(), name


def test_residual_and_norm_may_each_be_left_unused():
    inputs = make_inputs((1, 5, 8))
    both = run(inputs, impl="triton")
    leaves = [t.to(DEVICE).requires_grad_() for t in inputs]
    y, residual = rms_norm(*leaves, eps=EPS, impl="triton")
    incoming = [eighths(t.shape, seed).to(t) for seed, t in enumerate((y, residual))]
    of_y = torch.autograd.grad(y, leaves, incoming[0], retain_graph=True)
    of_residual = torch.autograd.grad(residual, leaves[0], incoming[1])
    assert relative_rms(of_y[0].cpu() + of_residual[0].cpu(), both["dx"]) < 1e-6
    assert torch.equal(of_y[1].cpu(), both["dweight"])


@pytest.fixture
def norms(monkeypatch):
    """Count the launches of the norm's kernel."""
    launched = []
    launch = triton._norm_fwd
    monkeypatch.setattr(triton, "_norm_fwd", lambda *a: launched.append(1) or launch(*a))
    return launched


SUMS = [
    (torch.float32, torch.float32, None),
    (torch.float32, torch.float16, torch.float16),
    (torch.float32, torch.float16, None),
    (torch.float16, torch.float16, None),
]


def make_sum(x_dtype, update_dtype, dtype):
    x, weight = (t.to(DEVICE) for t in make_inputs((1, 33, 100), x_dtype, dtype or x_dtype))
    # rows that lie apart
    update = make_inputs((1, 33, 200), update_dtype, seed=1)[0].to(DEVICE)[..., :100]
    return [t.detach().requires_grad_() for t in (x, weight, update)]


def add(leaves, dtype, *, at_once):
    x, weight, update = leaves
    return add_before_norm(x, update, weight, eps=EPS, dtype=dtype) if at_once else x + update


def scale(total):
    total.register_hook(lambda gradient: gradient * 2)


def look(total):
    total.retain_grad()


def change(total):
    total.detach().mul_(2)


def leave(total):
    pass


@pytest.mark.parametrize("is_read", [False, True], ids=["the norm alone", "a second reader"])
@pytest.mark.parametrize("action", [leave, scale, look, change])
@pytest.mark.parametrize("dtypes", SUMS, ids=str)
def test_a_sum_is_the_same_with_a_norm_ahead(dtypes, action, is_read, norms):
    """What it is, its gradient and that of its summands, whatever is done with it."""
    results = {}
    for at_once in (True, False):
        leaves = make_sum(*dtypes)
        total = add(leaves, dtypes[2], at_once=at_once)
        assert len(norms) == at_once
        action(total)
        normed = rms_norm(total, leaves[1], eps=EPS, dtype=dtypes[2], impl="triton")
        # in vain, if the sum has changed
        assert len(norms) == 1 + (at_once and action is change)
        norms.clear()
        readers = [*normed, total] if is_read else normed
        incoming = [eighths(t.shape, seed).to(t) for seed, t in enumerate(readers)]
        wanted = leaves if action is change else [*leaves, total]
        results[at_once] = *normed, *torch.autograd.grad(readers, wanted, incoming)
    assert all(map(torch.equal, *results.values()))


def test_a_norm_ahead_of_other_arguments_is_made_again(norms):
    x, weight, update = make_sum(torch.float32, torch.float32, None)
    for changes in (dict(weight=weight * 2), dict(eps=1.0), dict(dtype=torch.float16)):
        total = add_before_norm(x, update, weight, eps=EPS)
        options = dict(weight=weight, eps=EPS) | changes
        again = rms_norm(total, **options, impl="triton")
        assert torch.equal(again.y, rms_norm(x + update, **options, impl="triton").y)
    assert len(norms) == 9


def test_rows_may_lie_apart():
    x, weight = make_inputs((1, 9, 16))
    wide = torch.cat([x, x], dim=-1)[..., :16]
    assert not wide.is_contiguous()
    apart, together = (run((t, weight), impl="triton") for t in (wide, x))
    for name in together:
        assert torch.equal(apart[name], together[name]), name


def test_same_bits_twice():
    inputs = make_inputs((1, 300, 64))
    first, second = (run(inputs, impl="triton") for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(weight=torch.ones(3)), r"got \(2, 4\) and \(3,\)"),
        (dict(x=torch.ones(0, 4)), r"got \(0, 4\) and \(4,\)"),
        (dict(x=torch.ones(2, 4, dtype=torch.long)), "got torch.int64"),
        (dict(impl="cuda"), "got 'cuda'"),
        (dict(x=torch.ones(2, 4).double(), impl="triton"), "got torch.float64; take impl="),
    ],
    ids=str,
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(**{"x": torch.ones(2, 4), "weight": torch.ones(4), "eps": EPS} | arguments)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (torch.ones(2, 5), r"got \(2, 4\), \(2, 5\) and \(4,\)"),
        (torch.ones(2, 4).double(), "dtype of x, torch.float32, .* got torch.float64"),
    ],
    ids=str,
)
def test_refusals_of_a_sum(update, message):
    with pytest.raises(ValueError, match=message):
        add_before_norm(torch.ones(2, 4), update, torch.ones(4), eps=EPS)
