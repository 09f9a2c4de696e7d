"""Functions of the CPU kernels against PyTorch's in float64, and where numbers end."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import njit

from xtuner_mamba.ops import cpu_math

EXACT = {
    "exp2": torch.exp2,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "silu_slope": lambda v: v.sigmoid() * (1 + v * (1 - v.sigmoid())),
    # PyTorch's own rounds to v beyond its threshold
    "softplus": lambda v: torch.logaddexp(v, torch.zeros_like(v)),
}


def evaluate(name: str, values: torch.Tensor) -> torch.Tensor:
    function = getattr(cpu_math, name)

    @njit(**cpu_math.CALLED)
    def evaluate_all(values, results):
        for i in range(len(values)):
            results[i] = function(values[i])

    results = torch.empty_like(values)
    evaluate_all(values.numpy(), results.numpy())
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_good_to_a_few_roundings(name, dtype):
    values = torch.linspace(-40, 40, 10_001, dtype=dtype)
    exact = EXACT[name](values.double())
    # near a zero of its own a sum cannot be good to its last digits
    size = exact.abs() + (exact.abs() < 0.1) * (name == "silu_slope")
    error = ((evaluate(name, values) - exact).abs() / size).max().item()
    # the argument is rounded, too: 40 units of it are 58 of exp2's exponent
    assert error < 60 * torch.finfo(dtype).eps, error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exp2_is_exact_at_integers_and_ends_in_zero_and_infinity(dtype):
    integers = torch.arange(-126, 128, dtype=dtype)
    assert torch.equal(evaluate("exp2", integers), integers.exp2())
    ends = torch.tensor([-torch.inf, -1e9, 1e9, torch.inf], dtype=dtype)
    assert evaluate("exp2", ends).tolist() == [0, 0, np.inf, np.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_nan_stays_nan(name, dtype):
    assert evaluate(name, torch.tensor([torch.nan], dtype=dtype)).isnan().all()
