from xtuner_mamba.ops.causal_conv1d.api import ConvWithStates, causal_conv1d

__all__ = ["ConvWithStates", "causal_conv1d"]
