"""``xtuner-mamba VERB``: every verb has a module and a script, anything else is refused."""

import runpy
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from xtuner_mamba import cli

SCRIPTS = Path(__file__).parents[1] / "tools"


def test_a_verb_that_there_is_not(capsys):
    assert cli.main(["widths"]) == 2
    verbs = "lengths, probe-batch, smoke, doctor, compare, convert-mamba-ssm"
    assert f"VERB must be one of {verbs}, got widths" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    assert "lengths           compare the ways to batch" in capsys.readouterr().out


def test_the_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"xtuner-mamba {version('xtuner-mamba')}\n"


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_a_script_of_its_name(monkeypatch, capsys, verb):
    monkeypatch.setattr(sys, "argv", [verb, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPTS / f"{verb.replace('-', '_')}.py"), run_name="__main__")
    assert stop.value.code == 0
    assert f"usage: xtuner-mamba {verb}" in capsys.readouterr().out
