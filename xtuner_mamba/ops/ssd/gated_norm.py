"""The norm beside Mamba-2's gate: what :func:`xtuner_mamba.ops.ssd` is told of it."""

from typing import NamedTuple

from torch import Tensor


class GatedNorm(NamedTuple):
    """RMS norm with which the op ends; channels of a group of heads share a mean square."""

    weight: Tensor
    """``(nheads * headdim,)``."""
    eps: float
    """Added to the mean squares."""
    before_gate: bool = False
    """Gate what was normed; norm what was gated otherwise."""
