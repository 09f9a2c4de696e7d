from xtuner_mamba.ops.ssd.api import SsdWithStates, ssd
from xtuner_mamba.ops.ssd.gated_norm import GatedNorm

__all__ = ["GatedNorm", "SsdWithStates", "ssd"]
