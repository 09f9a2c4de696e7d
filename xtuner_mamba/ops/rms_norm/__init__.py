from xtuner_mamba.ops.rms_norm.api import NormWithResidual, add_before_norm, rms_norm

__all__ = ["NormWithResidual", "add_before_norm", "rms_norm"]
