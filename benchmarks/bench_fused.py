"""Time norm and loss of a Mamba as fused here, in eager PyTorch, and in Liger-Kernel if installed.

A norm is that of a block: the float32 residual comes in, and goes on beside the normed tokens. The
loss sums the cross entropy of a head over all tokens. Errors are those of the gradients, rms,
relative to float64, on a sixteenth of the tokens. Needs a GPU; appends to results/fused.csv.
"""

import argparse
import csv
import importlib.util
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor

from xtuner_mamba.ops import linear_cross_entropy, rms_norm
from xtuner_mamba.testing import eighths, relative_rms

RESULTS = Path(__file__).parent / "results" / "fused.csv"
EPS = 1e-5


def norm_candidates() -> Iterator[tuple[str, Callable]]:
    """Yield (name, function of residual and weight) of every norm that is installed."""
    for name, impl in (("triton", "triton"), ("eager", "reference")):
        yield (
            name,
            lambda x, weight, impl=impl: rms_norm(
                x, weight, eps=EPS, dtype=weight.dtype, residual_dtype=x.dtype, impl=impl
            ),
        )
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops import LigerRMSNormFunction

        yield (
            "liger",
            lambda x, weight: (
                LigerRMSNormFunction.apply(x.to(weight.dtype), weight, EPS, 0.0, "llama", False),
                x,
            ),
        )


def loss_candidates(targets: Tensor) -> Iterator[tuple[str, Callable]]:
    """Yield (name, function of hidden states and head) of every loss that is installed."""
    for name, impl in (("triton", "triton"), ("eager", "reference")):
        yield (
            name,
            lambda x, weight, impl=impl: [linear_cross_entropy(x, weight, targets, impl=impl)],
        )
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

        options = (None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32)
        yield (
            "liger",
            lambda x, weight: LigerFusedLinearCrossEntropyFunction.apply(
                x, weight, targets, *options
            )[:1],
        )


def gradients(function: Callable, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run forward and backward once."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    results = function(*leaves)
    # the same numbers in every dtype
    incoming = [eighths(t.shape or [1], seed).to(t).view_as(t) for seed, t in enumerate(results, 1)]
    return torch.autograd.grad(results, leaves, incoming)


def measure(function: Callable, leaves: Sequence[Tensor], repeats: int) -> dict[str, float]:
    """Return the median milliseconds of forward and backward, and the MiB they add at the peak."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    incoming = [torch.randn_like(t) for t in function(*leaves)]
    times = []
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(function(*leaves), leaves, incoming)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() - before
    return {"ms": round(statistics.median(times[2:]), 3), "peak_mib": round(peak / 2**20)}


def main(argv: list[str] | None = None) -> int:
    """Measure, record and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="(%(default)s)")
    parser.add_argument("--dim", type=int, default=2048, help="of a hidden state (%(default)s)")
    parser.add_argument("--vocab", type=int, default=50280, help="of the head (%(default)s)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file (%(default)s)")
    parser.add_argument("--commit", help="of this checkout, where git is missing")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"a GPU must be there to be timed, got torch {torch.__version__} without one")
        return 1
    commit = args.commit or subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], text=True, cwd=Path(__file__).parent
    )
    setting = {
        "date": date.today(),
        "commit": commit.strip(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }

    torch.manual_seed(0)
    few = args.tokens // 16
    x = torch.randn(args.tokens, args.dim, device="cuda")
    scale = 1 + 0.1 * torch.randn(args.dim, device="cuda")
    head = torch.randn(args.vocab, args.dim, device="cuda") / args.dim**0.5
    targets = torch.randint(args.vocab, (args.tokens,), device="cuda")
    norm = "norm of a block", norm_candidates, norm_candidates, [x, scale.bfloat16()]
    loss = (
        "loss of a head",
        lambda: loss_candidates(targets),
        lambda: loss_candidates(targets[:few]),
        [x.bfloat16(), head.bfloat16()],
    )
    rows = []
    for op, candidates, candidates_of_few, (tokens, weight) in (norm, loss):
        oracle = dict(candidates_of_few())["eager"]
        exact = gradients(oracle, [tokens[:few].double(), weight.double()])
        for (impl, function), (_, of_few) in zip(candidates(), candidates_of_few()):
            found = gradients(of_few, [tokens[:few], weight])
            errors = [f"{relative_rms(a, b):.1e}" for a, b in zip(found, exact)]
            row = {"op": op, "impl": impl, "shape": f"{args.tokens} x {args.dim}"}
            row |= measure(function, [tokens, weight], args.repeats)
            rows.append(setting | row | dict(zip(("error_dx", "error_dweight"), errors)))

    args.out.parent.mkdir(parents=True, exist_ok=True)
    is_new = not args.out.exists()
    with args.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
    shown = ["op", "impl", "ms", "peak_mib", "error_dx", "error_dweight"]
    table = Table(*shown)
    for row in rows:
        table.add_row(*(str(row[name]) for name in shown))
    Console(width=120).print(f"{setting['gpu']}, bfloat16, {rows[0]['shape']}", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
