"""Inputs, oracles and tolerances shared by the tests and the benchmarks."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner_mamba.layout import PackedLayout

TOKEN_INPUTS = {"x", "dt", "B", "C", "z"}
"""Inputs of the ops that have a row for every token."""


def lognormal_lengths(total: int, seed: int = 0, *, scale: float = 1.0) -> list[int]:
    """Draw long-tailed document lengths that sum to ``total``.

    Log-normal(6.2, 0.85) kept in [57, 2048], mean 594, times ``scale``; the last document is cut
    to fit.
    """
    rng = np.random.default_rng(seed)
    lengths, room = [], total
    while room:
        length = int(rng.lognormal(6.2, 0.85))
        if 57 <= length <= 2048:
            lengths.append(min(max(1, round(scale * length)), room))
            room -= lengths[-1]
    return lengths


def make_scan_inputs(
    lengths: Sequence[int],
    *,
    dim: int = 5,
    dstate: int = 3,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Draw every tensor argument of ``selective_scan``, by name, with step sizes as in training.

    Parameters and states stay in float32 (float64) for half-precision ``dtype``.
    """
    draw = torch.Generator().manual_seed(seed)
    total, state_dtype = sum(lengths), torch.promote_types(dtype, torch.float32)
    tokens = {"x": dim, "dt": dim, "B": dstate, "C": dstate, "z": dim}
    inputs = {name: torch.randn(1, total, size, generator=draw) for name, size in tokens.items()}
    inputs = {name: t.to(dtype) for name, t in inputs.items()}
    params = {
        "A": -torch.rand(dim, dstate, generator=draw) * dstate - 0.5,
        "D": torch.randn(dim, generator=draw),
        "dt_bias": torch.randn(dim, generator=draw) - 2,
        "initial_states": torch.randn(len(lengths), dim, dstate, generator=draw),
    }
    inputs |= {name: t.to(state_dtype) for name, t in params.items()}
    inputs["cu_seqlens"] = PackedLayout.from_lengths(lengths).cu_seqlens
    return {name: t.to(device) for name, t in inputs.items()}


def make_conv_inputs(
    lengths: Sequence[int],
    *,
    dim: int = 5,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Draw every tensor argument of ``causal_conv1d``, by name."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "x": (1, sum(lengths), dim),
        "weight": (dim, width),
        "bias": (dim,),
        "initial_states": (len(lengths), dim, width - 1),
    }
    inputs = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    inputs["cu_seqlens"] = PackedLayout.from_lengths(lengths).cu_seqlens
    return {name: t.to(device) for name, t in inputs.items()}


def in_float64(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same values, all floating-point tensors in float64."""
    return {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}


def eighths(shape: Sequence[int], seed: int = 0) -> Tensor:
    """Draw multiples of 1/8 in [-1, 1], which every floating-point dtype holds exactly."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, tuple(shape), generator=draw) / 8


def outputs_and_grads(
    op: Callable,
    inputs: dict[str, Tensor],
    *,
    incoming: tuple[Tensor, Tensor] | None = None,
    **options: object,
) -> dict[str, Tensor]:
    """Run an op forward and backward.

    Args:
        op: ``selective_scan``, ``causal_conv1d`` or an oracle of theirs.
        inputs: Its tensors by name; gradients are taken of the floating-point ones.
        incoming: Gradients of ``y`` and ``final_states``, :func:`eighths` unless given.
        options: Passed to the op.

    Returns:
        ``y``, ``final_states`` and ``d<name>`` for every floating-point input.
    """
    leaves = {name: t.detach().clone() for name, t in inputs.items()}
    wanted = [name for name, t in leaves.items() if t.is_floating_point()]
    for name in wanted:
        leaves[name].requires_grad_()
    outputs = op(**leaves, **options, return_final_states=True)
    incoming = incoming or [eighths(t.shape, seed) for seed, t in enumerate(outputs)]
    incoming = [gradient.to(t.device, t.dtype) for gradient, t in zip(incoming, outputs)]
    grads = torch.autograd.grad(outputs, [leaves[name] for name in wanted], incoming)
    results = dict(zip(("y", "final_states"), (t.detach() for t in outputs)))
    return results | {f"d{name}": grad for name, grad in zip(wanted, grads)}


def pooled(runs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Lay the results of several runs end to end, ``(numel,)`` each.

    The worst of a few errors is a matter of luck; of thousands it can be compared.
    """
    return {name: torch.cat([run[name].flatten() for run in runs]) for name in runs[0]}


def documents(inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the inputs of every document of a packed row, alone."""
    offsets = inputs["cu_seqlens"].tolist()
    alone = []
    for i_seq, (start, end) in enumerate(pairwise(offsets)):
        document = dict(inputs, cu_seqlens=inputs["cu_seqlens"].new_tensor([0, end - start]))
        for name in TOKEN_INPUTS & inputs.keys():
            document[name] = inputs[name][:, start:end]
        if "initial_states" in inputs:
            document["initial_states"] = inputs["initial_states"][i_seq : i_seq + 1]
        alone.append(document)
    return alone


def with_document_replaced(
    inputs: dict[str, Tensor], i_seq: int, value: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Overwrite everything that one document brings.

    Returns:
        The inputs, and which tokens are of the other documents, ``(total,)``.
    """
    start, end = inputs["cu_seqlens"][i_seq : i_seq + 2].tolist()
    replaced = {name: t.clone() for name, t in inputs.items()}
    for name in TOKEN_INPUTS & inputs.keys():
        replaced[name][:, start:end] = value
    if "initial_states" in inputs:
        replaced["initial_states"][i_seq] = value
    others = torch.ones(inputs["x"].shape[1], dtype=torch.bool, device=inputs["x"].device)
    others[start:end] = False
    return replaced, others


def scan_oracle(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, cu_seqlens: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    dt_softplus: bool = False, initial_states: Tensor | None = None,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Evaluate ``selective_scan`` in closed form, a document at a time, without a recurrence.

        h[t] = exp(A S[0, t]) h_0 + sum_{s <= t} exp(A S[s, t]) dt[s] B[s] x[s]

    where S[s, t] is the sum of dt after s up to t. Quadratic in the length of a document.
    """
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = torch.logaddexp(dt, torch.zeros_like(dt))
    ys, final_states = [], []
    for i_seq, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        dt_i, B_i, C_i = (t[0, start:end] for t in (dt, B, C))
        inputs = (dt_i * x[0, start:end])[:, :, None] * B_i[:, None, :]
        for t in range(end - start):
            # summed backwards from t: no difference of long sums
            since = dt_i[1 : t + 1].flip(0).cumsum(0).flip(0)
            since = torch.cat([since, torch.zeros_like(dt_i[:1])])
            h = (torch.exp(A * since[:, :, None]) * inputs[: t + 1]).sum(0)
            if initial_states is not None:
                h = h + torch.exp(A * dt_i[: t + 1].sum(0)[:, None]) * initial_states[i_seq]
            ys.append(h @ C_i[t])
        final_states.append(h)
    y = torch.stack(ys)[None]
    if D is not None:
        y = y + D * x
    if z is not None:
        y = y * z * torch.sigmoid(z)
    return (y, torch.stack(final_states)) if return_final_states else y


def conv_oracle(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, cu_seqlens: Tensor,
    activation: str | None = None, initial_states: Tensor | None = None,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Evaluate ``causal_conv1d`` with PyTorch's own convolution, a document at a time."""
    dim, width = weight.shape
    ys, final_states = [], []
    for i_seq, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = x.new_zeros(dim, width - 1) if initial_states is None else initial_states[i_seq]
        document = torch.cat([state, x[0, start:end].T], dim=1)
        ys.append(F.conv1d(document, weight[:, None], bias, groups=dim).T)
        final_states.append(document[:, end - start :])
    y = torch.cat(ys)[None]
    y = y * torch.sigmoid(y) if activation == "silu" else y
    return (y, torch.stack(final_states)) if return_final_states else y


def relative_rms(actual: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the error over that of the exact values."""
    return _rms(actual.double() - exact.double()) / max(_rms(exact.double()), 1e-300)


def assert_as_accurate_as_eager(name: str, actual: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Check that a kernel errs at most twice as much as eager PyTorch, on average and at worst.

    Args:
        name: What is compared, for the failure message.
        actual: Result of the kernel under test.
        eager: Result of the reference at the same input precision.
        exact: Result of an oracle in float64.
    """
    assert actual.dtype == eager.dtype, f"{name}: dtype {actual.dtype}, expected {eager.dtype}"
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, expected {exact.shape}"
    assert torch.isfinite(actual).all(), f"{name}: result has NaN or inf"
    eps = torch.finfo(actual.dtype).eps
    # one correct rounding of the exact result errs by about eps / 4 (rms) and eps / 2 (worst)
    for norm, rounding in ((_rms, eps / 4), (_worst, eps / 2)):
        error = norm(actual.double() - exact)
        allowed = 2 * max(norm(eager.double() - exact), rounding * norm(exact))
        assert error <= allowed, (
            f"{name}: {norm.__name__[1:]} error {error:.2e}, allowed {allowed:.2e}"
        )


def assert_errs_like_eager(
    actual: Sequence[dict[str, Tensor]],
    eager: Sequence[dict[str, Tensor]],
    exact: Sequence[dict[str, Tensor]],
    factor: float = 2,
) -> None:
    """Check that kernels err at most ``factor`` times as much as eager PyTorch, rms and worst.

    Errors are taken relative to their tensor and averaged over the draws: which of two correct
    results is off by more in its largest few numbers is luck, and turns with the seed.

    Args:
        actual: Results of the kernels under test by name, of every draw.
        eager: Results of the reference at the same input precision.
        exact: Results of an oracle in float64.
        factor: How much worse than eager PyTorch the kernels may be.
    """
    assert actual[0].keys() == exact[0].keys(), f"{actual[0].keys()}, expected {exact[0].keys()}"
    for name in exact[0]:
        triples = [(a[name].cpu(), e[name], x[name]) for a, e, x in zip(actual, eager, exact)]
        for a, e, x in triples:
            assert a.dtype == e.dtype, f"{name}: dtype {a.dtype}, expected {e.dtype}"
            assert a.shape == x.shape, f"{name}: shape {a.shape}, expected {x.shape}"
            assert torch.isfinite(a).all(), f"{name}: result has NaN or inf"
        eps = torch.finfo(triples[0][0].dtype).eps
        # one correct rounding of the exact result errs by about eps / 4 (rms) and eps / 2 (worst)
        for norm, rounding in ((_rms, eps / 4), (_worst, eps / 2)):
            error, of_eager = (
                sum(norm(t[i].double() - t[2]) / max(norm(t[2]), 1e-300) for t in triples)
                / len(triples)
                for i in (0, 1)
            )
            allowed = factor * max(of_eager, rounding)
            assert error <= allowed, (
                f"{name}: {norm.__name__[1:]} error {error:.2e}, allowed {allowed:.2e}"
            )


def _rms(t: Tensor) -> float:
    return t.square().mean().sqrt().item() if t.numel() else 0.0


def _worst(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0
