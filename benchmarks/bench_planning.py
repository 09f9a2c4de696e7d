"""Time how long planning takes, and how full the packs are.

Document lengths are log-normal(6.2, 0.85) kept in [57, 2048], those of an instruction data set.
Planning runs in one thread.
"""

import argparse
import json
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from xtuner_mamba.dataset.plan import plan_best_fit, plan_wrap

# a planner, and whether it draws
PLANNERS = {
    "best_fit": (plan_best_fit, True),
    "best_fit, longest first": (plan_best_fit, False),
    "wrap": (plan_wrap, True),
}


def draw_lengths(num_documents: int, seed: int = 0) -> np.ndarray:
    """Return document lengths, int64, ``(num_documents,)``."""
    rng = np.random.default_rng(seed)
    lengths = np.empty(0, dtype=np.int64)
    while len(lengths) < num_documents:
        drawn = rng.lognormal(6.2, 0.85, 2 * num_documents).astype(np.int64)
        lengths = np.append(lengths, drawn[(drawn >= 57) & (drawn <= 2048)])
    return lengths[:num_documents]


def measure(name: str, lengths: np.ndarray, max_length: int, repeats: int) -> dict:
    """Plan ``repeats`` times, with a seed each, and return the median."""
    planner, draws = PLANNERS[name]
    seconds = []
    for seed in range(repeats):
        start = time.perf_counter()
        plan = planner(lengths, max_length, np.random.default_rng(seed) if draws else None)
        seconds.append(time.perf_counter() - start)
    whole = plan.pieces.lengths == lengths[plan.pieces.documents]
    return {
        "packing": name,
        "documents": len(lengths),
        "max_length": max_length,
        "seconds": float(np.median(seconds)),
        "packs": len(plan),
        "utilisation": float(lengths.sum() / (len(plan) * max_length)),
        "split": len(np.unique(plan.pieces.documents[~whole])),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-documents", type=int, default=1_000_000)
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print a line of JSON a planner")
    args = parser.parse_args(argv)

    lengths = draw_lengths(args.num_documents)
    rows = [measure(name, lengths, args.max_length, args.repeats) for name in PLANNERS]
    if args.json:
        print("\n".join(map(json.dumps, rows)))
        return 0
    table = Table("packing", "seconds", "packs", "utilisation", "documents split")
    for row in rows:
        table.add_row(
            row["packing"],
            f"{row['seconds']:.2f}",
            f"{row['packs']:,}",
            f"{row['utilisation']:.2%}",
            f"{row['split']:,}",
        )
    Console().print(f"{args.num_documents:,} documents, packs of {args.max_length:,} tokens", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
