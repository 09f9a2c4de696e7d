"""Train packs, buckets and fixed chunks side by side, on the same documents from the same weights.

CONFIG is what `xtuner train` takes, a config of any of the three or the name of a template; the
others are made of it. Every optimizer step has as many target tokens in all of them. The first
half of the training, in which kernels are compiled, is not timed. The held-out loss is of
documents that none was trained on, each whole and from its own start, so that it may be compared.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import disable_progress_bars
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from xtuner_mamba.tools.changed_training import check_config
from xtuner_mamba.tools.compare_documents import choose_documents, read_settings
from xtuner_mamba.tools.compare_run import SCHEMES, train_scheme
from xtuner_mamba.tools.corpus import read_config
from xtuner_mamba.tools.fresh_process import interrupted_by_sigterm, run_fresh
from xtuner_mamba.tools.output_path import check_picture


@dataclass(frozen=True)
class Run:
    """What one scheme came to."""

    scheme: str
    tokens_per_second: float
    """Tokens of documents, in the second half of the training."""
    padding: float
    """Share of places without a token, if padding is executed or a pack is not full."""
    peak_bytes: int
    """Of the GPU's memory; without one, of the process."""
    device: str
    losses: list[float]
    """Mean over the target tokens of each optimizer step."""
    targets: list[int]
    """Target tokens of each optimizer step."""
    held_out: list[float]
    """Mean loss over the target tokens of other documents, before and after."""

    @property
    def loss(self) -> float:
        """Mean over the target tokens of the second half of the training."""
        half = slice(len(self.losses) // 2, None)
        total = sum(loss * n for loss, n in zip(self.losses[half], self.targets[half]))
        return total / sum(self.targets[half])


def main(argv: list[str] | None = None) -> int:
    """Train, print the table, or JSON, and draw the picture."""
    args = _parse_args(argv)
    try:
        check_picture(args.png)
        with interrupted_by_sigterm():
            runs = compare(args.config, args.steps, args.chunk_length)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{args.config}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.config}: stopped", file=sys.stderr)
        return 130
    draw(runs, args.png)
    if args.json:
        print(json.dumps([asdict(run) | dict(loss=run.loss) for run in runs], indent=2))
    else:
        show(runs)
        print(f"picture in {args.png}")
    return 0


def compare(config: str, steps: int, chunk_length: int | None = None) -> list[Run]:
    """Train every scheme in a process of its own.

    Args:
        config: Path, or name of a template.
        steps: Optimizer steps that are timed, after as many that are not.
        chunk_length: Of fixed chunks; see :func:`read_settings`.

    Raises:
        ValueError: The config has nothing to compare, or an argument is out of range.
        RuntimeError: A training failed, or did not start from the weights of the others.
    """
    if steps < 2:
        raise ValueError(f"--steps must be at least 2, got {steps}; the rate warms up in as many")
    if chunk_length is not None and chunk_length < 2:
        raise ValueError(
            f"--chunk-length must be at least 2, got {chunk_length}; a row of one token has no "
            "target"
        )
    disable_progress_bars()
    console = Console(stderr=True)
    with TemporaryDirectory() as folder, console.status("choosing documents") as status:
        cfg = read_config(config)
        check_config(cfg)
        settings = read_settings(cfg, chunk_length)
        documents = choose_documents(cfg, settings, steps)
        plan = asdict(settings) | dict(
            steps=steps,
            tokens_per_step=documents.tokens_per_step,
            boundaries=documents.boundaries,
        )
        for name in ("train", "held_out"):
            plan[name] = f"{folder}/{name}"
            getattr(documents, name).save_to_disk(plan[name])
        runs = []
        for scheme in SCHEMES:
            status.update(
                f"{scheme}: 2 x {steps} steps of {documents.tokens_per_step:,} targets, of "
                f"{len(documents.train):,} documents"
            )
            runs.append(Run(scheme, **run_fresh(train_scheme, config, scheme, plan)))
    starts = [run.held_out[0] for run in runs]
    if max(starts) > min(starts) * (1 + 1e-3):
        raise RuntimeError(
            f"all schemes must start from the same weights, got held-out losses of {starts}; set "
            "what draws the model's weights to a constant seed"
        )
    return runs


def show(runs: list[Run]) -> None:
    """Print the table."""
    table = Table("scheme", "tokens/s", "padding", "peak GiB", "loss", "held out", box=SIMPLE)
    for run in runs:
        table.add_row(
            run.scheme,
            f"{run.tokens_per_second:,.0f}",
            f"{run.padding:.1%}",
            f"{run.peak_bytes / 2**30:.2f}",
            f"{run.loss:.3f}",
            f"{run.held_out[0]:.3f} -> {run.held_out[1]:.3f}",
        )
    steps = len(runs[0].losses) // 2
    table.title = f"{steps} optimizer steps after {steps} others, {runs[0].device}"
    Console().print(table)


def draw(runs: list[Run], path: Path) -> None:
    """Draw speed, memory and the loss over the tokens trained on, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    names = [run.scheme for run in runs]
    axes[0].bar(names, [run.tokens_per_second for run in runs])
    axes[0].set(title="Tokens a second")
    axes[1].bar(names, [run.peak_bytes / 2**30 for run in runs])
    axes[1].set(title="Peak memory, GiB")
    for run in runs:
        axes[2].plot(list(accumulate(run.targets)), run.losses, label=run.scheme)
    axes[2].set(xlabel="target tokens", title="Loss of the step")
    axes[2].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="xtuner-mamba compare", description=__doc__)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument(
        "--steps", type=int, default=10, help="optimizer steps to time, after as many (%(default)s)"
    )
    parser.add_argument(
        "--chunk-length",
        type=int,
        help="of fixed chunks; the config's, or a quarter of a micro-batch",
    )
    parser.add_argument("--png", type=Path, help="where to draw (CONFIG_compare.png, here)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    args.png = args.png or Path(f"{Path(args.config).stem}_compare.png")
    return args
