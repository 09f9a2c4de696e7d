"""Inputs of ``ssd``, shared by several files."""

import torch

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.ops import GatedNorm, ssd

# one token, chunk edges, ragged
LENGTHS = [[1], [3, 4, 1], [8, 9, 7, 16], [1, 1, 1, 1, 1], [7, 1, 1, 40, 2, 3, 17]]


def make_inputs(
    lengths, *, nheads=4, headdim=3, ngroups=2, dstate=5, dtype=torch.float64, device="cpu", seed=0
):
    """Draw every tensor argument of ``ssd``, by name, with step sizes as in training."""
    draw = torch.Generator().manual_seed(seed)
    total, wide = sum(lengths), torch.promote_types(dtype, torch.float32)
    tokens = {
        "x": (nheads, headdim),
        "dt": (nheads,),
        "B": (ngroups, dstate),
        "C": (ngroups, dstate),
        "z": (nheads, headdim),
    }
    inputs = {name: torch.randn(1, total, *shape, generator=draw) for name, shape in tokens.items()}
    inputs = {name: t.to(dtype) for name, t in inputs.items()}
    params = {
        "A": -torch.rand(nheads, generator=draw) * 8 - 0.5,
        "D": torch.randn(nheads, generator=draw),
        "dt_bias": torch.randn(nheads, generator=draw) - 2,
        "initial_states": torch.randn(len(lengths), nheads, headdim, dstate, generator=draw),
    }
    inputs |= {name: t.to(wide) for name, t in params.items()}
    inputs["cu_seqlens"] = PackedLayout.from_lengths(lengths).cu_seqlens
    return {name: t.to(device) for name, t in inputs.items()}


def with_norm(inputs):
    """Add the weight of a norm to the inputs, for :func:`normed_ssd`."""
    _, _, nheads, headdim = inputs["x"].shape
    weight = torch.linspace(-1, 2, nheads * headdim, dtype=inputs["A"].dtype)
    return inputs | {"norm_weight": weight.to(inputs["x"].device)}


def normed_ssd(*, norm_weight, before_gate, **inputs):
    """``ssd`` with the parts of its norm by name, as the helpers of tests pass tensors."""
    return ssd(**inputs, norm=GatedNorm(norm_weight, 1e-5, before_gate))


def gate_and_norm(y, z, weight, ngroups, before_gate):
    """The definition, ``(total, nheads, headdim)`` in and out."""
    gate = torch.nn.functional.silu(z)
    groups = (y if before_gate else y * gate).reshape(len(y), ngroups, -1)
    normed = torch.nn.functional.rms_norm(groups, groups.shape[2:], eps=1e-5).view(y.shape)
    normed = normed * weight.view(y.shape[1:])
    return normed * gate if before_gate else normed
