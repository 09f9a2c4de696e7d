"""split_halves: the gradients of chunk, without its copy where ops take the offer."""

import re

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from xtuner_mamba.ops.halves import split_halves

written = []


@pytest.fixture(autouse=True)
def _nothing_written():
    written.clear()


class Squares(torch.autograd.Function):
    """Stands for an op whose backward writes where it is told."""

    @staticmethod
    def forward(ctx, x, dx_out):
        ctx.save_for_backward(x)
        ctx.dx_out = dx_out
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty(x.shape) if ctx.dx_out is None else ctx.dx_out.allocate()
        written.append(dx)
        return torch.mul(dy, 2 * x, out=dx), None


square = Squares.apply


def both(first, second, dfirst=None, dsecond=None):
    return square(first, dfirst) + 3 * square(second, dsecond)


def first_alone(first, second, dfirst=None, dsecond=None):
    return square(first, dfirst)


def second_by_another_op(first, second, dfirst=None, dsecond=None):
    return square(first, dfirst) + second.exp()


def two_readers(first, second, dfirst=None, dsecond=None):
    return both(first, second, dfirst, dsecond) + first.exp()


def two_writers(first, second, dfirst=None, dsecond=None):
    return 3 * square(first, dfirst) + both(first, second, dfirst, dsecond)


def replaced_by_a_hook(first, second, dfirst=None, dsecond=None):
    first.register_hook(lambda gradient: 5 * gradient)
    return both(first, second, dfirst, dsecond)


def changed_by_a_hook(first, second, dfirst=None, dsecond=None):
    second.register_hook(lambda gradient: gradient.mul_(5))
    return both(first, second, dfirst, dsecond)


def exchanged(first, second, dfirst=None, dsecond=None):
    return both(first, second, dsecond, dfirst)


def make_whole():
    whole = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(0))
    return whole.requires_grad_()


def gradient_of_chunks(use):
    whole = make_whole()
    (gradient,) = torch.autograd.grad(use(*whole.chunk(2, dim=-1)).sum(), whole)
    return gradient


@pytest.mark.parametrize(
    ("use", "is_shared"),
    [
        (both, True),
        (changed_by_a_hook, True),
        (first_alone, False),
        (second_by_another_op, False),
        (two_readers, False),
        (two_writers, False),
        (replaced_by_a_hook, False),
        (exchanged, False),
    ],
)
def test_gradients_are_those_of_chunk(use, is_shared):
    expected = gradient_of_chunks(use)
    written.clear()
    whole = make_whole()
    halves = split_halves(whole)
    assert all(map(torch.equal, halves[:2], whole.chunk(2, dim=-1)))
    (gradient,) = torch.autograd.grad(use(*halves).sum(), whole)
    assert torch.equal(gradient, expected)
    assert gradient.is_contiguous()
    assert any(gradient.data_ptr() == dx.data_ptr() for dx in written) is is_shared


def test_a_second_backward_leaves_the_first_ones_gradient_alone():
    whole = make_whole()
    y = both(*split_halves(whole))
    (once,) = torch.autograd.grad(y.sum(), whole, retain_graph=True)
    kept = once.clone()
    (twice,) = torch.autograd.grad((7 * y).sum(), whole)
    assert torch.equal(once, kept)
    assert torch.allclose(twice, 7 * kept)
    # neither was copied
    starts = {dx.data_ptr() for dx in written}
    assert len(starts | {once.data_ptr(), twice.data_ptr()}) == len(starts) == 4


@pytest.mark.parametrize("i_half", [0, 1])
def test_a_half_in_somebodys_hands_is_left_alone(i_half):
    """A backward that stops at a half, and never comes to the whole."""
    whole = make_whole()
    halves = split_halves(whole)
    y = both(*halves).sum()
    (held,) = torch.autograd.grad(y, halves[i_half], retain_graph=True)
    kept = held.clone()
    (gradient,) = torch.autograd.grad((7 * y).sum(), whole)
    assert torch.equal(held, kept)
    assert torch.allclose(gradient.chunk(2, dim=-1)[i_half], 7 * kept)
    assert torch.allclose(gradient, 7 * gradient_of_chunks(both))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    expected = gradient_of_chunks(both)
    written.clear()
    whole = make_whole()
    arrived = []

    def run(whole):
        inner = whole * 1
        if inner.requires_grad:
            inner.register_hook(arrived.append)
        return both(*split_halves(inner))

    checkpoint(run, whole, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(whole.grad, expected)
    assert arrived[0].data_ptr() in [dx.data_ptr() for dx in written]


def test_memory_is_there_from_the_first_write_to_the_last_only():
    whole = make_whole()
    halves = split_halves(whole)
    both(*halves).sum().backward()
    assert halves.dfirst.whole._memory is None
    assert halves.dfirst.whole._free == {}


def test_gradients_are_not_differentiated_again():
    whole = make_whole()
    first, second, *_ = split_halves(whole)
    (gradient,) = torch.autograd.grad((first**3 * second).sum(), whole, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_an_odd_dimension_is_refused():
    with pytest.raises(ValueError, match=re.escape("an even last dimension, got shape (2, 5)")):
        split_halves(torch.zeros(2, 5))
