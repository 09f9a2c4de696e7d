from xtuner_mamba.engine.hooks.carried_state_hook import CarriedStateHook
from xtuner_mamba.engine.hooks.exposure_hook import ExposureHook
from xtuner_mamba.engine.hooks.length_curriculum_hook import LengthCurriculumHook
from xtuner_mamba.engine.hooks.length_extrapolation_hook import LengthExtrapolationHook
from xtuner_mamba.engine.hooks.packed_layout_hook import PackedLayoutHook
from xtuner_mamba.engine.hooks.throughput_hook import ThroughputHook

__all__ = [
    "CarriedStateHook",
    "ExposureHook",
    "LengthCurriculumHook",
    "LengthExtrapolationHook",
    "PackedLayoutHook",
    "ThroughputHook",
]
