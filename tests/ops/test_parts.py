"""split_parts: the gradients of split, without its copy where ops take the offer."""

import re

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from xtuner_mamba.ops.parts import split_parts

SIZES = [4, 1, 5]
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


def square(x, dx_out):
    return Squares.apply(x, dx_out).sum()


def told(tensors, gradients):
    a, b, c = map(square, tensors, gradients)
    return a + 2 * b + 3 * c


def first_alone(tensors, gradients):
    return square(tensors[0], gradients[0])


def narrow_one_by_another_op(tensors, gradients):
    a, b, c = tensors
    return square(a, gradients[0]) + b.exp().sum() + 3 * square(c, gradients[2])


def all_by_other_ops(tensors, gradients):
    return sum(t.exp().sum() for t in tensors)


def two_readers(tensors, gradients):
    return told(tensors, gradients) + tensors[0].exp().sum()


def two_writers(tensors, gradients):
    return 3 * square(tensors[0], gradients[0]) + told(tensors, gradients)


def replaced_by_a_hook(tensors, gradients):
    tensors[0].register_hook(lambda gradient: 5 * gradient)
    return told(tensors, gradients)


def changed_by_a_hook(tensors, gradients):
    tensors[2].register_hook(lambda gradient: gradient.mul_(5))
    return told(tensors, gradients)


def told_of_another_whole(tensors, gradients):
    others = split_parts(torch.zeros(2, 3, 10), SIZES).gradients
    return told(tensors, [gradients[0], gradients[1], others[2]])


def make_whole():
    whole = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(0))
    return whole.requires_grad_()


def gradient_of_split(use):
    whole = make_whole()
    (gradient,) = torch.autograd.grad(use(whole.split(SIZES, dim=-1), 3 * [None]), whole)
    return gradient


@pytest.mark.parametrize(
    ("use", "is_shared"),
    [
        (told, True),
        (changed_by_a_hook, True),
        (first_alone, True),
        (narrow_one_by_another_op, True),
        (told_of_another_whole, True),
        (all_by_other_ops, False),
        (two_readers, False),
        (two_writers, False),
        (replaced_by_a_hook, False),
    ],
)
def test_gradients_are_those_of_split(use, is_shared):
    expected = gradient_of_split(use)
    written.clear()
    whole = make_whole()
    tensors, gradients = split_parts(whole, SIZES)
    assert all(map(torch.equal, tensors, whole.split(SIZES, dim=-1)))
    (gradient,) = torch.autograd.grad(use(tensors, gradients), whole)
    assert torch.equal(gradient, expected)
    assert gradient.is_contiguous()
    assert any(gradient.data_ptr() == dx.data_ptr() for dx in written) is is_shared


def test_halves_told_of_each_others_places():
    whole = make_whole()
    halves, (dfirst, dsecond) = split_parts(whole, [5, 5])
    (gradient,) = torch.autograd.grad(sum(map(square, halves, (dsecond, dfirst))), whole)
    assert torch.equal(gradient, 2 * whole)


def test_a_second_backward_leaves_the_first_ones_gradient_alone():
    whole = make_whole()
    y = told(*split_parts(whole, SIZES))
    (once,) = torch.autograd.grad(y, whole, retain_graph=True)
    kept = once.clone()
    (twice,) = torch.autograd.grad(7 * y, whole)
    assert torch.equal(once, kept)
    assert torch.allclose(twice, 7 * kept)
    # neither was copied
    starts = {dx.data_ptr() for dx in written}
    assert len(starts | {once.data_ptr(), twice.data_ptr()}) == len(starts) == 6


@pytest.mark.parametrize("i_part", range(3))
def test_a_part_in_somebodys_hands_is_left_alone(i_part):
    """A backward that stops at a part, and never comes to the whole."""
    whole = make_whole()
    tensors, gradients = split_parts(whole, SIZES)
    y = told(tensors, gradients)
    (held,) = torch.autograd.grad(y, tensors[i_part], retain_graph=True)
    kept = held.clone()
    (gradient,) = torch.autograd.grad(7 * y, whole)
    assert torch.equal(held, kept)
    assert torch.allclose(gradient, 7 * gradient_of_split(told))


def test_a_gradient_in_somebodys_hands_is_not_written_over():
    """It was replaced on its way, but its place is not free."""
    tensors, gradients = split_parts(make_whole(), SIZES)
    held = []

    def hold(gradient):
        held.append((gradient, gradient.clone()))
        return 5 * gradient

    tensors[0].register_hook(hold)
    told(tensors, gradients).backward()
    assert torch.equal(*held[0])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    expected = gradient_of_split(told)
    written.clear()
    whole = make_whole()
    arrived = []

    def run(whole):
        inner = whole * 1
        if inner.requires_grad:
            inner.register_hook(arrived.append)
        return told(*split_parts(inner, SIZES))

    checkpoint(run, whole, use_reentrant=use_reentrant).backward()
    assert torch.equal(whole.grad, expected)
    assert arrived[0].data_ptr() in [dx.data_ptr() for dx in written]


def test_memory_is_there_from_the_first_write_to_the_last_only():
    tensors, gradients = split_parts(make_whole(), SIZES)
    narrow_one_by_another_op(tensors, gradients).backward()
    assert gradients[0].whole._memory is None
    assert gradients[0].whole._free == {}


def test_gradients_are_not_differentiated_again():
    whole = make_whole()
    (first, second), _ = split_parts(whole, [5, 5])
    (gradient,) = torch.autograd.grad((first**3 * second).sum(), whole, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_sizes_that_do_not_add_up_are_refused():
    message = "sizes must add up to whole's last dimension, 5, got [2, 2]"
    with pytest.raises(ValueError, match=re.escape(message)):
        split_parts(torch.zeros(2, 5), [2, 2])
