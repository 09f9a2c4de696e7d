from xtuner_mamba.ops.selective_scan.api import ScanWithStates, selective_scan

__all__ = ["ScanWithStates", "selective_scan"]
