"""Installation and removal, by ``pip install .`` and ``pip install -e .``."""

import os
import subprocess
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "xtuner_mamba"
PROBE = "import sys; print([type(finder).__name__ for finder in sys.meta_path])"


def is_joined(environment, **variables: str) -> bool:
    command = [environment.python, "-c", PROBE]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **variables}
    )
    assert not done.stderr
    return "XTunerFinder" in done.stdout


@pytest.mark.parametrize("options", [[], ["-e"]], ids=["plain", "editable"])
def test_joins_when_installed_and_leaves_when_removed(environment, options):
    before = environment.files()
    assert not is_joined(environment)

    environment.install(*options)
    added = environment.files() - before
    assert {"xtuner_mamba_startup.pth", "_xtuner_mamba_startup.py"} <= added, added
    assert ("xtuner_mamba" in added) != bool(options), added
    assert is_joined(environment)
    assert not is_joined(environment, XTUNER_MAMBA_DISABLE="1")

    environment.pip("uninstall", "--yes", "xtuner-mamba")
    assert environment.files() - before <= {"__pycache__"}
    assert not is_joined(environment)


def test_every_module_and_template_is_installed(environment):
    environment.install()
    installed = environment.site_packages / "xtuner_mamba"
    names = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert Path("configs/mamba/mamba_130m_full_alpaca_e3_varlen.py") in names
    assert {path.relative_to(installed) for path in installed.rglob("*.py")} == names
