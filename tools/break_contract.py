"""Break the exactness contract on purpose, one way at a time, and name the tests that notice.

Each breach is patched into a run of the tests that prove the contract; a breach that no test
notices fails this command. With --write the result becomes the table of docs/proof.md.
"""

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROOF = ROOT / "docs" / "proof.md"
TESTS = [
    "tests/model/test_packed_model.py",
    "tests/model/test_families.py",
    "tests/model/test_attention_dispatch.py",
    "tests/model/test_carried_states.py",
    "tests/model/test_preference.py",
    "tests/engine/test_packed_layout_hook.py",
    "tests/engine/test_carried_state_hook.py",
]
BREACH = "XTUNER_MAMBA_BREACH"
TABLE = re.compile(r"(<!-- breaches -->\n).*(<!-- end of breaches -->)", re.DOTALL)


# -- the breaches: each changes the package in the process that runs the tests --------------------


def leak_conv() -> None:
    """Run the conv across boundaries."""
    from xtuner_mamba.model.dispatch import mamba

    conv = mamba.causal_conv1d
    mamba.causal_conv1d = lambda *args, cu_seqlens=None, **kwargs: conv(*args, **kwargs)


def leak_scan() -> None:
    """Run the scan across boundaries."""
    from xtuner_mamba.model.dispatch import mamba

    scan = mamba.selective_scan
    mamba.selective_scan = lambda *args, cu_seqlens=None, **kwargs: scan(*args, **kwargs)


def leak_ssd() -> None:
    """Run Mamba-2's recurrence across boundaries."""
    from xtuner_mamba.model.dispatch import mamba2

    ssd = mamba2.ssd
    mamba2.ssd = lambda *args, cu_seqlens=None, **kwargs: ssd(*args, **kwargs)


def leak_attention() -> None:
    """Attend across boundaries."""
    from xtuner_mamba.model.dispatch import attention

    attend = attention.attention
    attention.attention = lambda *args, cu_seqlens=None, **kwargs: attend(*args, **kwargs)


def multiply_conv() -> None:
    """Multiply by 0 in the conv where a tap reads another document."""
    import torch
    import torch.nn.functional as F

    from xtuner_mamba.model.dispatch import mamba
    from xtuner_mamba.ops.causal_conv1d import ForkedConv

    conv = mamba.causal_conv1d

    def multiplying(x, weight, bias=None, *, cu_seqlens=None, activation=None, **kwargs):
        if cu_seqlens is None:
            return conv(x, weight, bias, activation=activation, **kwargs)
        owner = torch.arange(len(cu_seqlens) - 1).repeat_interleave(cu_seqlens.diff())
        y = torch.zeros_like(x) if bias is None else bias.expand_as(x)
        for back, tap in enumerate(weight.unbind(1)[::-1]):
            inside = (owner == F.pad(owner, (back, 0), value=-1)[: len(owner)]).to(x.dtype)
            y = y + tap * F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] * inside[:, None]
        y = F.silu(y) if activation else y
        return ForkedConv(y, y, None)

    mamba.causal_conv1d = multiplying


def multiply_scan() -> None:
    """Multiply the state by 0 where a document starts."""
    import torch
    import torch.nn.functional as F

    from xtuner_mamba.model.dispatch import mamba

    scan = mamba.selective_scan

    def multiplying(x, dt, A, B, C, *, cu_seqlens=None, **kwargs):
        if cu_seqlens is None:
            return scan(x, dt, A, B, C, **kwargs)
        keep = torch.ones(x.shape[1], dtype=A.dtype)
        keep[cu_seqlens[:-1].long()] = 0
        step = F.softplus(dt.to(A.dtype) + kwargs["dt_bias"])[0]
        state, y = torch.zeros_like(A), []
        for t in range(x.shape[1]):
            state = keep[t] * torch.exp(step[t, :, None] * A) * state
            state = state + (step[t] * x[0, t])[:, None] * B[0, t]
            y.append((state * C[0, t]).sum(1))
        y = torch.stack(y)[None] + kwargs["D"] * x
        return (y * F.silu(kwargs["z"])).to(x.dtype)

    mamba.selective_scan = multiplying


def leak_labels() -> None:
    """Train a document's last token on the next document's first."""
    from xtuner_mamba.layout import IGNORE_INDEX, PackedLayout

    def targets(self, labels):
        shifted = labels.flatten().roll(-1)
        shifted[-1] = IGNORE_INDEX
        return shifted

    PackedLayout.targets = targets


def forget_carried_states() -> None:
    """Let a document that was cut begin anew in the next batch."""
    from xtuner_mamba.carry import CarriedRows

    CarriedRows.initial_states = lambda self, states, num_seqs: states.new_zeros(
        num_seqs, *states.shape[1:]
    )


def average_micro_batches() -> None:
    """Take the mean of every micro-batch instead of the optimizer step's."""
    from xtuner_mamba.model import sft

    sft.current_mean_targets = lambda: None


def keep_layout() -> None:
    """Leave the boundaries published after the iteration."""
    from xtuner_mamba.engine.hooks import packed_layout_hook

    packed_layout_hook.withdraw_layout = lambda: None


BREACHES: dict[str, Callable[[], None]] = {
    "leak-conv": leak_conv,
    "leak-scan": leak_scan,
    "leak-ssd": leak_ssd,
    "leak-attention": leak_attention,
    "multiply-conv": multiply_conv,
    "multiply-scan": multiply_scan,
    "leak-labels": leak_labels,
    "forget-carried-states": forget_carried_states,
    "average-micro-batches": average_micro_batches,
    "keep-layout": keep_layout,
}


def pytest_configure() -> None:
    """Patch the breach in: pytest loads this file as a plugin (``-p break_contract``)."""
    name = os.environ.get(BREACH)
    if name:
        BREACHES[name]()


# -- running them ---------------------------------------------------------------------------------


def run_tests(breach: str | None, tests: list[str]) -> tuple[int, list[str]]:
    """Run the tests with a breach in place.

    Returns:
        Count of tests that ran, and the names of those that failed.

    Raises:
        RuntimeError: pytest ended otherwise than by running tests.
    """
    env = {**os.environ, BREACH: breach or "", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    command = [sys.executable, "-m", "pytest", "-p", "break_contract", "-q", "-rfE", "--tb=no"]
    run = subprocess.run(
        [*command, "--no-showlocals", *tests], cwd=ROOT, env=env, capture_output=True, text=True
    )
    if run.returncode not in (0, 1):
        raise RuntimeError(
            f"pytest must exit with 0 or 1, got {run.returncode} under {breach}; its output was\n"
            f"{run.stdout[-2000:]}{run.stderr[-2000:]}"
        )
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::\w+)", run.stdout, re.MULTILINE)
    # the last line may be a library's, which says something when it is left
    summary = re.findall(
        r"^.*\b(?:passed|failed|errors?)\b.* in [\d.]+s.*$", run.stdout, re.MULTILINE
    )
    counts = re.findall(r"(\d+) (?:passed|failed|errors?)\b", summary[-1])
    return sum(map(int, counts)), failed


def render(noticed: dict[str, list[str]]) -> str:
    """Write the breaches and the tests that failed as a Markdown table, a line a file."""
    lines = ["| breach | tests that fail |", "| --- | --- |"]
    for breach, failed in noticed.items():
        cells = []
        for file, names in groupby(sorted(failed), lambda name: name.partition("::")[0]):
            cases = Counter(name.partition("::")[2] for name in names)
            tests = [f"`{name}`" + (f" ({n} cases)" if n > 1 else "") for name, n in cases.items()]
            rest = f" and {len(tests) - 3} more" if len(tests) > 3 else ""
            cells.append(f"`{file.removeprefix('tests/')}`: {', '.join(tests[:3])}{rest}")
        lines.append(f"| {BREACHES[breach].__doc__} | {'<br>'.join(cells) or '**none**'} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the tests once whole and once per breach."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--breach", choices=BREACHES, action="append", help="only these")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="what to run (%(default)s)")
    parser.add_argument("--write", action="store_true", help="update the table of docs/proof.md")
    args = parser.parse_args(argv)

    ran, failed = run_tests(None, args.tests)
    print(f"without a breach: {ran} tests, {len(failed)} failed", flush=True)
    if failed or not ran:
        print("the tests must pass before a breach can be noticed:", *failed, sep="\n  ")
        return 1
    noticed = {}
    for breach in args.breach or BREACHES:
        noticed[breach] = run_tests(breach, args.tests)[1]
        print(f"{breach}: {len(noticed[breach])} tests fail", flush=True)
        for name, cases in Counter(noticed[breach]).items():
            print(f"  {name}" + (f" ({cases} cases)" if cases > 1 else ""), flush=True)
    if args.write:
        text, found = TABLE.subn(lambda m: m[1] + render(noticed) + m[2], PROOF.read_text())
        assert found == 1, f"{PROOF} has lost the marks around its table"
        PROOF.write_text(text)
    return 0 if all(noticed.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
