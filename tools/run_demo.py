"""Train a small Mamba on packed documents with XTuner's own commands, and check what came out.

Everything is made on this machine: the model has random weights, the documents are the source of
Python's standard library. Writes a folder demo/ with the inputs, the logs, the trained model
(demo/hf), the numbers (demo/report.json) and two plots (demo/report.png). Fails if a command
fails, the loss does not fall, or a document of a pack reaches another.
"""

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xtuner_mamba.dataset import PackedDataset

DEMO = Path("demo")
TEMPLATE = "mamba_demo_stdlib_varlen"
CONFIG = DEMO / f"{TEMPLATE}_copy.py"
TOOLS = Path(__file__).resolve().parent
# packs whose logits are compared with those of one document at a time
NUM_COMPARED = 4
# logged losses whose mean is the loss at the end
NUM_LAST = 4


def main(argv: list[str] | None = None) -> int:
    """Run the demo and print its table."""
    args = parse_args(argv)
    # what libraries say about themselves; of XTuner's commands it is in the logs
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.chdir(args.workdir)
    if DEMO.exists():
        if not (DEMO / "corpus" / "stdlib.jsonl").exists():
            print(f"{DEMO.resolve()} must come from this demo, got something else; use --workdir")
            return 1
        shutil.rmtree(DEMO)
    # before the libraries that read them are imported, here and in XTuner's commands
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(DEMO.resolve() / "cache")}
    # threads that wait for one another leave the cores to whatever else runs on them
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # XTuner starts `python` by name
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"

    start = time.monotonic()
    make_inputs(args)
    try:
        train_and_convert()
        packs = build_packs()
        found = compare([packs[i] for i in range(min(NUM_COMPARED, len(packs)))])
    except RuntimeError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return summarize(packs, found, minutes=(time.monotonic() - start) / 60)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--workdir", type=Path, default=Path(), help="existing folder that gets the folder demo/"
    )
    sizes = parser.add_argument_group("sizes, to make it shorter or longer")
    sizes.add_argument("--chars", type=int, default=1_100_000, help="of source text (%(default)s)")
    sizes.add_argument("--vocab-size", type=int, default=4096, help="(%(default)s)")
    sizes.add_argument("--hidden-size", type=int, default=256, help="(%(default)s)")
    sizes.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    return parser.parse_args(argv)


def make_inputs(args: argparse.Namespace) -> None:
    """Write the corpus and the untrained model."""
    from xtuner_mamba.demo import inputs

    print("making demo/corpus and demo/model", flush=True)
    documents = inputs.stdlib_documents(args.chars)
    inputs.write_jsonl(documents, DEMO / "corpus" / "stdlib.jsonl")
    tokenizer = inputs.train_tokenizer(documents, args.vocab_size)
    tokenizer.save_pretrained(DEMO / "model")
    model = inputs.build_model(tokenizer, args.hidden_size, args.layers)
    model.save_pretrained(DEMO / "model")
    print(f"  {len(documents):,} documents, {model.num_parameters():,} parameters", flush=True)


def train_and_convert() -> None:
    """Go the way of XTuner's users, from the list of configs to a Hugging Face model.

    Raises:
        RuntimeError: A command failed.
    """
    run("xtuner", "list-cfg", "-p", "mamba", show="mamba")
    run("xtuner", "copy-cfg", TEMPLATE, DEMO, show="Copy")
    # one line of MMEngine's log in four; it has one for every five packs
    shown = r"packed \d|Iter\(train\) \[ *(\d*[02468]0|5)/"
    run("xtuner", "train", CONFIG, "--work-dir", DEMO / "work_dir", show=shown)
    last = Path((DEMO / "work_dir" / "last_checkpoint").read_text())
    checkpoint = DEMO / "work_dir" / last.name
    run("xtuner", "convert", "pth_to_hf", CONFIG, checkpoint, DEMO / "hf", "--fp32", show="done")


def run(*command: str | Path, show: str = "", **env: str) -> None:
    """Run a command, keep its output in demo/logs and show the lines that match ``show``.

    Raises:
        RuntimeError: It failed.
    """
    words = [str(word) for word in command]
    title = " ".join([*(f"{name}={value}" for name, value in env.items()), *words])
    print(f"\n$ {title}", flush=True)
    logs = DEMO / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{len(list(logs.iterdir())) + 1}_{Path(words[1]).stem}.log"
    start, tail = time.monotonic(), deque(maxlen=30)
    with (
        log.open("w") as file,
        subprocess.Popen(
            words,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        for line in process.stdout:
            file.write(line)
            tail.append(line)
            if re.search(show, line):
                print(f"  {line.rstrip()}", flush=True)
    if process.returncode != 0:
        raise RuntimeError(
            f"`{title}` must exit with 0, got {process.returncode}; {log} ends with\n"
            f"{''.join(tail)}"
        )
    print(f"  ({time.monotonic() - start:.0f} s, all of its output in {log})", flush=True)


def build_packs() -> "PackedDataset":
    """Build the packs that the config trains on, as ``xtuner train`` does."""
    from mmengine.config import Config
    from xtuner.registry import BUILDER

    return BUILDER.build(Config.fromfile(CONFIG).train_dataset)


def lengths_of(pack: dict) -> list[int]:
    """Return the tokens of each document of a pack."""
    return [end - begin for begin, end in pairwise(pack["cumulative_len"])]


def compare(packs: list[dict]) -> dict[str, float | int]:
    """Compare the converted model on packs with plain transformers on one document at a time.

    Raises:
        RuntimeError: Plain transformers cannot run the model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from xtuner_mamba.demo.checks import packed_logits, run_leak_test
    from xtuner_mamba.model import dispatch_packed

    documents = [
        pack["input_ids"][begin:end]
        for pack in packs
        for begin, end in pairwise(pack["cumulative_len"])
    ]
    (DEMO / "documents.json").write_text(json.dumps(documents))
    files = DEMO / "hf", DEMO / "documents.json", DEMO / "logits.pt"
    script = os.path.relpath(TOOLS / "score_documents.py")
    run("python", script, *files, XTUNER_MAMBA_DISABLE="1")
    alone = torch.load(DEMO / "logits.pt")

    model = AutoModelForCausalLM.from_pretrained(DEMO / "hf").eval()
    dispatch_packed(model)
    packed, leaking = [], []
    for pack in packs:
        input_ids = torch.tensor([pack["input_ids"]])
        packed.append(packed_logits(model, lengths_of(pack), input_ids))
        leaking.append(packed_logits(model, [input_ids.shape[1]], input_ids))
    fullest = max(packs, key=lambda pack: len(pack["cumulative_len"]))
    leak_test = run_leak_test(model, lengths_of(fullest), torch.tensor([fullest["input_ids"]]))
    return {
        "difference": float((torch.cat(packed) - alone).abs().max()),
        "difference_without_boundaries": float((torch.cat(leaking) - alone).abs().max()),
        "leaks": leak_test.changed,
        "leaks_without_boundaries": leak_test.changed_without_boundaries,
    }


def summarize(packs: "PackedDataset", found: dict[str, float | int], minutes: float) -> int:
    """Print the table, write the report and the plots, and return the exit code."""
    from rich.console import Console

    from xtuner_mamba.demo.report import DemoReport, plot

    packing = packs.packing_report
    (scalars,) = (DEMO / "work_dir").glob("*/vis_data/scalars.json")
    logged = [line for line in map(json.loads, scalars.read_text().splitlines()) if "loss" in line]
    losses = [line["loss"] for line in logged]
    seconds_a_pack = sum(line["time"] for line in logged) / len(logged)
    report = DemoReport(
        documents=packing.documents,
        tokens=packing.tokens,
        packs=packing.packs,
        num_split=packing.num_split,
        utilisation=packing.utilisation,
        padding=packing.padding,
        tokens_per_second=packing.tokens / packing.packs / seconds_a_pack,
        loss_start=losses[0],
        loss_end=sum(losses[-NUM_LAST:]) / len(losses[-NUM_LAST:]),
        **found,
    )
    report.write(DEMO / "report.json")
    lengths = [length for pack in packs for length in lengths_of(pack)]
    plot([(line["iter"], line["loss"]) for line in logged], lengths, DEMO / "report.png")
    print()
    Console().print(report.table())
    print(f"{minutes:.1f} minutes; plots in {DEMO / 'report.png'}, model in {DEMO / 'hf'}")
    failures = report.failures()
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
