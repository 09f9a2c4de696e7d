"""Run packs, buckets and chunks, and the tools that choose between them, on this machine's device.

The model has the size of Mamba-130M and random weights, the documents are the source of Python's
standard library, the configs are copies of the templates with other paths. Everything runs by the
command lines of XTuner and of this package. --out gets the page schemes.md, what the tools wrote,
and their logs. Fails if a command does, a check finds what it should not, or a training that was
told to end leaves a process behind; the other parts run all the same.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from process_session import end_session
from transformers import MambaConfig, MambaForCausalLM

from xtuner_mamba.demo import inputs
from xtuner_mamba.integration.templates import templates

XTUNER = (sys.executable, "-c", "from xtuner import cli; cli()")
TOOLS = (sys.executable, "-c", "from xtuner_mamba.cli import main; raise SystemExit(main())")
TEMPLATES = {
    "packed": "mamba_130m_pretrain_jsonl_varlen",
    "bucket": "mamba_130m_full_alpaca_e3_bucket",
    "fixed_chunk": "mamba_130m_full_alpaca_e3_fixed_chunk",
    "carried": "mamba_130m_pretrain_jsonl_fixed_chunk_carried",
}
LEAKS = {"fixed_chunk": ["leak test"]}
"""Checks of smoke that must find something: documents of a chunk are not kept apart."""
# exit codes of smoke and doctor: nothing, something, or not all could be checked
ANSWERS = (0, 1, 2)
PARTS = ("compare", "probe-batch", "smoke", "carried chunks", "SIGTERM and doctor")
HEADS = {
    "smoke": [
        "| scheme | checks passed | found | not run | loss |",
        "| --- | --- | --- | --- | --- |",
    ],
}
"""Of the tables to which several runs add a row each."""
Part = Callable[[], tuple[list[str], list[str]]]
"""Returns lines of the page, and what is wrong."""
# iterations in the log before a training is told to end; doctor reads at least 8
BEFORE_SIGTERM = 12
# seconds within which a training must begin, and those within which it must end
TO_BEGIN, TO_END = 180, 20


@dataclass(frozen=True)
class Size:
    """Of the model, of the corpus and of the batches."""

    chars: int
    tokenizer_vocab: int
    model: dict
    carried_iters: int
    memory_limit: float
    """GiB that probe-batch may take."""
    settings: dict[str, dict] = field(default_factory=dict)
    """Of each scheme's config, beside the paths."""


FULL = Size(
    chars=4_000_000,
    tokenizer_vocab=8192,
    model=dict(vocab_size=50280, hidden_size=768, num_hidden_layers=24),
    carried_iters=16,
    memory_limit=12,
    settings={
        "packed": dict(accumulative_counts=4),
        # two of them show what the search does, in a third of the time
        "bucket": dict(boundaries=[2048, 8192]),
    },
)
SMALL = Size(
    chars=300_000,
    tokenizer_vocab=400,
    model=dict(vocab_size=512, hidden_size=32, num_hidden_layers=1),
    carried_iters=4,
    memory_limit=1.5,
    settings={
        "packed": dict(max_length=512, accumulative_counts=1, dataloader_num_workers=0),
        "bucket": dict(boundaries=[64, 512], tokens_per_batch=512),
        "fixed_chunk": dict(max_length=128, tokens_per_batch=512),
        "carried": dict(
            max_length=64, tokens_per_batch=256, accumulative_counts=1, dataloader_num_workers=0
        ),
    },
)


@dataclass(frozen=True)
class Bench:
    """Where commands run, and where what they say is kept."""

    work: Path
    out: Path
    size: Size
    steps: int

    def environment(self, name: str) -> dict[str, str]:
        """Return that of a command, which may run beside others."""
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(self.work / "cache" / name),
        }

    def run(self, name: str, *command: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run a command, keep what it says in ``name.log``, and return what it prints.

        Raises:
            RuntimeError: Its exit code is none of ``codes``.
        """
        start = time.monotonic()
        log = self.out / f"{name}.log"
        with log.open("w") as file:
            done = subprocess.run(
                command,
                cwd=self.work,
                env=self.environment(name),
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        if done.returncode not in codes:
            tail = f"{done.stdout}{log.read_text(errors='replace')}"[-4000:]
            raise RuntimeError(
                f"{name} must exit with one of {codes}, got {done.returncode}; it ends with\n{tail}"
            )
        return done.stdout

    def tool(self, name: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> list | dict:
        """Run a verb of ``xtuner-mamba``, keep its JSON in ``name.json`` and return it."""
        text = self.run(name, *TOOLS, *arguments, "--json", codes=codes)
        (self.out / f"{name}.json").write_text(text)
        return json.loads(text)


def make_inputs(bench: Bench) -> None:
    """Write the corpus, the untrained model and the config of every scheme."""
    size, work = bench.size, bench.work
    documents = inputs.stdlib_documents(size.chars)
    (work / "data").mkdir()
    with (work / "data" / "stdlib.jsonl").open("w", encoding="utf-8") as file:
        for name, text in documents:
            # what the templates for pre-training read, and what those for alpaca do
            row = dict(text=text, instruction=f"Write {name}.", input="", output=text)
            file.write(json.dumps(row) + "\n")
    tokenizer = inputs.train_tokenizer(documents, size.tokenizer_vocab)
    tokenizer.save_pretrained(work / "model")
    torch.manual_seed(0)
    config = MambaConfig(**size.model, initializer_range=0.02, eos_token_id=0, pad_token_id=1)
    MambaForCausalLM(config).save_pretrained(work / "model")
    for scheme, template in TEMPLATES.items():
        text = Path(templates()[template]).read_text()
        for name, value in settings_of(bench, scheme).items():
            text, count = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", text, flags=re.M)
            assert count == 1, f"{template} sets {name} {count} times"
        (work / f"{scheme}.py").write_text(text)


def settings_of(bench: Bench, scheme: str) -> dict:
    """Return what is changed in a scheme's template."""
    data = bench.work / "data"
    if "alpaca" in TEMPLATES[scheme]:
        paths = dict(data_path=str(data))
    else:
        # nothing is generated: what training takes is measured
        paths = dict(data_files=str(data / "*.jsonl"), evaluation_inputs=[])
    model = dict(pretrained_model_name_or_path=str(bench.work / "model"))
    return model | paths | bench.size.settings.get(scheme, {})


def compare(bench: Bench) -> tuple[list[str], list[str]]:
    """Train the schemes side by side; lines of the page, and what is wrong."""
    png = str(bench.out / "compare.png")
    arguments = "packed.py", "--steps", str(bench.steps), "--png", png
    runs = bench.tool("compare", "compare", *arguments)
    lines = [
        "| scheme | tokens/s | padding | peak GiB | loss | held out |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {run['scheme']} | {run['tokens_per_second']:,.0f} | {run['padding']:.1%} | "
            f"{run['peak_bytes'] / 2**30:.2f} | {run['loss']:.3f} | "
            f"{run['held_out'][0]:.3f} -> {run['held_out'][1]:.3f} |"
            for run in runs
        ),
        "",
        "![speed, memory, loss](compare.png)",
    ]
    wrong = [
        f"the held-out loss of {run['scheme']} must fall, got {run['held_out']}"
        for run in runs
        if not run["held_out"][1] < run["held_out"][0]
    ]
    return lines, wrong


def probe(bench: Bench) -> tuple[list[str], list[str]]:
    """Search for the largest batches; lines of the page, and what is wrong."""
    written = bench.out / "batch_sizes.yaml"
    found = bench.tool(
        "probe",
        *("probe-batch", "bucket.py", "--out", str(written)),
        *("--memory-limit", str(bench.size.memory_limit)),
    )
    lines = [
        f"Within {bench.size.memory_limit} GiB:",
        "",
        "| documents of | fit | do not | peak GiB | advised | tries |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {one['shape']['length']:,} tokens | {one['fits']:,} | {one['fails'] or '-'} | "
            f"{one['peak_bytes'] / 2**30:.2f} | {one['advised']:,} | {one['num_tries']} |"
            for one in found
        ),
        "",
        *("```yaml", written.read_text().rstrip(), "```"),
    ]
    return lines, []


def smoke(bench: Bench, scheme: str) -> tuple[list[str], list[str]]:
    """Check a scheme on three documents; a row of the page, and what is wrong."""
    found = bench.tool(f"smoke_{scheme}", "smoke", f"{scheme}.py", codes=ANSWERS)
    passed, failed, not_run = (
        [check["check"] for check in found["checks"] if check["status"] == status]
        for status in ("PASS", "FAIL", "NOT RUN")
    )
    losses = [f"{loss:.3f}" for loss in found["losses"]] or ["none"]
    row = (
        f"| {scheme} | {len(passed)} | {', '.join(failed) or '-'} | "
        f"{', '.join(not_run) or '-'} | {losses[0]} -> {losses[-1]} |"
    )
    expected = LEAKS.get(scheme, [])
    if failed == expected and not not_run:
        return [row], []
    return [row], [f"smoke must find {expected} in {scheme}, got {failed}, not run {not_run}"]


def carry(bench: Bench) -> tuple[list[str], list[str]]:
    """Train chunks whose states are carried on; lines of the page, and what is wrong."""
    work_dir = bench.work / "carried_work_dir"
    iters = bench.size.carried_iters
    command = "train", "carried.py", "--work-dir", str(work_dir), "--seed", "0"
    bench.run("carried", *XTUNER, *command, *log_options(), f"train_cfg.max_iters={iters}")
    logged = read_scalars(work_dir)
    losses = [line["loss"] for line in logged]
    # a log of the CPU has none
    peak = max(line.get("memory", 0) for line in logged) / 1024
    speeds = sorted(line["time"] for line in logged[iters // 2 :])
    lines = [
        f"{iters} micro-batches of `{TEMPLATES['carried']}`: loss {losses[0]:.3f} -> "
        f"{losses[-1]:.3f}, peak {peak:.2f} GiB of a GPU, {speeds[len(speeds) // 2]:.2f} s each."
    ]
    wrong = [] if losses[-1] < losses[0] else [f"the loss of carried chunks must fall: {losses}"]
    return lines, wrong


def end_and_examine(bench: Bench) -> tuple[list[str], list[str]]:
    """Tell a training to end, and let doctor read its log; lines of the page, and what is wrong."""
    work_dir = bench.work / "packed_work_dir"
    command = *XTUNER, "train", "packed.py", "--work-dir", str(work_dir), *log_options()
    start = time.monotonic()
    with (bench.out / "terminated.log").open("w") as log:
        training = subprocess.Popen(
            [*command, "train_cfg.max_iters=100000"],
            cwd=bench.work,
            env=bench.environment("terminated"),
            stdout=log,
            stderr=subprocess.STDOUT,
            # by which its processes are known, whoever their parents are by then
            start_new_session=True,
        )
        ended = end_session(
            training, lambda: len(read_scalars(work_dir)) >= BEFORE_SIGTERM, TO_BEGIN, TO_END
        )
    print(f"terminated: {time.monotonic() - start:.0f} s", flush=True)
    lines = [
        f"A training by `xtuner train` had {ended.before} processes, {ended.with_gpu} of them with "
        f"the GPU open. {ended.seconds:.1f} s after SIGTERM to the first of them there were "
        f"{ended.after}.",
        "",
    ]
    wrong = [f"SIGTERM must end all processes, got {ended.after} left"] if ended.after else []
    checked = bench.tool(
        "doctor", "doctor", "packed.py", "--work-dir", str(work_dir), codes=ANSWERS
    )["checks"]
    not_run = [check["check"] for check in checked if check["status"] == "NOT RUN"]
    if not_run:
        wrong.append(f"doctor must run every check, got {not_run} not run")
    lines += [
        "What `xtuner-mamba doctor` says of its config, corpus, model and log:",
        "",
        "| check | | |",
        "| --- | --- | --- |",
        *(f"| {c['check']} | {c['status']} | {c['detail']} |" for c in checked),
    ]
    return lines, wrong


def log_options() -> tuple[str, ...]:
    """Return the options of a training that logs every iteration and saves nothing."""
    return (
        *("--cfg-options", "train_cfg.max_epochs=None", "param_scheduler=None"),
        *("default_hooks.logger.interval=1", "default_hooks.checkpoint=None"),
        "log_processor.window_size=1",
    )


def read_scalars(work_dir: Path) -> list[dict]:
    """Read MMEngine's log of a training, a line an iteration; empty where there is none yet."""
    (path,) = [*work_dir.glob("*/vis_data/scalars.json")][:1] or [None]
    # a line may be half written
    lines = path.read_text().splitlines(keepends=True) if path else []
    return [json.loads(line) for line in lines if line.endswith("\n") and '"loss"' in line]


def gpu_memory_used() -> int | None:
    """Return the MiB that all processes hold on the GPU; none without one."""
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return None
    command = "nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"
    done = subprocess.run(command, capture_output=True, text=True)
    # a container may not be told
    return int(done.stdout) if done.stdout.strip().isdigit() else None


def measure(bench: Bench, parts: list[str], at_once: int) -> tuple[list[str], list[str]]:
    """Run the parts; lines of the page, and what is wrong."""
    used = [gpu_memory_used()]
    chosen = {name: functions_of(bench)[name] for name in parts}
    timed = chosen.pop("compare", None)
    with ThreadPoolExecutor(at_once) as pool:
        running = {name: [pool.submit(attempt, f) for f in chosen[name]] for name in chosen}
    results = {name: [one.result() for one in running[name]] for name in running}
    if timed:
        # alone on the device
        results["compare"] = [attempt(f) for f in timed]
    used.append(gpu_memory_used())
    lines, wrong = [], []
    for name in parts:
        lines += ["", f"## {name}", "", *(HEADS.get(name, []))]
        for part, found in results[name]:
            lines += part
            wrong += found
    if used[0] is not None:
        lines += ["", f"The GPU held {used[0]:,} MiB before all of this and {used[1]:,} after it."]
    return lines, wrong


def functions_of(bench: Bench) -> dict[str, list[Part]]:
    """Return what each part runs, of which everything may run at once but ``compare``."""
    return {
        "compare": [partial(compare, bench)],
        "probe-batch": [partial(probe, bench)],
        "smoke": [partial(smoke, bench, scheme) for scheme in TEMPLATES],
        "carried chunks": [partial(carry, bench)],
        "SIGTERM and doctor": [partial(end_and_examine, bench)],
    }


def attempt(part: Part) -> tuple[list[str], list[str]]:
    """Run a part; what keeps it from a result is what is wrong."""
    try:
        return part()
    # whatever it is, it must not cost the results of the others
    except Exception as error:
        traceback.print_exc()
        return ["No result."], [f"{type(error).__name__}: {error}".splitlines()[0]]


def main(argv: list[str] | None = None) -> int:
    """Run everything, write the page, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the page and the logs")
    parser.add_argument("--commit", required=True, help="of this checkout, for the page")
    parser.add_argument("--steps", type=int, default=20, help="of compare (%(default)s)")
    parser.add_argument("--small", action="store_true", help="for minutes on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--at-once",
        type=int,
        default=max((os.cpu_count() or 1) // 2, 1),
        help="commands that are not timed, side by side (%(default)s)",
    )
    args = parser.parse_args(argv)

    start = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        size = SMALL if args.small else FULL
        bench = Bench(Path(folder), args.out.resolve(), size, args.steps)
        make_inputs(bench)
        print(f"inputs: {time.monotonic() - start:.0f} s", flush=True)
        lines, wrong = measure(bench, args.parts, args.at_once)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    model = ", ".join(f"{name}={value}" for name, value in size.model.items())
    options = [f"--steps {args.steps}", *(["--small"] if args.small else [])]
    if args.parts != PARTS:
        options += ["--parts", *(f"'{part}'" for part in args.parts)]
    head = [
        "# Packs, buckets and chunks on one device",
        "",
        f"- date: {date.today()}",
        f"- commit: {args.commit}",
        f"- device: {device}, torch {torch.__version__}",
        f"- model: Mamba, {model}, random weights; documents: Python's standard library",
        f"- command: `python benchmarks/bench_schemes.py {' '.join(options)}`, "
        f"{time.monotonic() - start:.0f} s",
        f"- wrong: {'; '.join(wrong) or 'nothing'}",
    ]
    page = "\n".join([*head, *lines]) + "\n"
    (args.out / "schemes.md").write_text(page)
    print(page)
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
