"""Measure the largest batch of each bucket, and the largest pack, that this device can train on.

CONFIG is what `xtuner train` takes, a config or the name of a template. Each try trains two
optimizer steps on random tokens in a process of its own, with the config's model, optimizer,
precision and checkpointing. Where memory runs out the next try is smaller; any other failure ends
the search. What fits, times 0.85, is written to a file for `batch_sizes` of BucketBatchSampler.
Without a GPU, and without --memory-limit, the tries are listed and not made.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from xtuner_mamba.tools.batch_search import most_tries
from xtuner_mamba.tools.changed_training import check_config
from xtuner_mamba.tools.corpus import read_config
from xtuner_mamba.tools.fresh_process import interrupted_by_sigterm, run_fresh
from xtuner_mamba.tools.output_path import check_output
from xtuner_mamba.tools.probe_shapes import MARGIN, TOLERANCE, Found, Shape, plan_shapes, probe
from xtuner_mamba.tools.probe_try import try_shape

# how a file begins that this tool has written, and may write again
_HEADER = "# of xtuner-mamba probe-batch"


def main(argv: list[str] | None = None) -> int:
    """List the tries, or make them and write what was found."""
    args = _parse_args(argv)
    try:
        _check_memory_limit(args.memory_limit)
        cfg = read_config(args.config)
        check_config(cfg)
        shapes = plan_shapes(cfg, args.most_tokens)
        previous = _read_previous(args.out)
        if not torch.cuda.is_available() and args.memory_limit is None:
            show_plan(shapes, args)
            return 0
        check_output("--out", args.out)
        with interrupted_by_sigterm():
            found = _probe_with_progress(args, shapes)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{args.config}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.config}: stopped", file=sys.stderr)
        return 130
    contents = summarize(found, packs=cfg.get("use_varlen_attn", False))
    if contents["batch_sizes"]:
        write(contents, args, previous)
    if args.json:
        print(json.dumps([asdict(one) | dict(advised=one.advised) for one in found], indent=2))
    else:
        show(found, contents)
        print(f"written to {args.out}" if contents["batch_sizes"] else "nothing is written")
    too_long = [one.shape.length for one in found if not one.fits]
    for length in too_long:
        print(
            f"{args.config}: a document of {length:,} tokens must fit in memory, got none that "
            "does; lower max_length, or set use_activation_checkpointing=True in the model",
            file=sys.stderr,
        )
    return int(bool(too_long))


def summarize(found: list[Found], *, packs: bool) -> dict[str, Any]:
    """Return what configs are to use.

    Args:
        found: What fits.
        packs: Whether a batch of a bucket is laid end to end, and so is a pack.

    Returns:
        Documents by boundary, and tokens of a micro-batch without padding.
    """
    fitting = [one for one in found if one.fits]
    contents = {
        "device": fitting[0].device if fitting else None,
        "batch_sizes": {one.shape.length: one.advised for one in fitting},
    }
    if packs and fitting:
        contents["tokens"] = max(one.advised_tokens for one in fitting)
    return contents


def write(contents: dict[str, Any], args: argparse.Namespace, previous: dict[str, Any]) -> None:
    """Write the file, and say so if what it replaces was measured of something else."""
    now, before = (
        f"{measured.get('device')} with boundaries {[*measured.get('batch_sizes', [])]}"
        for measured in (contents, previous or contents)
    )
    if now != before:
        print(f"{args.out} was of {before}; replaced by {now}", file=sys.stderr)
    args.out.write_text(
        f"{_HEADER} {args.config}: what fits, times {MARGIN}\n"
        f"{yaml.safe_dump(contents, sort_keys=False)}"
    )


def show_plan(shapes: list[Shape], args: argparse.Namespace) -> None:
    """Say what would be tried."""
    if args.json:
        print(json.dumps([asdict(shape) for shape in shapes], indent=2))
        return
    table = Table("documents of", "now", "tried up to", "tries at most", box=SIMPLE)
    for shape in shapes:
        tries = most_tries(start=shape.own, step=shape.own, most=shape.most, tolerance=TOLERANCE)
        table.add_row(f"{shape.length:,} tokens", f"{shape.own:,}", f"{shape.most:,}", str(tries))
    table.title = "No GPU is seen; on one, these batches would be tried"
    console = Console()
    console.print(table)
    console.print(
        "All but the first start from the tokens of the one before, and need a few tries only. "
        f"What fits, times {MARGIN}, would be written to {args.out}. --memory-limit GIB tries on "
        "the CPU.",
        highlight=False,
    )


def show(found: list[Found], contents: dict[str, Any]) -> None:
    """Print what fits, and what to use."""
    table = Table("documents of", "fit", "tokens", "peak GiB", "use", "now", "tries", box=SIMPLE)
    for one in found:
        table.add_row(
            f"{one.shape.length:,} tokens",
            f"{one.fits:,}" if one.fails else f"{one.fits:,} or more",
            f"{one.fits * one.shape.length:,}",
            f"{one.peak_bytes / 2**30:.2f}",
            f"{one.advised:,}",
            f"{one.shape.own:,}",
            str(one.num_tries),
        )
    table.title = f"Micro-batches that train on {contents['device'] or 'this device'}"
    console = Console()
    console.print(table)
    if "tokens" in contents:
        console.print(
            f"{contents['tokens']:,} tokens without padding: the max_length of packs, the "
            "tokens_per_batch of chunks and of a rolling window",
            highlight=False,
        )


def _check_memory_limit(limit: float | None) -> None:
    # NaN is not above 0 either
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(
            f"--memory-limit must be a number of GiB above 0, got {limit}; leave it out for all "
            "that the GPU has"
        )


def _read_previous(path: Path) -> dict[str, Any]:
    # whatever there is, text or not, has to stay
    text = path.read_text(errors="replace") if path.is_file() else ""
    if text and not text.startswith(_HEADER):
        raise ValueError(
            f"--out must be new, or a file of this tool, got {path}, which begins with "
            f"{text[:40]!r}; give another path, or remove it"
        )
    return yaml.safe_load(text) or {}


def _probe_with_progress(args: argparse.Namespace, shapes: list[Shape]) -> list[Found]:
    limit = None if args.memory_limit is None else int(args.memory_limit * 2**30)
    with Console(stderr=True).status("") as status:
        return probe(
            shapes,
            lambda shape, documents: run_fresh(
                try_shape, args.config, documents, shape.length, limit
            ),
            lambda text: status.update(f"trying {text}"),
        )


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="xtuner-mamba probe-batch", description=__doc__)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument(
        "--most-tokens", type=int, help="of a micro-batch to try (16 times what the config has)"
    )
    parser.add_argument(
        "--memory-limit", type=float, metavar="GIB", help="to stay below, on a GPU or on the CPU"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("batch_sizes.yaml"), help="file to write (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(argv)
