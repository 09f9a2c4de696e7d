"""``xtuner convert pth_to_hf``: a config of XTuner's builds there what it trained as.

The script runs as ``__main__`` and hands ``cfg.model`` to ``BUILDER`` right after reading the
config; nothing of ours is called between the two.
"""

import functools
import sys
from pathlib import Path
from types import ModuleType

from mmengine.config import ConfigDict

_SCRIPT = "pth_to_hf.py"


def build_what_was_trained(registry: ModuleType) -> None:
    """Build our model where the converter is about to build XTuner's."""
    build = registry.BUILDER.build

    @functools.wraps(build)
    def wrapper(cfg, *args, **kwargs):
        if Path(sys.argv[0]).name == _SCRIPT and isinstance(cfg, ConfigDict):
            from xtuner_mamba.integration.config_rewrites import build_exactly

            build_exactly(cfg)
        return build(cfg, *args, **kwargs)

    registry.BUILDER.build = wrapper
