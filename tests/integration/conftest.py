import importlib.util
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def pristine() -> Callable[[str], ModuleType]:
    """Execute a module anew, beside the one that is in use and that the plugin may have joined."""

    def execute(name: str) -> ModuleType:
        # the loader is named, since the plugin's finder would prepare the one that it finds
        loader = SourceFileLoader(name, importlib.util.find_spec(name).origin)
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
        loader.exec_module(module)
        return module

    return execute


class Environment:
    """A Python environment of its own that sees the packages of this one."""

    def __init__(self, path: Path) -> None:
        venv.create(path, symlinks=True)
        self.path = path
        self.python = path / "bin" / "python"
        self.site_packages = next(path.glob("lib/python*/site-packages"))
        seen = [entry for entry in sys.path if entry.endswith("-packages")]
        (self.site_packages / "outer.pth").write_text("\n".join(seen))

    def pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, *arguments, "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def install(self, *options: str) -> None:
        """Install the checkout, nothing else, without a network."""
        self.pip("install", "--no-deps", "--no-build-isolation", *options, str(ROOT))

    def files(self) -> set[str]:
        return {path.name for path in self.site_packages.iterdir()}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")
