"""Our templates among XTuner's, for ``list-cfg``, ``copy-cfg`` and ``train NAME``."""

from pathlib import Path
from types import ModuleType

import xtuner_mamba


def add_templates(configs: ModuleType) -> None:
    """Add the name and path of each of our templates to ``xtuner.configs``."""
    configs.cfgs_name_path.update(templates())


def templates() -> dict[str, str]:
    """Return the path of every template that comes with the package, by name."""
    folder = Path(xtuner_mamba.__file__).parent / "configs"
    return {path.stem: str(path) for path in folder.rglob("[!_]*.py")}
