"""The tools that prove things: they must be able to say no."""

import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[1] / "tools"
MODEL_TESTS = "tests/model/test_packed_model.py"


def load(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def break_labels(*tests):
    command = [sys.executable, str(TOOLS / "break_contract.py"), "--breach", "leak-labels"]
    return subprocess.run([*command, "--tests", *tests], capture_output=True, text=True)


def test_a_breach_is_noticed_by_name():
    name = f"{MODEL_TESTS}::test_loss_never_asks_for_a_neighbours_first_token"
    result = break_labels(name)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == [
        "without a breach: 1 tests, 0 failed",
        "leak-labels: 1 tests fail",
        f"  {name}",
    ]


def test_a_breach_that_no_test_notices_fails():
    result = break_labels(f"{MODEL_TESTS}::test_a_batch_without_targets_gives_zero_and_not_nan")
    assert result.returncode == 1
    assert "leak-labels: 0 tests fail" in result.stdout


def test_a_run_without_tests_is_no_proof():
    with pytest.raises(RuntimeError, match="pytest must exit with 0 or 1, got 4 under None"):
        load("break_contract").run_tests(None, ["tests/no_such_file.py"])


def test_the_table_of_breaches_counts_cases():
    several = [f"tests/b.py::test_{i}" for i in range(5)]
    table = load("break_contract").render(
        {"leak-conv": ["tests/a.py::test_x", "tests/a.py::test_x", *several], "leak-scan": []}
    )
    assert (
        "| Run the conv across boundaries. | `a.py`: `test_x` (2 cases)"
        "<br>`b.py`: `test_0`, `test_1`, `test_2` and 2 more |"
    ) in table
    assert "| Run the scan across boundaries. | **none** |" in table


TESTS_OF_EVERY_END = """
import pytest
import torch


@pytest.mark.parametrize("text", ["a b", "c"])
def test_x(text):
    assert text


def test_fails():
    assert torch.tensor([1, 2]).tolist() == [1, 3], "sums differ by 1"


@pytest.mark.skip(reason="why")
def test_y():
    pass


@pytest.fixture
def broken():
    raise ValueError("no such thing, got 3")


def test_z(broken):
    pass
"""


@pytest.mark.parametrize("processes", [0, 2])
def test_the_page_of_gpu_tests_tells_how_each_ended(monkeypatch, tmp_path, capsys, processes):
    tool = load("record_gpu_tests")
    (tmp_path / "test_a.py").write_text(TESTS_OF_EVERY_END)
    (tmp_path / "test_b.py").write_text("import nothing_of_this_name")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "_MAX_PROCESSES", processes)
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: processes or None)
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    files = ["test_a.py", "test_b.py"]
    arguments = ["--commit", "abc123", "--out", str(page), "--continue-on-collection-errors"]
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-p no:cacheprovider {arguments.pop()}")
    assert tool.main([*arguments, *files]) == 1
    capsys.readouterr()
    lines = page.read_text().splitlines()
    assert "- commit: abc123" in lines
    assert any(line.startswith("- GPU: Some GPU") for line in lines)
    assert f"torch {version('torch')}" in page.read_text()
    (result,) = (line for line in lines if line.startswith("- result: "))
    assert result.startswith("- result: 2 error, 1 failed, 2 passed, 1 skipped in ")
    assert result.endswith("; to its end")
    assert "| `test_a.py` | passed | 2 |" in lines
    assert "| `test_a.py` | skipped | 1 |" in lines
    assert "- `test_a.py::test_fails`: AssertionError: sums differ by 1" in lines
    assert "- `test_a.py::test_z`: ValueError: no such thing, got 3" in lines
    assert any("test_b.py" in line and "nothing_of_this_name" in line for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to test on")
def test_gpu_tests_without_a_gpu_are_refused(capsys):
    assert load("record_gpu_tests").main([]) == 1
    assert f"got torch {torch.__version__} without one" in capsys.readouterr().out
