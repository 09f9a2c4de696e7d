from xtuner_mamba.ops.selective_scan.api import ScanWithStates, selective_scan
from xtuner_mamba.ops.selective_scan.recomputation import backward_follows

__all__ = ["ScanWithStates", "backward_follows", "selective_scan"]
