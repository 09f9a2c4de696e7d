"""linear_cross_entropy: the kernel against float64, slices against the whole, and refusals."""

import pytest
import torch

from xtuner_mamba.layout import IGNORE_INDEX
from xtuner_mamba.ops import linear_cross_entropy
from xtuner_mamba.ops.linear_cross_entropy import triton as kernels
from xtuner_mamba.testing import assert_errs_like_eager, relative_rms

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU
# tokens, channels, vocabulary: one token; above one block of the vocabulary, no power of two
SIZES = [(1, 8, 5), (37, 16, 64), (20, 24, 5003)]


def make_inputs(total, dim, vocab, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(total, dim, generator=draw)
    weight = torch.randn(vocab, dim, generator=draw)
    targets = torch.randint(0, vocab, (total,), generator=draw)
    # a third has no target, but the first has one
    targets[1::3] = IGNORE_INDEX
    return x.to(dtype), weight.to(dtype), targets


def run(inputs, *, impl, scale=0.37):
    """Loss and gradients, on the CPU; the backward starts from an odd scale."""
    device = DEVICE if impl == "triton" else "cpu"
    x, weight, targets = (t.to(device) for t in inputs)
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    loss = linear_cross_entropy(*leaves, targets, impl=impl)
    grads = torch.autograd.grad(scale * loss, leaves)
    return {n: t.detach().cpu() for n, t in zip(("loss", "dx", "dweight"), (loss, *grads))}


@pytest.fixture(params=[1, 3])
def slices(request, monkeypatch):
    """Make the kernel take its tokens in one slice, or in several of unequal length."""

    def limit(total, vocab, dtype):
        whole = total * vocab * dtype.itemsize
        monkeypatch.setattr(kernels, "_MAX_SLICE_BYTES", -(-whole // request.param))

    return limit


@pytest.fixture
def _one_thread():
    """On several, BLAS adds the products of a slice up in another order than those of the whole."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernel_is_as_accurate_as_eager(sizes, dtype, slices):
    slices(sizes[0], sizes[2], dtype)
    draws = [make_inputs(*sizes, dtype, seed) for seed in range(4)]
    actual = [run(inputs, impl="triton") for inputs in draws]
    eager = [run(inputs, impl="reference") for inputs in draws]
    exact = [
        run((x.double(), weight.double(), targets), impl="reference")
        for x, weight, targets in draws
    ]
    # in float32 the special-function unit errs by 2 units in the last place, a CPU's exp by half
    assert_errs_like_eager(actual, eager, exact, factor=3 if GPU else 2)


def test_slices_change_no_token(monkeypatch):
    inputs = make_inputs(50, 8, 30)
    whole = run(inputs, impl="triton")
    monkeypatch.setattr(kernels, "_MAX_SLICE_BYTES", 7 * 30 * 4)
    sliced = run(inputs, impl="triton")
    for name in whole:
        assert relative_rms(sliced[name], whole[name]) < 1e-6, name


def test_a_token_without_target_adds_nothing_whatever_it_holds():
    x, weight, targets = make_inputs(10, 8, 30)
    clean = run((x, weight, targets), impl="triton")
    assert clean["dx"][targets == IGNORE_INDEX].abs().max() == 0
    x = x.clone()
    x[targets == IGNORE_INDEX] = torch.nan
    poisoned = run((x, weight, targets), impl="triton")
    assert torch.equal(poisoned["loss"], clean["loss"])
    others = targets != IGNORE_INDEX
    assert torch.equal(poisoned["dx"][others], clean["dx"][others])


def test_a_batch_without_targets_gives_zero():
    x, weight, _ = make_inputs(5, 8, 30)
    result = run((x, weight, torch.full((5,), IGNORE_INDEX)), impl="triton")
    for name, value in result.items():
        assert value.abs().max() == 0, name


def test_nan_in_the_logits_reaches_the_loss():
    x, weight, targets = make_inputs(4, 8, 30)
    weight[3] = torch.nan
    assert run((x, weight, targets), impl="triton")["loss"].isnan()


def test_autocast_rounds_as_a_linear_layer_does():
    x, weight, targets = make_inputs(12, 8, 30)
    x, weight, targets = (t.to(DEVICE) for t in (x, weight, targets))
    dtype = torch.float16 if not GPU else torch.bfloat16
    x.requires_grad_(), weight.requires_grad_()
    with torch.autocast(DEVICE.type, dtype):
        fused = linear_cross_entropy(x, weight, targets, impl="triton")
        plain = linear_cross_entropy(x, weight, targets, impl="reference")
    assert fused.dtype == plain.dtype == torch.float32
    exact = linear_cross_entropy(x, weight, targets, impl="reference")
    losses = fused, plain, exact
    for a, b, c in zip(*(torch.autograd.grad(loss, [x, weight]) for loss in losses)):
        assert a.dtype == torch.float32
        assert relative_rms(a, b) < 1e-3
        assert relative_rms(a, c) > 1e-5, "autocast rounded nothing"
    assert fused.item() == pytest.approx(plain.item(), rel=1e-3)


def test_gradients_are_computed_only_where_they_are_wanted(monkeypatch):
    wanted = []
    forward = kernels._linear_cross_entropy_fwd

    def spy(*args, needs_dx, needs_dweight):
        wanted.append((needs_dx, needs_dweight))
        return forward(*args, needs_dx=needs_dx, needs_dweight=needs_dweight)

    monkeypatch.setattr(kernels, "_linear_cross_entropy_fwd", spy)
    x, weight, targets = (t.to(DEVICE) for t in make_inputs(4, 8, 30))
    linear_cross_entropy(x.requires_grad_(), weight, targets, impl="triton").backward()
    with torch.no_grad():
        linear_cross_entropy(x, weight.requires_grad_(), targets, impl="triton")
    assert wanted == [(True, False), (False, False)]


def test_same_bits_twice():
    inputs = make_inputs(40, 16, 500)
    first, second = (run(inputs, impl="triton") for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.skipif(not GPU, reason="measures the memory of a GPU")
def test_the_logits_never_exist_as_a_whole():
    total, dim, vocab = 32768, 256, 50280
    x, weight, targets = (t.cuda() for t in make_inputs(total, dim, vocab, torch.bfloat16))
    x.requires_grad_(), weight.requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(x, weight, targets).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < kernels._MAX_SLICE_BYTES + 2**29 < total * vocab * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(x=torch.ones(1, 2, 4)), r"got \(1, 2, 4\), \(5, 4\) and \(2,\)"),
        (dict(weight=torch.ones(5, 3)), r"got \(2, 4\), \(5, 3\) and \(2,\)"),
        (dict(weight=torch.ones(5, 4).double()), "got torch.float32, torch.float64 and"),
        (dict(targets=torch.ones(2)), "and torch.float32"),
        (dict(impl="cuda"), "got 'cuda'"),
    ],
    ids=str,
)
def test_refusals(arguments, message):
    inputs = {
        "x": torch.ones(2, 4),
        "weight": torch.ones(5, 4),
        "targets": torch.ones(2, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**inputs | arguments)
