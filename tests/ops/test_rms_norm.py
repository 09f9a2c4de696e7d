"""rms_norm: the kernels against float64 and against transformers' own block, and its refusals."""

import pytest
import torch
from transformers.models.mamba.modeling_mamba import MambaRMSNorm

from xtuner_mamba.ops import rms_norm
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
    x, weight = (t.double().requires_grad_() for t in make_inputs((1, 3, 5)))

    def norm(x, weight, update):
        return rms_norm(x, weight, update=update, eps=EPS, impl="reference")

    update = torch.full_like(x, 0.1, requires_grad=True)
    assert torch.autograd.gradcheck(norm, [x, weight, update])


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


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("residual_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("x_dtype", "update_dtype", "dtype"),
    [
        (torch.float32, torch.float32, None),
        (torch.float32, torch.float16, torch.float16),
        (torch.float32, torch.float16, None),
        (torch.float16, torch.float16, None),
    ],
    ids=str,
)
def test_an_update_is_added_before(x_dtype, update_dtype, dtype, residual_dtype, impl):
    x, weight = (t.to(DEVICE) for t in make_inputs((1, 33, 100), x_dtype, dtype or x_dtype))
    # rows that lie apart
    update = make_inputs((1, 33, 200), update_dtype, seed=1)[0].to(DEVICE)[..., :100]
    leaves = [t.detach().requires_grad_() for t in (x, weight, update)]
    options = dict(eps=EPS, dtype=dtype, residual_dtype=residual_dtype, impl=impl)
    actual = rms_norm(*leaves[:2], update=leaves[2], **options)
    incoming = [eighths(t.shape, seed).to(t) for seed, t in enumerate(actual)]
    dx, dweight, dupdate = torch.autograd.grad(actual, leaves, incoming)

    total = (leaves[0] + leaves[2]).detach().requires_grad_()
    expected = rms_norm(total, leaves[1], **options)
    dtotal, expected_dweight = torch.autograd.grad(expected, [total, leaves[1]], incoming)
    assert all(map(torch.equal, actual, expected))
    assert torch.equal(dx, dtotal)
    assert torch.equal(dweight, expected_dweight)
    assert torch.equal(dupdate, dtotal.to(update_dtype))


def test_an_update_of_an_unused_norm_gets_its_gradient():
    x, weight = (t.to(DEVICE) for t in make_inputs((1, 5, 8)))
    leaves = [t.requires_grad_() for t in (x, torch.ones_like(x).half())]
    _, residual = rms_norm(leaves[0], weight, update=leaves[1], eps=EPS, impl="triton")
    dresidual = eighths(residual.shape).to(residual)
    grads = torch.autograd.grad(residual, leaves, dresidual)
    assert torch.equal(grads[0], dresidual)
    assert torch.equal(grads[1], dresidual.half())


def test_gradients_of_both_summands_do_not_share_memory():
    x, weight = (t.to(DEVICE) for t in make_inputs((1, 5, 8)))
    leaves = [x.requires_grad_(), torch.ones_like(x, requires_grad=True)]
    for _ in range(2):
        y, _ = rms_norm(leaves[0], weight, update=leaves[1], eps=EPS, impl="triton")
        y.backward(eighths(y.shape).to(y))
    # .grad was added to once, in place
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    leaves[0].grad.zero_()
    assert leaves[1].grad.any()


def test_results_may_be_written_into():
    x, weight = (t.to(DEVICE) for t in make_inputs((1, 3, 8)))
    weight.requires_grad_()
    results = rms_norm(x, weight, eps=EPS, residual_dtype=torch.float16, impl="triton")
    expected = results.y.sum().item()
    for result in results:
        result.mul_(2)
    torch.testing.assert_close(results.y.sum().item(), 2 * expected)


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
        (dict(update=torch.ones(2, 5)), r"shape of x, \(2, 4\), got \(2, 5\)"),
        (dict(update=torch.ones(2, 4).double()), "dtype of x, torch.float32, .* got torch.float64"),
        (dict(impl="cuda"), "got 'cuda'"),
        (dict(x=torch.ones(2, 4).double(), impl="triton"), "got torch.float64; take impl="),
    ],
    ids=str,
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(**{"x": torch.ones(2, 4), "weight": torch.ones(4), "eps": EPS} | arguments)
