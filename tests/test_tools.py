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


ALONE = """
tests/ops/test_a.py::test_x[a b] PASSED   [ 33%]
tests/ops/test_a.py::test_x[2] PASSED   [ 66%]
tests/ops/test_a.py::test_y SKIPPED (why) [100%]
"""
SEVERAL = """
tests/ops/test_a.py::test_x[a b]
[gw3] [ 33%] PASSED tests/ops/test_a.py::test_x[a b]
[gw0] [ 66%] PASSED tests/ops/test_a.py::test_x[2]
[gw3] [100%] SKIPPED tests/ops/test_a.py::test_y
"""


@pytest.mark.parametrize("lines", [ALONE, SEVERAL], ids=["one process", "several"])
def test_the_page_of_gpu_tests_tells_what_ran_where(monkeypatch, lines):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    output = lines + "==== 2 passed, 1 skipped in 3.00s ====\n"
    page = load("record_gpu_tests").render("abc123", ["python", "-m", "pytest"], output)
    assert "- commit: abc123" in page
    assert "- GPU: Some GPU" in page
    assert f"torch {version('torch')}" in page
    assert "- result: 2 passed, 1 skipped in 3.00s" in page
    assert "| `tests/ops/test_a.py` | passed | 2 |" in page
    assert "| `tests/ops/test_a.py` | skipped | 1 |" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to test on")
def test_gpu_tests_without_a_gpu_are_refused(capsys):
    assert load("record_gpu_tests").main([]) == 1
    assert f"got torch {torch.__version__} without one" in capsys.readouterr().out
