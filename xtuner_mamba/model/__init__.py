"""Models whose token mixers stop at document boundaries."""

from importlib import import_module

from xtuner_mamba.model.dispatch import Dispatched, dispatch_packed

_LATE = {
    "PackedDPO": "dpo",
    "PackedORPO": "orpo",
    "PackedRewardModel": "reward",
    "PackedSupervisedFinetune": "sft",
}

__all__ = ["Dispatched", "dispatch_packed", *_LATE]


def __getattr__(name: str):
    # late: XTuner's own model package asks for our dispatch while it is being imported
    if name in _LATE:
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
