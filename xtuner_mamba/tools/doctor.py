"""Look for what usually goes wrong when a Mamba trains on documents of different lengths.

CONFIG is what `xtuner train` takes; with --work-dir the log of its newest run there is read too.
Every check that finds something says what to do, and which line to change. They come in the order
of suspicion: does the loss really fall, do labels stand where they should, is the state reset, do
the lengths fit, and only then the model. Exits with 1 if something was found, with 2 if nothing
was but a check could not run or the config cannot be read, else with 0.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mmengine.runner import set_random_seed
from rich.console import Console
from rich.markup import escape
from xtuner.configs import cfgs_name_path

from xtuner_mamba.tools.checkup import (
    Finding,
    NotApplicable,
    exit_code,
    run_checks,
    summary_of,
    table_of,
)
from xtuner_mamba.tools.label_checks import (
    check_first_tokens,
    check_label_places,
    check_padding_labels,
    check_prompts,
)
from xtuner_mamba.tools.length_checks import (
    check_bucket_padding,
    check_exposure,
    check_step_tokens,
    check_trained_lengths,
)
from xtuner_mamba.tools.log_checks import check_loss_falls, check_memory
from xtuner_mamba.tools.model_checks import (
    check_boundary_hook,
    check_state_leak,
    check_weight_decay,
)
from xtuner_mamba.tools.training import Training


class Symptom(NamedTuple):
    """A check, and what one sees where it finds something."""

    name: str
    seen: str
    check: Callable[[Training], Finding | str]


def check_config(training: Training) -> Finding | str:
    """Check that ``xtuner train`` takes the config.

    Raises:
        NotApplicable: It asks nothing of such a config.
    """
    if not training.uses_varlen:
        raise NotApplicable("use_varlen_attn is False: nothing is asked of such a config")
    if training.refusal is not None:
        return Finding("it stops before anything is built", training.refusal)
    return "it takes the config"


SYMPTOMS = (
    Symptom("loss falls", "nothing is learnt, or long documents very slowly", check_loss_falls),
    Symptom("xtuner train", "training does not start", check_config),
    Symptom("label places", "the loss falls, but the text makes no sense", check_label_places),
    Symptom(
        "padding labels", "the loss is low at once, padding is generated", check_padding_labels
    ),
    Symptom("prompt labels", "questions are generated instead of answers", check_prompts),
    Symptom("first tokens", "a text goes on with another one after its end", check_first_tokens),
    Symptom("boundary hook", "training stops at its first step", check_boundary_hook),
    Symptom("state leak", "words of another document are generated", check_state_leak),
    Symptom("bucket padding", "large batches, and the GPU has little to do", check_bucket_padding),
    Symptom("exposure", "documents of some lengths are read badly", check_exposure),
    Symptom("trained lengths", "the text is far worse than the loss says", check_trained_lengths),
    Symptom("tokens a step", "the loss is restless at any learning rate", check_step_tokens),
    Symptom("memory", "memory rises and falls, until there is none left", check_memory),
    Symptom("weight decay", "what lies far back is forgotten", check_weight_decay),
)
"""In the order of suspicion: the loss, labels, the state, lengths, the model."""


def main(argv: list[str] | None = None) -> int:
    """Run the checks, and print a table and what to do, or JSON."""
    args = _parse_args(argv)
    set_random_seed(0)
    # what libraries and the config's own code print is no result
    with redirect_stdout(sys.stderr):
        try:
            training = Training(args.config, args.work_dir)
        except (ValueError, OSError, ImportError) as error:
            print(f"{args.config}: {error}")
            return 2
        results = run_checks({s.name: partial(s.check, training) for s in SYMPTOMS})
    seen = {symptom.name: symptom.seen for symptom in SYMPTOMS}
    lines = {result.check: find_line(args.config, result.setting) for result in results}
    if args.json:
        found = [
            asdict(result) | {"symptom": seen[result.check], "line": lines[result.check]}
            for result in results
        ]
        print(json.dumps({"checks": found}, indent=2))
        return exit_code(results)
    console = Console(highlight=False)
    console.print(table_of(results, f"{args.config}, in the order of suspicion"))
    for result in results:
        if result.remedy:
            line = lines[result.check]
            console.print(f"[bold]{result.check}[/bold] ({seen[result.check]})")
            console.print(escape(f"  do:   {result.remedy}"))
            console.print(escape(f"  line: {line}\n" if line else ""))
    console.print(summary_of(results))
    return exit_code(results)


def find_line(source: str, setting: str | None) -> str | None:
    """Return where a config sets something: its file, the number of the line, and the line.

    Args:
        source: Path of a config, or the name of a template.
        setting: Name of a variable or of an argument; the first line that sets it counts.
    """
    path = Path(cfgs_name_path.get(source, source))
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if setting is not None and re.search(rf"\b{setting}\s*=", line):
            return f"{path.name}:{number}: {line.strip()}"
    return None


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="xtuner-mamba doctor", description=__doc__)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--work-dir", type=Path, help="of a training with this config")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)
