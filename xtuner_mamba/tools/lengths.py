"""Compare the ways to batch a corpus by the lengths of its documents, and recommend one.

SOURCE is what `xtuner train` takes, a config or the name of a template, or a .json, .jsonl,
.parquet or .csv file with a column `length`, `input_ids` or `text`.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from xtuner_mamba.dataset.length_advice import Advice, advise
from xtuner_mamba.dataset.lengths import LengthReport, analyse_lengths
from xtuner_mamba.tools.corpus import Corpus, read_corpus
from xtuner_mamba.tools.output_path import check_picture

_DEFAULT_MAX_LENGTH = 8192
_DEFAULT_TOKENS = 16_000
# tokens of a row, since packing keeps a list of that many entries
_LONGEST_ROW = 2**22
# rows that long documents may add to those of the others: each is planned, in a minute at most
_MOST_ADDED_ROWS = 2**24


def main(argv: list[str] | None = None) -> int:
    """Print the tables, or JSON, and draw the picture."""
    args = _parse_args(argv)
    try:
        corpus = read_corpus(args.source, args.tokenizer)
        max_length = args.max_length or corpus.max_length or _DEFAULT_MAX_LENGTH
        _check_rows(corpus, max_length)
        # sizes are of the config's boundaries, and not of a budget
        measured = None if args.boundaries or args.tokens_per_batch else corpus.batch_sizes
        report = analyse_lengths(
            corpus.lengths,
            max_length,
            boundaries=args.boundaries or corpus.boundaries,
            tokens_per_batch=args.tokens_per_batch or corpus.tokens_per_batch or _DEFAULT_TOKENS,
            batch_sizes=measured,
            too_long=corpus.too_long,
        )
    except (ValueError, OSError, ImportError) as error:
        print(f"{args.source}: {error}", file=sys.stderr)
        return 1
    advice = advise(report)
    draw(report, args.png)
    if args.json:
        print(json.dumps(asdict(report) | {"advice": asdict(advice)}, indent=2))
    else:
        show(report, advice, Console())
        print(f"picture in {args.png}")
    return 0


def show(report: LengthReport, advice: Advice, console: Console) -> None:
    """Print the tables and the recommendation."""
    spread = ", ".join(f"{level} {tokens:,}" for level, tokens in report.quantiles.items())
    console.print(f"{report.documents:,} documents, {report.tokens:,} tokens: {spread}")
    schemes = Table("scheme", "padding", "split", "lost (tokens)", "boundaries", box=SIMPLE)
    schemes.columns[0].no_wrap = True
    for scheme in report.schemes:
        lost = {"truncated": scheme.num_truncated, "dropped": scheme.num_dropped}
        lost = ", ".join(f"{count:,} {how}" for how, count in lost.items() if count)
        schemes.add_row(
            scheme.name,
            f"{scheme.padding:.1%}",
            f"{scheme.num_split:,}" if scheme.num_split else "",
            f"{lost} ({scheme.num_lost_tokens / report.tokens:.1%})" if lost else "",
            " ".join(map(str, scheme.boundaries)),
        )
    schemes.title = f"Ways to batch them, rows of at most {report.max_length:,} tokens"
    console.print(schemes)
    console.print("Padding of chunks and packs is what they leave unused, the last one included.")
    buckets = Table("up to", "documents", "batch", "padding", "natural", "sqrt_tokens", box=SIMPLE)
    for bucket in report.buckets:
        buckets.add_row(
            f"{bucket.boundary:,}",
            f"{bucket.documents:,}",
            str(bucket.batch_size),
            f"{bucket.padding:.1%}",
            f"{bucket.natural:.1%}",
            f"{bucket.sqrt_tokens:.1%}",
        )
    buckets.title = "Buckets, and their share of the tokens trained on"
    console.print(buckets)
    console.print(f"Recommended: {advice.scheme}, since {advice.reason}.", highlight=False)
    if advice.scheme == "bucket":
        console.print(f"boundaries = {list(advice.boundaries)}", highlight=False)
    for note in advice.notes:
        console.print(f"Mind: {note}.", highlight=False)


def draw(report: LengthReport, path: Path) -> None:
    """Draw the histogram with boundaries, and the padding of each scheme, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    edges = report.bin_edges
    for counts, label in ((report.bin_documents, "documents"), (report.bin_tokens, "tokens")):
        shares = [count / sum(counts) for count in counts]
        left.stairs(shares, edges, label=label, fill=label == "documents", alpha=0.7)
    for bucket in report.buckets:
        left.axvline(bucket.boundary, color="black", linewidth=0.8, linestyle="dashed")
    left.set(xscale="log", xlabel="tokens of a document", ylabel="share", title="Lengths")
    left.legend()
    names = [scheme.name for scheme in report.schemes]
    right.barh(names, [100 * scheme.padding for scheme in report.schemes])
    right.invert_yaxis()
    right.set(xlabel="% of places without a token", title="Padding, or unused")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _check_rows(corpus: Corpus, max_length: int) -> None:
    if max_length > _LONGEST_ROW:
        raise ValueError(
            f"max_length must be at most {_LONGEST_ROW:,} to be planned, got {max_length:,}; lower "
            "--max-length"
        )
    if corpus.too_long not in ("split", "error"):
        return
    lengths = corpus.lengths
    added = int((-(-lengths // max_length) - 1).sum())
    if added > _MOST_ADDED_ROWS:
        raise ValueError(
            f"documents cut every max_length={max_length:,} tokens must add at most "
            f"{_MOST_ADDED_ROWS:,} rows, got {added:,} (document {lengths.argmax()} has "
            f"{lengths.max():,} tokens); mend that if it is a mistake, raise --max-length, or "
            "measure a sample"
        )


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="xtuner-mamba lengths", description=__doc__)
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("--tokenizer", help="name or path, for a file with texts")
    parser.add_argument(
        "--max-length", type=int, help=f"of a row; the config's, or {_DEFAULT_MAX_LENGTH}"
    )
    parser.add_argument(
        "--boundaries", type=int, nargs="+", help="of your buckets; the config's, if it has any"
    )
    parser.add_argument(
        "--tokens-per-batch", type=int, help=f"of a bucket; the config's, or {_DEFAULT_TOKENS}"
    )
    parser.add_argument("--png", type=Path, help="where to draw (SOURCE_lengths.png, here)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args(argv)
    for name in ("max_length", "tokens_per_batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    args.png = args.png or Path(f"{Path(args.source).stem}_lengths.png")
    try:
        check_picture(args.png)
    except ValueError as error:
        parser.error(str(error))
    return args
