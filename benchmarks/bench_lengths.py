"""Time what a million document lengths take: the report, the boundaries, an epoch of batches.

Document lengths are log-normal(6.2, 0.85) kept in [57, 2048], those of an instruction data set; all
runs in one thread.
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from bench_planning import draw_lengths
from mmengine.logging import MMLogger
from rich.console import Console
from rich.table import Table

from xtuner_mamba.dataset import BucketBatchSampler, TokenBudgetBatchSampler
from xtuner_mamba.dataset.boundaries import optimal_boundaries
from xtuner_mamba.dataset.lengths import analyse_lengths

BOUNDARIES = [256, 512, 1024, 2048]


def cases(lengths: np.ndarray) -> dict[str, Callable[[], object]]:
    """Return what to time, by name."""
    return {
        "report of `xtuner-mamba lengths`": lambda: analyse_lengths(
            lengths, 8192, boundaries=BOUNDARIES
        ),
        "optimal boundaries, 1 to 8 buckets": lambda: optimal_boundaries(lengths),
        "an epoch of buckets": lambda: list(BucketBatchSampler(lengths, BOUNDARIES, seed=0)),
        "an epoch by token budget": lambda: list(TokenBudgetBatchSampler(lengths, seed=0)),
    }


def measure(run: Callable[[], object], repeats: int) -> float:
    """Return the median seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-documents", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print a line of JSON a row")
    args = parser.parse_args(argv)

    MMLogger.get_current_instance().setLevel("WARNING")
    lengths = draw_lengths(args.num_documents)
    rows = {name: measure(run, args.repeats) for name, run in cases(lengths).items()}
    if args.json:
        for name, seconds in rows.items():
            print(json.dumps({"what": name, "documents": len(lengths), "seconds": seconds}))
        return 0
    table = Table("what", "seconds")
    for name, seconds in rows.items():
        table.add_row(name, f"{seconds:.2f}")
    Console().print(f"{args.num_documents:,} documents", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
