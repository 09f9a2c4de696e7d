"""Time the GPU kernels of both ops on a pack of documents, beside the official CUDA kernels.

The official scan resets nothing and reads its rows channel by channel, so it gets one long
sequence laid out as it likes; the official conv resets by ``seq_idx``. Both are timed where they
are installed (mamba_ssm, causal_conv1d). Prints a table and appends to a CSV file.
"""

import argparse
import csv
import importlib.util
import subprocess
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.ops import causal_conv1d, selective_scan
from xtuner_mamba.testing import (
    conv_oracle,
    in_float64,
    lognormal_lengths,
    make_conv_inputs,
    make_scan_inputs,
    outputs_and_grads,
    relative_rms,
    scan_oracle,
)

RESULTS = Path(__file__).parent / "results" / "kernels.csv"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCAN, CONV = {"dt_softplus": True}, {"activation": "silu"}


def check(dtype: torch.dtype) -> None:
    """Check that the kernels err at most twice as much as eager PyTorch, gradients too."""
    lengths = [1, 5, 70, 64]
    for op, oracle, inputs, options in (
        (selective_scan, scan_oracle, make_scan_inputs(lengths, dim=200, dtype=dtype), SCAN),
        (causal_conv1d, conv_oracle, make_conv_inputs(lengths, dim=200, dtype=dtype), CONV),
    ):
        on_gpu = {name: t.cuda() for name, t in inputs.items()}
        actual = outputs_and_grads(op, on_gpu, impl="triton", **options)
        eager = outputs_and_grads(op, inputs, impl="reference", **options)
        exact = outputs_and_grads(oracle, in_float64(inputs), **options)
        for name, t in exact.items():
            error = relative_rms(actual[name].cpu(), t)
            # an eps / 4 is what one correct rounding costs
            allowed = 2 * max(relative_rms(eager[name], t), torch.finfo(eager[name].dtype).eps / 4)
            if not error <= allowed:
                raise RuntimeError(
                    f"{name} of {op.__name__} must err by at most {allowed:.1e} (rms) to be timed, "
                    f"got {error:.1e}; run the tests of tests/ops"
                )


def scan_candidates(
    lengths: list[int], dim: int, dstate: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable, dict[str, Tensor]]]:
    """Yield (name, function, tensors by argument) of every scan that is installed."""
    inputs = make_scan_inputs(lengths, dim=dim, dstate=dstate, dtype=dtype, device="cuda")
    inputs["cu_seqlens"] = PackedLayout.from_lengths(lengths).to("cuda").cu_seqlens
    del inputs["initial_states"]
    yield "triton", lambda **tensors: selective_scan(**tensors, **SCAN, impl="triton"), inputs
    if importlib.util.find_spec("mamba_ssm"):
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        names = {"x": "u", "dt": "delta", "dt_bias": "delta_bias"}
        rows = {"x", "dt", "B", "C", "z"}
        channels_first = {
            names.get(name, name): t.mT.contiguous() if name in rows else t
            for name, t in inputs.items()
            if name != "cu_seqlens"
        }
        yield (
            "mamba_ssm, no resets",
            lambda **tensors: selective_scan_fn(**tensors, delta_softplus=True),
            channels_first,
        )


def conv_candidates(
    lengths: list[int], dim: int, width: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable, dict[str, Tensor]]]:
    """Yield (name, function, tensors by argument) of every conv that is installed."""
    inputs = make_conv_inputs(lengths, dim=dim, width=width, dtype=dtype, device="cuda")
    layout = PackedLayout.from_lengths(lengths).to("cuda")
    inputs["cu_seqlens"] = layout.cu_seqlens
    del inputs["initial_states"]
    yield "triton", lambda **tensors: causal_conv1d(**tensors, **CONV, impl="triton"), inputs
    if importlib.util.find_spec("causal_conv1d"):
        from causal_conv1d import causal_conv1d_fn

        tensors = {"x": inputs["x"].mT, "weight": inputs["weight"], "bias": inputs["bias"]}
        yield (
            "causal_conv1d, seq_idx",
            lambda **tensors: causal_conv1d_fn(**tensors, seq_idx=layout.seq_idx, **CONV),
            tensors,
        )


def measure(function: Callable, tensors: dict[str, Tensor]) -> dict[str, tuple[float, ...]]:
    """Return p20, p50 and p80 in milliseconds and the peak in MiB, by mode."""
    leaves = {name: t.detach() for name, t in tensors.items()}
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
        times = triton.testing.do_bench(run, warmup=100, rep=400, quantiles=[0.2, 0.5, 0.8])
        results[mode] = (*times, peak)
    return results


def main(argv: list[str] | None = None) -> int:
    """Check, time, print and append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65_536, help="of the pack (%(default)s)")
    parser.add_argument("--dim", type=int, default=4096, help="channels (%(default)s)")
    parser.add_argument("--dstate", type=int, default=16, help="of the scan (%(default)s)")
    parser.add_argument("--width", type=int, default=4, help="of the conv (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file (%(default)s)")
    parser.add_argument("--commit", help="of this checkout, where git is missing")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"a GPU must be there to be timed, got torch {torch.__version__} without one")
        return 1
    commit = args.commit or subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], text=True, cwd=Path(__file__).parent
    )
    check(DTYPES[args.dtype])

    lengths = lognormal_lengths(args.tokens)
    pack = f"{args.tokens} tokens in {len(lengths)} documents x {args.dim}"
    candidates = [
        ("selective_scan", f"{pack} x {args.dstate}", scan_candidates, args.dstate),
        ("causal_conv1d", f"{pack} x {args.width}", conv_candidates, args.width),
    ]
    setting = {
        "date": date.today(),
        "commit": commit.strip(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    rows = []
    for op, shape, make, size in candidates:
        for impl, function, tensors in make(lengths, args.dim, size, DTYPES[args.dtype]):
            for mode, (p20, p50, p80, peak) in measure(function, tensors).items():
                row = {"op": op, "impl": impl, "shape": shape, "dtype": args.dtype, "mode": mode}
                times = {"p20_ms": p20, "p50_ms": p50, "p80_ms": p80}
                row |= {name: f"{time:.3f}" for name, time in times.items()}
                rows.append(setting | row | {"peak_mib": round(peak)})

    args.out.parent.mkdir(parents=True, exist_ok=True)
    new = not args.out.exists()
    with args.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        if new:
            writer.writeheader()
        writer.writerows(rows)
    table = Table(title=f"{setting['gpu']}, {args.dtype}, {pack}")
    shown = ["op", "impl", "mode", "p20_ms", "p50_ms", "p80_ms", "peak_mib"]
    for name in shown:
        table.add_column(name, justify="right" if name.startswith("p") else "left")
    for row in rows:
        table.add_row(*(str(row[name]) for name in shown))
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
