from xtuner_mamba.ops.linear_cross_entropy.api import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
