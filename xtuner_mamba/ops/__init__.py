"""Tensors in, tensors out: knows neither XTuner nor transformers."""

from xtuner_mamba.ops.causal_conv1d import ConvWithStates, causal_conv1d
from xtuner_mamba.ops.selective_scan import ScanWithStates, selective_scan

__all__ = ["ConvWithStates", "ScanWithStates", "causal_conv1d", "selective_scan"]
