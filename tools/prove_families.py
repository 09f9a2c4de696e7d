"""Measure what packing changes in a tiny model of each family; write a table of docs/families.md.

Every model runs in float64 on the CPU: a row of packed documents against transformers on each
document alone, outputs and every gradient. Then, in float32, each document is overwritten in turn,
also with NaN, and the bits of the others are compared.

With --dtype bfloat16 or float16, on the CPU or a GPU, models are as large as the kernels ask for.
Packs and transformers, in those 16 bits, are both compared with float64 on each document alone, and
packs may err a small multiple of what transformers errs.
"""

import argparse
import json
import re
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# the models and what is measured of them are the tests' own
sys.path.insert(0, str(ROOT / "tests" / "model"))

from attention_families import FAMILIES as ATTENTION_FAMILIES  # noqa: E402
from family_proof import ROUNDING, Proof, RoundedProof, prove, prove_rounded  # noqa: E402
from mixer_families import FAMILIES as MIXER_FAMILIES  # noqa: E402

from xtuner_mamba.model.dispatch import DISPATCH_TABLE  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
TABLE = re.compile(r"(<!-- families -->\n).*(<!-- end of families -->)", re.DOTALL)
ROUNDED_TABLE = re.compile(
    r"(<!-- families in bfloat16 -->\n).*(<!-- end of families in bfloat16 -->)", re.DOTALL
)
FAMILIES = MIXER_FAMILIES | ATTENTION_FAMILIES
OPS = {"mamba": "selective_scan", "mamba2": "ssd", "attention": "attention"}
"""What a layer's forward calls, by the last part of its module's name."""
COLUMNS = ("family", "mixer layers", "attention layers", "ops", "outputs", "gradients", "isolated")
ROUNDED_COLUMNS = (
    "family",
    "layers",
    "ops on",
    "outputs",
    "of transformers",
    "worst gradient",
    "of transformers",
    "without boundaries",
    "isolated",
)
EXACT = 1e-12
# as kernels on a GPU: docs/kernels.md says why not 2
MOST_EXCESS = 3
# share of what a leak changes that an error may be, or it would tell nothing
CLEAR = 1 / 4


def row(name: str, proof: Proof) -> tuple[str, ...]:
    """Describe a proof, a cell a column."""
    op_of = {
        layer: OPS[DISPATCH_TABLE[layer].split(":")[0].rpartition(".")[2]] for layer in proof.layers
    }
    attention = [layer for layer, op in op_of.items() if op == "attention"]
    mixers = [layer for layer in proof.layers if layer not in attention]
    return (
        name,
        ", ".join(mixers),
        ", ".join(attention),
        ", ".join(dict.fromkeys(op_of.values())),
        f"{proof.logits_error:.0e}",
        f"{proof.gradient_error:.0e}",
        "to the bit" if not proof.has_experts else "but for the experts' rounding",
    )


def holds(proof: Proof) -> bool:
    """Tell whether a family keeps what is promised."""
    isolated = proof.changed <= (ROUNDING if proof.has_experts else 0)
    # one by one: the larger of a number and NaN may be the number
    return isolated and proof.logits_error < EXACT and proof.gradient_error < EXACT


def rounded_row(name: str, proof: RoundedProof) -> tuple[str, ...]:
    """Describe a proof in 16 bits, a cell a column."""
    return (
        name,
        ", ".join(proof.layers),
        ", ".join(f"{op}: {impl}" for op, impl in proof.backends.items()),
        f"{proof.logits_error:.1e}",
        f"{proof.eager_logits_error:.1e}",
        f"{proof.gradient_error:.1e} ({proof.worst})",
        f"{proof.eager_gradient_error:.1e}",
        f"{proof.leak:.1e}",
        "to the bit" if proof.changed == 0 else f"but for {proof.changed:.0e}",
    )


def holds_rounded(proof: RoundedProof, dtype: torch.dtype) -> bool:
    """Tell whether a family keeps in 16 bits what is promised."""
    isolated = proof.changed <= (torch.finfo(dtype).eps if proof.has_experts else 0)
    return isolated and proof.excess < MOST_EXCESS and proof.logits_error < CLEAR * proof.leak


def markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Write the rows as a Markdown table."""
    lines = [columns, len(columns) * ("---",), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(argv: list[str] | None = None) -> int:
    """Measure the families; 1 if one of them breaks the promise."""
    args = parse_args(argv)
    names = args.family or list(FAMILIES)
    rounded, dtype = args.dtype != "float64", getattr(torch, args.dtype)
    proofs = prove_each(names, dtype, args.device)
    columns, describe = (ROUNDED_COLUMNS, rounded_row) if rounded else (COLUMNS, row)
    rows = [describe(name, proof) for name, proof in proofs.items()]
    if args.json:
        print(json.dumps({name: asdict(proof) for name, proof in proofs.items()}, indent=2))
    else:
        table = Table(*columns, box=SIMPLE)
        for cells in rows:
            table.add_row(*cells)
        # a pipe or a narrow terminal would break every name
        Console(width=max(200 if rounded else 140, Console().width)).print(table)
    kept = [n for n, p in proofs.items() if (holds_rounded(p, dtype) if rounded else holds(p))]
    broken = [name for name in names if name not in kept]
    if broken:
        print(f"these families are not exact or not isolated: {broken}", file=sys.stderr)
        return 1
    if args.write:
        marks = ROUNDED_TABLE if rounded else TABLE
        where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}:\n\n" if rounded else ""
        written = where + markdown(columns, rows)
        text, found = marks.subn(lambda m: m[1] + written + m[2], PAGE.read_text())
        assert found == 1, f"{PAGE} has lost the marks around its table"
        PAGE.write_text(text)
    return 0


def prove_each(
    names: list[str], dtype: torch.dtype, device: str
) -> dict[str, Proof] | dict[str, RoundedProof]:
    """Measure families, and tell of those that do not run."""
    proofs = {}
    for name in track(names, "proving", console=Console(stderr=True)):
        build = FAMILIES[name]
        try:
            exact = dtype is torch.float64
            proofs[name] = prove(build) if exact else prove_rounded(build, dtype, device)
        # whatever it is, the others are still to be proven
        except Exception:
            print(f"{name} does not run:", file=sys.stderr)
            traceback.print_exc()
    return proofs


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only these")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float64", "bfloat16", "float16"], default="float64")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--write", action="store_true", help="update the table of docs/families.md")
    args = parser.parse_args(argv)
    if args.write and args.family:
        parser.error("--write must come without --family: the page has every family")
    if args.write and (args.device, args.dtype) not in {("cpu", "float64"), ("cuda", "bfloat16")}:
        parser.error(
            "--write must come with float64 on the cpu or bfloat16 on cuda, which the page has, "
            f"got {args.dtype} on {args.device}"
        )
    if (args.device, args.dtype) == ("cuda", "float64"):
        parser.error(
            "--dtype must be bfloat16 or float16 on cuda, got float64, which is no kernel's"
        )
    return args


if __name__ == "__main__":
    raise SystemExit(main())
