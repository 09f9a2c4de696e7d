from xtuner_mamba.ops.causal_conv1d.api import ConvWithStates, ForkedConv, causal_conv1d

__all__ = ["ConvWithStates", "ForkedConv", "causal_conv1d"]
