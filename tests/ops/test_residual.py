"""add_to_residual: the kernel against PyTorch's own sum, to the bit, and its refusals."""

import pytest
import torch

from xtuner_mamba.ops.residual import add_to_residual
from xtuner_mamba.testing import eighths

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * GPU, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 33, 100), (2, 41, 25), (1, 33, 160)], ids=str)
def test_is_the_sum_to_the_bit(shape, dtype):
    draw = torch.Generator().manual_seed(0)
    residual = torch.randn(shape, generator=draw).to(DEVICE).requires_grad_()
    # a slice, as a layer may return one
    wide = torch.randn((*shape[:-1], 2 * shape[-1]), generator=draw).to(DEVICE, dtype)
    update = wide[..., : shape[-1]].requires_grad_()
    incoming = eighths(shape).to(DEVICE)
    expected = residual + update
    actual = add_to_residual(residual, update)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, residual)
    gradients = torch.autograd.grad(actual, (residual, update), incoming)
    for gradient, of_sum in zip(
        gradients, torch.autograd.grad(expected, (residual, update), incoming)
    ):
        assert gradient.dtype == of_sum.dtype
        assert torch.equal(gradient, of_sum)


def test_refusals():
    residual = torch.zeros(1, 3, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"shape of residual, \(1, 3, 4\), got \(1, 3, 5\)"):
        add_to_residual(residual, torch.zeros(1, 3, 5, device=DEVICE))
    with pytest.raises(ValueError, match=r"got torch.float64; add them in plain PyTorch"):
        add_to_residual(residual, residual.double())
