from xtuner_mamba.ops.ssd.api import SsdWithStates, ssd

__all__ = ["SsdWithStates", "ssd"]
