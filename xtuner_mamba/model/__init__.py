"""Models whose token mixers stop at document boundaries."""

from xtuner_mamba.model.dispatch import Dispatched, dispatch_packed

__all__ = ["Dispatched", "PackedSupervisedFinetune", "dispatch_packed"]


def __getattr__(name: str):
    # late: XTuner's own model package asks for our dispatch while it is being imported
    if name == "PackedSupervisedFinetune":
        from xtuner_mamba.model.sft import PackedSupervisedFinetune

        return PackedSupervisedFinetune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
