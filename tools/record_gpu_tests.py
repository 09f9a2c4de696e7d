"""Run the tests on a GPU and keep the result, with the GPU, the versions and the commit.

Shows what pytest says, and writes a Markdown page, also of a run that is stopped; exits as pytest
does. Runs in several processes where pytest-xdist is installed.
"""

import argparse
import importlib.util
import os
import platform
import signal
import subprocess
import time
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "results" / "gpu_tests.md"
TESTS = [
    "tests/ops",
    *(
        f"tests/model/test_{name}.py"
        for name in (
            "attention_dispatch",
            "carried_states",
            "families",
            "fused_model",
            "lora",
            "mamba_ssm_mixers",
        )
    ),
    "tests/test_probe_batch.py",
]
PACKAGES = ["torch", "triton", "transformers", "mmengine", "xtuner"]
# each compiles kernels and holds half a gigabyte of the GPU
_MAX_PROCESSES = 15


class Recorder:
    """A pytest plugin that notes how each test ended."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test, by its worst phase."""
        if report.failed:
            self._note(report, "failed" if report.when == "call" else "error")
        elif report.skipped or report.when == "call":
            self.outcomes.setdefault(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that could not be read."""
        if report.failed:
            self._note(report, "error")

    def _note(self, report: pytest.TestReport | pytest.CollectReport, outcome: str) -> None:
        self.outcomes[report.nodeid] = outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(report.longrepr) if crash is None else crash.message
        lines = [line for line in text.splitlines() if line.strip()] or ["no reason given"]
        self.reasons[report.nodeid] = lines[-1 if crash is None else 0].strip()


def render(commit: str, command: list[str], recorder: Recorder, seconds: float, end: str) -> str:
    """Write the page.

    Args:
        commit: Of the code that was tested.
        command: Of pytest, without the interpreter.
        recorder: What has run.
        seconds: That it took.
        end: How pytest ended, in words.
    """
    counts = Counter(recorder.outcomes.values())
    by_file = Counter((test.split("::")[0], end) for test, end in recorder.outcomes.items())
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    total = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
    page = [
        "# Tests on a GPU",
        "",
        f"- date: {date.today()}",
        f"- commit: {commit}",
        f"- GPU: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}",
        f"- versions: Python {platform.python_version()}, {versions}",
        f"- command: `{' '.join(command)}`",
        f"- result: {total or 'nothing ran'} in {seconds:.0f} s; {end}",
        "",
        "| tests | outcome | count |",
        "| --- | --- | --- |",
        *(f"| `{path}` | {outcome} | {n} |" for (path, outcome), n in sorted(by_file.items())),
    ]
    if recorder.reasons:
        page += ["", "What failed:", ""]
        page += [f"- `{test}`: {reason}" for test, reason in sorted(recorder.reasons.items())]
    return "\n".join(page) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run pytest and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", default=TESTS, help="what to run (%(default)s)")
    parser.add_argument("--out", type=Path, default=PAGE, help="page to write (%(default)s)")
    parser.add_argument("--commit", help="of this checkout, where git is missing")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"a GPU must be there to test on it, got torch {torch.__version__} without one")
        return 1
    commit = args.commit or subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], text=True, cwd=ROOT
    )
    command = ["--no-showlocals", "--tb=short", *args.tests]
    if importlib.util.find_spec("xdist"):
        processes = max(1, min(_MAX_PROCESSES, len(os.sched_getaffinity(0)) - 1))
        command = ["-n", str(processes), "--dist", "loadgroup", *command]
    # many processes, a thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # a time limit that ends this process lets pytest say what it has done
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.chdir(ROOT)
    recorder, start = Recorder(), time.monotonic()
    try:
        code = pytest.main(command, plugins=[recorder])
    except KeyboardInterrupt:
        # while its processes are taken down
        code = pytest.ExitCode.INTERRUPTED
    end = "stopped before its end" if code == pytest.ExitCode.INTERRUPTED else "to its end"
    page = render(
        commit.strip(), ["python", "-m", "pytest", *command], recorder,
        time.monotonic() - start, end,
    )  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page)
    print(f"written to {args.out}")
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
