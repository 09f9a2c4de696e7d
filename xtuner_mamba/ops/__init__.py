"""Tensors in, tensors out: knows neither XTuner nor transformers."""

from xtuner_mamba.ops.attention import attention
from xtuner_mamba.ops.causal_conv1d import ConvWithStates, ForkedConv, causal_conv1d
from xtuner_mamba.ops.linear_cross_entropy import linear_cross_entropy
from xtuner_mamba.ops.rms_norm import NormWithResidual, add_before_norm, rms_norm
from xtuner_mamba.ops.selective_scan import ScanWithStates, backward_follows, selective_scan
from xtuner_mamba.ops.ssd import GatedNorm, SsdWithStates, ssd

__all__ = [
    "ConvWithStates",
    "ForkedConv",
    "GatedNorm",
    "NormWithResidual",
    "ScanWithStates",
    "SsdWithStates",
    "add_before_norm",
    "attention",
    "backward_follows",
    "causal_conv1d",
    "linear_cross_entropy",
    "rms_norm",
    "selective_scan",
    "ssd",
]
