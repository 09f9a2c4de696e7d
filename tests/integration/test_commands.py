"""``xtuner`` commands: exit codes, the Python that runs them, and our templates in them."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from mmengine.config import Config

from xtuner_mamba.integration import commands

TEMPLATE = "mamba_1_4b_full_alpaca_e3_varlen"


@pytest.fixture
def cli(pristine, monkeypatch):
    """Run XTuner's entry point after the patch; the children are written down, not run."""
    entry_point = pristine("xtuner.entry_point")
    commands.fail_like_the_child(entry_point)
    started = []

    def run(*arguments, code=0, **environment):
        def start(command, **kwargs):
            started.append([str(part) for part in command])
            return SimpleNamespace(wait=lambda: code)

        monkeypatch.setattr(commands, "subprocess", SimpleNamespace(Popen=start))
        monkeypatch.setattr(sys, "argv", ["xtuner", *arguments])
        for name in ("NNODES", "NPROC_PER_NODE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        try:
            entry_point.cli()
        except SystemExit as done:
            return done.code
        return 0

    run.started = started
    return run


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (3, 3), (-9, 137)])
def test_exits_as_the_child_did(cli, code, expected):
    assert cli("train", "cfg.py", "--seed", "0", code=code) == expected
    command = cli.started[0]
    assert command[0] == sys.executable
    assert command[1].endswith("xtuner/tools/train.py")
    assert command[2:] == ["cfg.py", "--seed", "0"]


def test_sigterm_reaches_the_child(tmp_path):
    """Sent to ``xtuner`` alone, as schedulers do: the child would go on and keep its GPU."""
    begun = tmp_path / "begun"
    child = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        "time.sleep(60)"
    )
    script = f"from xtuner_mamba.integration.commands import run; run(['python', '-c', {child!r}])"
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 30
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        parent.terminate()
        assert parent.wait(30) == 7
    finally:
        parent.kill()


def test_several_processes_are_run_by_the_same_python(cli):
    assert cli("train", "cfg.py", code=1, NPROC_PER_NODE="2", PORT="29500") == 1
    command = cli.started[0]
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert "--nproc_per_node=2" in command
    assert command[-3:] == ["cfg.py", "--launcher", "pytorch"]


@pytest.mark.parametrize("arguments", [["trian"], ["convert", "pth_to_safetensors"], ["convert"]])
def test_what_it_does_not_understand_is_a_failure(cli, arguments):
    assert cli(*arguments) == 2
    assert cli.started == []


@pytest.mark.parametrize("arguments", [[], ["help"], ["version"], ["convert", "--help"]])
def test_help_is_no_failure(cli, arguments):
    assert cli(*arguments) == 0


def test_templates_are_listed_and_copied(xtuner, tmp_path):
    listed = xtuner("list-cfg", "-p", "mamba").stdout
    assert f"\n{TEMPLATE}\n" in listed
    assert xtuner("copy-cfg", TEMPLATE, str(tmp_path)).returncode == 0
    cfg = Config.fromfile(tmp_path / f"{TEMPLATE}_copy.py")
    assert cfg.model.type.__name__ == "PackedSupervisedFinetune"


def test_disabled_plugin_leaves_xtuner_as_it_was(xtuner):
    listed = xtuner("list-cfg", "-p", "mamba", XTUNER_MAMBA_DISABLE="1").stdout
    assert TEMPLATE not in listed
    assert "PATTERN: mamba" in listed
    assert xtuner("trian", XTUNER_MAMBA_DISABLE="1").returncode == 0
    assert xtuner("trian").returncode == 2
