"""Run the tests on a GPU and keep the result, with the GPU, the versions and the commit.

Shows what pytest says as it says it, and writes a Markdown page, also of a run that is stopped;
exits as pytest does.
"""

import argparse
import platform
import re
import signal
import subprocess
import sys
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

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


def render(commit: str, command: list[str], output: str) -> str:
    """Write the page.

    Args:
        commit: Of the code that was tested.
        command: Of pytest, without the interpreter.
        output: Of pytest with ``-v``, in one process or, by pytest-xdist, in several.
    """
    outcome = "(PASSED|FAILED|ERROR|SKIPPED)"
    alone = re.findall(rf"^(tests/\S+?\.py)::.* {outcome} .*\[ *\d+%\]", output, re.MULTILINE)
    several = re.findall(
        rf"^\[gw\d+\] \[ *\d+%\] {outcome} (tests/\S+?\.py)::", output, re.MULTILINE
    )
    counts = Counter((path, outcome.lower()) for path, outcome in alone)
    counts.update((path, outcome.lower()) for outcome, path in several)
    result = re.findall(r"^=+ (.* in [\d.]+s.*?) =+$", output, re.MULTILINE)
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    page = [
        "# Tests on a GPU",
        "",
        f"- date: {date.today()}",
        f"- commit: {commit}",
        f"- GPU: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}",
        f"- versions: Python {platform.python_version()}, {versions}",
        f"- command: `{' '.join(command)}`",
        f"- result: {result[-1] if result else 'stopped before its end'}",
        "",
        "| tests | outcome | count |",
        "| --- | --- | --- |",
        *(f"| `{path}` | {outcome} | {n} |" for (path, outcome), n in sorted(counts.items())),
    ]
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
    command = ["-m", "pytest", "-v", "--no-showlocals", "--show-capture=no", *args.tests]
    run = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # a time limit that stops this process stops pytest, which still says what it had done
    signal.signal(signal.SIGTERM, lambda *_: run.send_signal(signal.SIGINT))
    output = ""
    for line in run.stdout:
        print(line, end="", flush=True)
        output += line
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(render(commit.strip(), ["python", *command], output))
    print(f"written to {args.out}")
    return run.wait()


if __name__ == "__main__":
    raise SystemExit(main())
