"""Train Mamba-130M by XTuner's command line on one GPU, without and with each ZeRO stage.

The model has the published size and random weights, the documents are the source of Python's
standard library, the config is the template for pre-training. All ways see the same packs, so
their losses must agree; each checkpoint must convert to a model that transformers loads. Fails
if one does not. Writes benchmarks/results/training.md. With --at-once above 1 the ways share the
GPU: quicker to check, but then speeds mean nothing and are left out.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaConfig, MambaForCausalLM

from xtuner_mamba.demo import inputs
from xtuner_mamba.integration.templates import templates

PAGE = Path(__file__).parent / "results" / "training.md"
TEMPLATE = "mamba_130m_pretrain_jsonl_varlen"
WAYS = ("plain", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
MAX_LENGTH, MICRO_STEPS = 32768, 2
# the forward is rounded to bfloat16 in every way, but not in the same order
TOLERANCE = 0.02


def make_inputs(folder: Path) -> None:
    """Write the corpus, the untrained model and the config."""
    documents = inputs.stdlib_documents(max_chars=4_000_000)
    inputs.write_jsonl(documents, folder / "data" / "stdlib.jsonl")
    tokenizer = inputs.train_tokenizer(documents, vocab_size=8192)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=50280,
        hidden_size=768,
        num_hidden_layers=24,
        initializer_range=0.02,
        eos_token_id=0,
        pad_token_id=1,
    )
    MambaForCausalLM(config).save_pretrained(folder / "model")
    text = Path(templates()[TEMPLATE]).read_text()
    settings = dict(
        pretrained_model_name_or_path=str(folder / "model"),
        data_files=str(folder / "data" / "*.jsonl"),
        max_length=MAX_LENGTH,
        accumulative_counts=MICRO_STEPS,
        evaluation_inputs=["def main():"],
    )
    for name, value in settings.items():
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", text, flags=re.M)
        assert count == 1, f"the template sets {name} {count} times"
    (folder / "config.py").write_text(text)


def run(folder: Path, way: str, *command: str) -> str:
    """Run an ``xtuner`` command in ``folder`` and return what it printed."""
    print(f"{way}: xtuner {' '.join(command[:2])}", flush=True)
    # ways may run beside each other
    apart = {
        "HF_DATASETS_CACHE": str(folder / "cache" / way),
        "MASTER_PORT": str(29500 + WAYS.index(way)),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from xtuner import cli; cli()", *command],
        cwd=folder,
        env={**os.environ, **apart},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"xtuner {' '.join(command)} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def train(way: str, folder: Path, iters: int) -> dict:
    """Train one way and convert its checkpoint."""
    work_dir = folder / way
    log = run(
        folder,
        way,
        *("train", "config.py", "--work-dir", str(work_dir), "--seed", "0"),
        *(() if way == "plain" else ("--deepspeed", way)),
        *("--cfg-options", "train_cfg.max_epochs=None", f"train_cfg.max_iters={iters}"),
        *("default_hooks.logger.interval=1", f"default_hooks.checkpoint.interval={iters}"),
        *("custom_hooks.2.max_new_tokens=8", "custom_hooks.2.every_n_iters=1000"),
        *("param_scheduler=None", "log_processor.window_size=1"),
    )
    losses = [float(value) for value in re.findall(r"\bloss: (\S+)", log)]
    seconds = [float(value) for value in re.findall(r"\btime: (\S+)", log)]
    memory = [int(value) for value in re.findall(r"\bmemory: (\d+)", log)]
    assert len(losses) == iters, f"the log of {way} has {len(losses)} losses of {iters}"
    converted = folder / f"{way}_hf"
    run(folder, way, "convert", "pth_to_hf", "config.py", f"{way}/iter_{iters}.pth", str(converted))
    model = AutoModelForCausalLM.from_pretrained(converted, torch_dtype=torch.float32)
    input_ids = AutoTokenizer.from_pretrained(converted)("import os", return_tensors="pt").input_ids
    assert torch.isfinite(model(input_ids, labels=input_ids).loss)
    # the first steps compile kernels
    median = statistics.median(seconds[iters // 2 :])
    return {
        "way": way,
        "first": losses[0],
        # a log line is a micro-step's share of its optimizer step's mean
        "last": statistics.mean(losses[-2 * MICRO_STEPS :]),
        "speed": f"{MAX_LENGTH / median:,.0f}",
        "memory": max(memory, default=0) / 1024,
    }


def main(argv: list[str] | None = None) -> int:
    """Train every way, compare, record and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=24, help="micro-steps (%(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--at-once", type=int, default=1, help="ways (%(default)s)")
    parser.add_argument("--commit", help="of this checkout, where git is missing")
    args = parser.parse_args(argv)

    commit = args.commit or subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], text=True, cwd=Path(__file__).parent
    )
    with TemporaryDirectory() as name:
        make_inputs(Path(name))
        with ThreadPoolExecutor(args.at_once) as pool:
            rows = list(pool.map(partial(train, folder=Path(name), iters=args.iters), args.ways))
    lines = [
        "# Training by XTuner's command line on one GPU",
        "",
        f"- date: {date.today()}",
        f"- commit: {commit.strip()}",
        f"- GPU: {torch.cuda.get_device_name()}, torch {torch.__version__}",
        f"- Mamba-130M, rows of {MAX_LENGTH:,} packed tokens, activation checkpointing, "
        f"bfloat16 autocast, AdamW, {args.iters} micro-steps, {MICRO_STEPS} an optimizer step",
        f"- command: `python benchmarks/bench_training.py --iters {args.iters} "
        f"--at-once {args.at_once}`",
        "",
        "| way | loss, first | loss, last | tokens/s | peak GiB |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {row['way']} | {row['first']:.4f} | {row['last']:.4f} | "
            f"{row['speed'] if args.at_once == 1 else '-'} | {row['memory']:.1f} |"
            for row in rows
        ),
    ]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    failures = [row["way"] for row in rows if row["last"] > 0.9 * row["first"]]
    failures += [row["way"] for row in rows if abs(row["last"] / rows[0]["last"] - 1) > TOLERANCE]
    if failures:
        print(f"the loss must fall, and be that of {rows[0]['way']}, got others: {failures}")
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
