from xtuner_mamba.ops.attention.api import attention

__all__ = ["attention"]
