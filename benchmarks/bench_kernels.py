"""Measure the errors of the GPU kernels of both ops, then time them beside the official ones.

The official scan resets nothing and reads its rows channel by channel, so it gets the pack as one
sequence laid out as it likes; the official conv resets by ``seq_idx``. Both are measured where they
are installed (mamba_ssm, causal_conv1d). Prints two tables, times and errors, and appends them to
CSV files, the times of a pack as soon as they are there. Fails if errors are out of bounds.
"""

import argparse
import csv
import importlib.util
import subprocess
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.ops import causal_conv1d, selective_scan
from xtuner_mamba.ops.selective_scan.gluon_support import why_not_gluon
from xtuner_mamba.testing import (
    assert_errs_like_eager,
    conv_oracle,
    in_float64,
    lognormal_lengths,
    make_conv_inputs,
    make_scan_inputs,
    outputs_and_grads,
    relative_rms,
    scan_oracle,
)

RESULTS = Path(__file__).parent / "results"
SCAN, CONV = {"dt_softplus": True}, {"activation": "silu"}
OPS = {
    "selective_scan": (selective_scan, scan_oracle, make_scan_inputs, SCAN),
    "causal_conv1d": (causal_conv1d, conv_oracle, make_conv_inputs, CONV),
}
OFFICIAL = {"selective_scan": "mamba_ssm", "causal_conv1d": "causal_conv1d"}


class Case(NamedTuple):
    """What is timed."""

    op: str
    layout: str
    lengths: list[int]
    dim: int
    dtype: torch.dtype


def make_cases() -> list[Case]:
    """Return packs of every kind; the standard pack is 65,536 tokens in log-normal documents."""
    standard, total = lognormal_lengths(65_536), 65_536
    half = torch.bfloat16
    return [
        *(
            Case("selective_scan", "standard pack", standard, dim, half)
            for dim in (4096, 1536, 5120)
        ),
        Case("selective_scan", "mean 64", lognormal_lengths(total, scale=64 / 594), 4096, half),
        Case("selective_scan", "one token each", [1] * total, 4096, half),
        Case("selective_scan", "one document", [total], 4096, half),
        Case("selective_scan", "4,096 tokens", lognormal_lengths(4096), 4096, half),
        Case("selective_scan", "16 rows x 4,096", [4096] * 16, 4096, half),
        Case("selective_scan", "standard pack", standard, 4096, torch.float16),
        Case("selective_scan", "standard pack", standard, 4096, torch.float32),
        Case("causal_conv1d", "standard pack", standard, 4096, half),
    ]


def impls_of(op: str, inputs: dict[str, Tensor]) -> list[str]:
    """Return the GPU implementations of ours that take these inputs, the fastest first."""
    if op == "causal_conv1d":
        return ["triton"]
    reason = why_not_gluon(inputs["x"][0], inputs["dt"][0], inputs["A"], inputs["z"])
    return ["triton"] if reason else ["gluon", "triton"]


def official_scan(inputs: dict[str, Tensor], rows: int) -> tuple[Callable, dict[str, Tensor]]:
    """Return the official scan and its tensors, channels first."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    names = {"x": "u", "dt": "delta", "dt_bias": "delta_bias"}
    tensors = {
        names.get(name, name): t.unflatten(1, (rows, -1))[0].mT.contiguous() if t.ndim == 3 else t
        for name, t in inputs.items()
        if name not in ("cu_seqlens", "initial_states")
    }
    return lambda **tensors: selective_scan_fn(**tensors, delta_softplus=True), tensors


def official_conv(inputs: dict[str, Tensor], layout: PackedLayout) -> tuple[Callable, dict]:
    """Return the official conv and its tensors."""
    from causal_conv1d import causal_conv1d_fn

    tensors = {"x": inputs["x"].mT, "weight": inputs["weight"], "bias": inputs["bias"]}
    seq_idx = layout.seq_idx
    return lambda **tensors: causal_conv1d_fn(**tensors, seq_idx=seq_idx, **CONV), tensors


def make_inputs(case: Case, layout: PackedLayout) -> dict[str, Tensor]:
    """Draw the tensors of a case, 4,096 tokens of them: a host would draw all for many seconds."""
    drawn = 4096
    size = {"dstate": 16} if case.op == "selective_scan" else {"width": 4}
    inputs = OPS[case.op][2]([drawn], dim=case.dim, dtype=case.dtype, device="cuda", **size)
    del inputs["initial_states"]
    for name, t in inputs.items():
        if t.ndim == 3:
            inputs[name] = t.repeat(1, layout.total // drawn, 1)
    return inputs | {"cu_seqlens": layout.cu_seqlens}


def candidates(case: Case) -> Iterator[tuple[str, Callable, dict[str, Tensor]]]:
    """Yield (name, function, tensors by argument) of every implementation that is installed."""
    op, _, _, options = OPS[case.op]
    layout = PackedLayout.from_lengths(case.lengths).to("cuda")
    inputs = make_inputs(case, layout)
    impls = impls_of(case.op, inputs)
    # the slower of ours once, to know what the choice is worth
    for impl in impls if (case.dim, case.layout) == (4096, "standard pack") else impls[:1]:
        yield impl, lambda impl=impl, **tensors: op(**tensors, **options, impl=impl), inputs
    if importlib.util.find_spec(OFFICIAL[case.op]):
        if case.op == "causal_conv1d":
            yield "official, seq_idx", *official_conv(inputs, layout)
        else:
            rows = len(case.lengths) if "rows" in case.layout else 1
            yield "official, no resets", *official_scan(inputs, rows)


def measure_errors(dtype: torch.dtype) -> tuple[list[dict[str, object]], list[str]]:
    """Measure what the kernels err by, gradients too, beside eager PyTorch.

    Returns:
        For every result the rms error relative to it, of every implementation, those of the
        official kernels for one document, since they know no other; and what errs more than 6
        times as much as eager PyTorch. In float32 the special-function unit errs by 2 units in the
        last place, a CPU's exp by half; a state before a document of one token has a gradient of
        three such factors, 5.1 times as far off at worst.
    """
    rows, excesses = [], []
    for name, (op, oracle, make, options) in OPS.items():
        size = {"dstate": 16} if name == "selective_scan" else {"width": 4}
        draws = [
            make(lengths, dim=256, dtype=dtype, seed=seed, **size)
            for seed, lengths in enumerate([[250], [1, 5, 70, 64], [1] * 20 + [350], [31, 100]])
        ]
        exact = [outputs_and_grads(oracle, in_float64(inputs), **options) for inputs in draws]
        results = {"eager": [outputs_and_grads(op, i, impl="reference", **options) for i in draws]}
        on_gpu = [{name: t.cuda() for name, t in inputs.items()} for inputs in draws]
        for impl in impls_of(name, on_gpu[0]):
            results[impl] = [outputs_and_grads(op, i, impl=impl, **options) for i in on_gpu]
            try:
                assert_errs_like_eager(results[impl], results["eager"], exact, factor=6)
            except AssertionError as error:
                excesses.append(f"{name}, {impl}, {dtype}: {error}")
        official = official_errors(name, on_gpu[0])
        for result in exact[0]:
            row = {"op": name, "dtype": str(dtype).removeprefix("torch."), "result": result}
            for impl in ("eager", "triton", "gluon"):
                draw = results.get(impl, [{}])[0].get(result)
                row[impl] = "" if draw is None else relative_rms(draw.cpu(), exact[0][result])
            row["official"] = official.get(result, "")
            rows.append(row)
    return rows, excesses


def official_errors(op: str, inputs: dict[str, Tensor]) -> dict[str, float]:
    """Return the official kernel's errors for a document without an initial state."""
    if not importlib.util.find_spec(OFFICIAL[op]):
        return {}
    _, oracle, _, options = OPS[op]
    inputs = {name: t for name, t in inputs.items() if name != "initial_states"}
    if op == "selective_scan":
        function, tensors = official_scan(inputs, rows=1)
    else:
        layout = PackedLayout.from_lengths([inputs["x"].shape[1]]).to("cuda")
        function, tensors = official_conv(inputs, layout)
    exact_inputs = in_float64({name: t.cpu() for name, t in inputs.items()})
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    exact_leaves = {
        name: t.requires_grad_() if t.is_floating_point() else t for name, t in exact_inputs.items()
    }
    y, exact_y = function(**leaves).mT, oracle(**exact_leaves, **options)
    dy = torch.randn(exact_y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype)
    y.backward(dy.cuda())
    exact_y.backward(dy.double())
    errors = {"y": relative_rms(y.cpu(), exact_y)}
    names = {"u": "x", "delta": "dt", "delta_bias": "dt_bias"}
    for name, leaf in leaves.items():
        grad = leaf.grad.mT if leaf.ndim == 3 else leaf.grad
        exact_grad = exact_leaves[names.get(name, name)].grad
        errors[f"d{names.get(name, name)}"] = relative_rms(grad.cpu(), exact_grad)
    return errors


def measure(function: Callable, tensors: dict[str, Tensor]) -> dict[str, tuple[float, ...]]:
    """Return p20, p50 and p80 in milliseconds and the peak in MiB, by mode."""
    leaves = {name: t.detach() if t.is_floating_point() else t for name, t in tensors.items()}
    wanted = [t.requires_grad_() for t in leaves.values() if t.is_floating_point()]
    y = function(**leaves)
    dy = torch.randn_like(y)
    modes = {
        "forward": lambda: function(**leaves),
        "backward": lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True),
    }
    results = {}
    for mode, run in modes.items():
        torch.cuda.reset_peak_memory_stats()
        run()
        peak = torch.cuda.max_memory_allocated() / 2**20
        times = triton.testing.do_bench(run, warmup=50, rep=300, quantiles=[0.2, 0.5, 0.8])
        results[mode] = (*times, peak)
    return results


def append(path: Path, rows: list[dict[str, object]]) -> None:
    """Append rows to a CSV file, with a header if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        if new:
            writer.writeheader()
        writer.writerows(rows)


def show(title: str, rows: list[dict[str, object]], columns: list[str]) -> None:
    """Print some columns."""
    table = Table(title=title)
    for name in columns:
        table.add_column(name)
    for row in rows:
        cells = (row[name] for name in columns)
        table.add_row(*(f"{c:.1e}" if isinstance(c, float) else str(c) for c in cells))
    Console(width=120).print(table)


def check_errors(about: dict[str, object], out: Path) -> list[str]:
    """Measure, print and append the errors; return those out of bounds."""
    errors, excesses = [], []
    for dtype in (torch.bfloat16, torch.float32):
        measured, beyond = measure_errors(dtype)
        errors += measured
        excesses += beyond
    append(out / "accuracy.csv", [about | row for row in errors])
    show("errors against float64, rms over rms", errors, list(errors[0]))
    for excess in excesses:
        print(f"errs more than 6 times as much as eager PyTorch: {excess}")
    return excesses


def time_cases(cases: list[Case], about: dict[str, object], out: Path) -> None:
    """Time, append and print."""
    rows = []
    for case in track(cases, "timing"):
        shape = {
            "op": case.op, "layout": case.layout, "documents": len(case.lengths),
            "tokens": sum(case.lengths), "dim": case.dim,
            "dtype": str(case.dtype).removeprefix("torch."),
        }  # fmt: skip
        timed = []
        for impl, function, tensors in candidates(case):
            for mode, (p20, p50, p80, peak) in measure(function, tensors).items():
                times = {"p20_ms": p20, "p50_ms": p50, "p80_ms": p80}
                times = {name: f"{time:.3f}" for name, time in times.items()}
                timed.append(
                    shape | {"impl": impl, "mode": mode} | times | {"peak_mib": round(peak)}
                )
        append(out / "kernels.csv", [about | row for row in timed])
        rows += timed
    columns = ["op", "layout", "dim", "dtype", "impl", "mode", "p50_ms", "peak_mib"]
    show(str(about["gpu"]), rows, columns)


def main(argv: list[str] | None = None) -> int:
    """Check and time what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    layouts = list(dict.fromkeys(case.layout for case in make_cases()))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder (%(default)s)")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), help="to time (all)")
    parser.add_argument("--layouts", nargs="+", choices=layouts, help="packs to time (all)")
    parser.add_argument("--without-errors", action="store_true", help="time only, unchecked")
    parser.add_argument("--commit", help="of this checkout, where git is missing")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"a GPU must be there to be timed, got torch {torch.__version__} without one")
        return 1
    commit = args.commit or subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], text=True, cwd=Path(__file__).parent
    )
    about = {
        "date": date.today(),
        "commit": commit.strip(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    excesses = [] if args.without_errors else check_errors(about, args.out)
    cases = [
        case
        for case in make_cases()
        if case.op in args.ops and case.layout in (args.layouts or layouts)
    ]
    time_cases(cases, about, args.out)
    return 1 if excesses else 0


if __name__ == "__main__":
    raise SystemExit(main())
