from xtuner_mamba.ops.rms_norm.api import NormWithResidual, rms_norm

__all__ = ["NormWithResidual", "rms_norm"]
