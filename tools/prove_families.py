"""Measure what packing changes in a tiny model of each family; write the table of docs/families.md.

Every model runs in float64 on the CPU: a row of packed documents against transformers on each
document alone, outputs and every gradient. Then, in float32, each document is overwritten in turn,
also with NaN, and the bits of the others are compared.
"""

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# the models and what is measured of them are the tests' own
sys.path.insert(0, str(ROOT / "tests" / "model"))

from attention_families import FAMILIES as ATTENTION_FAMILIES  # noqa: E402
from family_proof import Proof, prove  # noqa: E402
from mixer_families import FAMILIES as MIXER_FAMILIES  # noqa: E402

from xtuner_mamba.model.dispatch import DISPATCH_TABLE  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
TABLE = re.compile(r"(<!-- families -->\n).*(<!-- end of families -->)", re.DOTALL)
FAMILIES = MIXER_FAMILIES | ATTENTION_FAMILIES
OPS = {"mamba": "selective_scan", "mamba2": "ssd", "attention": "attention"}
"""What a layer's forward calls, by the last part of its module's name."""
COLUMNS = ("family", "mixer layers", "attention layers", "ops", "outputs", "gradients", "isolated")
EXACT = 1e-12
ROUNDING = 1e-6


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


def markdown(rows: list[tuple[str, ...]]) -> str:
    """Write the rows as a Markdown table."""
    lines = [COLUMNS, len(COLUMNS) * ("---",), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(argv: list[str] | None = None) -> int:
    """Measure the families; 1 if one of them breaks the promise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only these")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--write", action="store_true", help="update the table of docs/families.md")
    args = parser.parse_args(argv)
    if args.write and args.family:
        parser.error("--write must come without --family: the page has every family")

    names = args.family or list(FAMILIES)
    console = Console(stderr=True)
    proofs = {name: prove(FAMILIES[name]) for name in track(names, "proving", console=console)}
    rows = [row(name, proof) for name, proof in proofs.items()]
    if args.json:
        print(json.dumps({name: asdict(proof) for name, proof in proofs.items()}, indent=2))
    else:
        table = Table(*COLUMNS, box=SIMPLE)
        for cells in rows:
            table.add_row(*cells)
        # a pipe or a narrow terminal would break every name
        Console(width=max(140, Console().width)).print(table)
    broken = [name for name, proof in proofs.items() if not holds(proof)]
    if broken:
        print(f"these families are not exact or not isolated: {broken}", file=sys.stderr)
        return 1
    if args.write:
        text, found = TABLE.subn(lambda m: m[1] + markdown(rows) + m[2], PAGE.read_text())
        assert found == 1, f"{PAGE} has lost the marks around its table"
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
