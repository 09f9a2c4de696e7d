"""The start-up file: what it adds to a start of Python, and the imports that it watches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STARTUP = Path(__file__).parents[2] / "startup"

# a stand-in for XTuner, and a plugin that writes down what it gets
FILES = {
    "xtuner/__init__.py": "from xtuner import first",
    "xtuner/first.py": "value = 1",
    "xtuner/broken.py": "raise ZeroDivisionError('of its own')",
    "xtuner/sub/__init__.py": "",
    "xtuner/sub/data.txt": "data",
    "xtuner/namespace/module.py": "",
    "xtuner_mamba/__init__.py": "",
    "xtuner_mamba/integration.py": "got = []\ndef patch(module): got.append(module.__name__)",
    "other.py": "",
}


@pytest.fixture
def run(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(code: str, **environment: str) -> subprocess.CompletedProcess:
        # -S: without the start-up files of this environment
        lines = [
            f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(STARTUP)!r}]",
            "import _xtuner_mamba_startup as startup, importlib",
            "from xtuner_mamba.integration import got",
            code,
        ]
        done = subprocess.run(
            [sys.executable, "-S", "-c", "\n".join(lines)],
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"], **environment},
        )
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_every_module_is_handed_over_when_it_has_been_executed(run):
    run("""
import xtuner.sub, other
assert got == ["xtuner.first", "xtuner", "xtuner.sub"], got
assert xtuner.first.value == 1
importlib.reload(xtuner.first)
assert got[3:] == ["xtuner.first"], got
""")


def test_loaders_are_what_they_were(run):
    run("""
import inspect, pkgutil, runpy
from importlib.machinery import SourceFileLoader
from importlib.resources import files
import xtuner.first, xtuner.sub, xtuner.namespace.module
assert type(xtuner.first.__loader__) is SourceFileLoader
assert vars(xtuner.first.__loader__) == dict(name="xtuner.first", path=xtuner.first.__file__)
assert inspect.getsource(xtuner.first).strip() == "value = 1"
assert (files(xtuner.sub) / "data.txt").read_text() == "data"
names = [module.name for module in pkgutil.walk_packages(xtuner.__path__, "xtuner.")]
assert names == ["xtuner.broken", "xtuner.first", "xtuner.sub"], names
del got[:]
assert runpy.run_module("xtuner.first")["value"] == 1
assert importlib.util.find_spec("xtuner.broken").name == "xtuner.broken"
assert got == [], got
""")


def test_errors_of_imports_are_their_own(run):
    run("""
for name, error in {"xtuner.broken": ZeroDivisionError, "xtuner.none": ModuleNotFoundError}.items():
    try:
        importlib.import_module(name)
    except error as raised:
        assert "of its own" in str(raised) or raised.name == name
    else:
        raise AssertionError(name)
    assert name not in sys.modules and name not in got
""")


def test_threads_import_each_module_once(run):
    run("""
from threading import Barrier, Thread
names = ["xtuner.first", "xtuner.sub", "xtuner.namespace.module", "xtuner"] * 4
barrier = Barrier(len(names))
def work(name):
    barrier.wait()
    importlib.import_module(name)
threads = [Thread(target=work, args=[name]) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert sorted(got) == sorted(set(names)), got
""")


def test_two_hooks_of_this_kind_live_together(run):
    run("""
sys.meta_path.insert(0, startup.XTunerFinder())
import xtuner.first
assert got == ["xtuner.first", "xtuner"], got
""")


def test_fault_of_the_plugin_is_told_once_and_breaks_nothing(run):
    done = run("""
del sys.modules["xtuner_mamba.integration"].patch
import xtuner.sub
""")
    assert done.stderr.count("xtuner_mamba could not join xtuner.first: ImportError") == 1
    assert done.stderr.count("could not join") == 1
    assert "XTUNER_MAMBA_DISABLE=1" in done.stderr


def test_disabled_by_the_environment(run):
    run("import xtuner.sub; assert got == [], got", XTUNER_MAMBA_DISABLE="1")
    run("import xtuner.sub; assert got, 'the line above proved nothing'", XTUNER_MAMBA_DISABLE="0")


def test_adds_less_than_a_millisecond_and_imports_nothing():
    # os is imported by every start of Python, but for -S
    code = f"import sys, os; sys.path.insert(0, {str(STARTUP)!r}); import _xtuner_mamba_startup"
    command = [sys.executable, "-S", "-X", "importtime", "-c", code]
    times = []
    # the best of a few: the machine may be busy with something else
    for _ in range(5):
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        own, cumulative, name = report.splitlines()[-1].removeprefix("import time:").split("|")
        assert name.strip() == "_xtuner_mamba_startup"
        assert own.strip() == cumulative.strip(), "it imports something"
        times.append(int(own))
    assert min(times) < 1000, f"{times} microseconds"
