"""Time forward and backward of a whole model: packed here, and the ways that others have.

Weights are random and bfloat16 (``A_log`` and ``D`` float32 here), documents log-normal(6.2, 0.85)
kept in [57, 2048], no activation checkpointing. Needs a GPU; the other ways of a Mamba need
mamba-ssm and causal-conv1d, Mamba-2 needs mamba-ssm in any way, Llama takes PyTorch's attention.
"leaking" is their packed row, whose documents see each other: fast and wrong.
--without leaves parts of the packed way to transformers, --profile says what its time went to.
Appends a row a way to benchmarks/results/model.csv.
"""

import argparse
import csv
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from itertools import accumulate
from pathlib import Path

import torch
import transformers
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from xtuner_mamba.layout import IGNORE_INDEX, PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.model.loss import packed_loss
from xtuner_mamba.model.sft import cast_all_but_dynamics
from xtuner_mamba.testing import lognormal_lengths

RESULTS = Path(__file__).parent / "results" / "model.csv"
# state-spaces/mamba-*-hf, mamba2-1.3b and Llama-3.2-1B, all with the vocabulary of the first
MODELS: dict[str, tuple[type[PretrainedConfig], dict]] = {
    "mamba-130m": (MambaConfig, dict(hidden_size=768, num_hidden_layers=24)),
    "mamba-370m": (MambaConfig, dict(hidden_size=1024, num_hidden_layers=48)),
    "mamba-1.4b": (MambaConfig, dict(hidden_size=2048, num_hidden_layers=48)),
    "mamba2-1.3b": (
        Mamba2Config,
        dict(
            hidden_size=2048,
            num_hidden_layers=48,
            num_heads=64,
            head_dim=64,
            n_groups=1,
            state_size=128,
            tie_word_embeddings=True,
        ),
    ),
    "llama-1b": (
        LlamaConfig,
        dict(
            hidden_size=2048,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=8192,
            tie_word_embeddings=True,
        ),
    ),
}
WAYS = ("packed", "leaking", "padded", "alone")
PARTS = ("norm", "loss", "recompute")
DOCUMENTS_A_BATCH = 16


def make_model(name: str) -> PreTrainedModel:
    """Build a model of random weights on the GPU."""
    config_class, sizes = MODELS[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config_class(vocab_size=50280, use_cache=False, **sizes)
        )
    cast_all_but_dynamics(model, torch.bfloat16)
    return model.train()


def make_step(
    way: str, model: PreTrainedModel, total: int, without: Sequence[str]
) -> tuple[Callable[[], None], int]:
    """Return a function that runs forward and backward once, and the real tokens it trains on."""
    lengths = lognormal_lengths(total, seed=0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 50280, (total,), generator=generator).cuda()
    if way == "packed":
        dispatch_packed(
            model,
            fuse_norm=False if "norm" in without else None,
            recompute=False if "recompute" in without else None,
        )
        layout = PackedLayout.from_lengths(lengths).to("cuda")
        inputs, fuse = {"input_ids": tokens[None]}, "loss" not in without

        def step() -> None:
            with layout.published():
                packed_loss(model, inputs, tokens[None], layout, fuse=fuse).backward()

        return step, total
    if way == "leaking":
        return lambda: _loss(model, tokens[None], tokens[None]).backward(), total
    documents = list(tokens.split(lengths))
    if way == "alone":
        documents = [document[None] for document in documents[:DOCUMENTS_A_BATCH]]
        real = sum(document.shape[1] for document in documents)

        def step() -> None:
            for document in documents:
                _loss(model, document, document).backward()

        return step, real
    documents = documents[:DOCUMENTS_A_BATCH]
    rows = pad_sequence(documents, batch_first=True)
    labels = pad_sequence(documents, batch_first=True, padding_value=IGNORE_INDEX)
    real = sum(len(document) for document in documents)
    return lambda: _loss(model, rows, labels).backward(), real


def _loss(model: PreTrainedModel, input_ids: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids, labels=labels).loss


def measure(
    way: str, name: str, total: int, repeats: int, without: Sequence[str], with_profile: bool
) -> dict:
    """Run a way a few times; median seconds, tokens a second, and the memory at its peak."""
    model = make_model(name)
    step, real = make_step(way, model, total, without)
    seconds = []
    for i in range(repeats + 2):
        model.zero_grad()
        if i == 2:
            torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    median = statistics.median(seconds[2:])
    if with_profile:
        model.zero_grad()
        print(profile_step(step))
    if way == "packed" and without:
        way = f"packed without {' '.join(without)}"
    return {
        "way": way,
        "seconds": round(median, 4),
        "tokens": real,
        "tokens_per_second": round(real / median),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def profile_step(step: Callable[[], None]) -> str:
    """Run a step under the profiler; its kernels by time, and for how long none ran."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = [
        e for e in profiler.key_averages() if e.device_type == torch.profiler.DeviceType.CUDA
    ]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    lines = [
        f"{total / 1e3:9.1f} ms of kernels in a step",
        f"{_idle(profiler.events()) / 1e3:9.1f} ms without a kernel between its first and its last",
    ]
    for event in kernels[:40]:
        time = event.self_device_time_total / 1e3
        lines.append(f"{time:9.1f} ms {event.count:6d} x  {event.key[:110]}")
    return "\n".join(lines)


def _idle(events: Iterable) -> float:
    """Sum the times in which the GPU waits, in microseconds."""
    ranges = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.profiler.DeviceType.CUDA
    )
    ends = accumulate((end for _, end in ranges), max)
    return sum(max(0.0, start - end) for end, (start, _) in zip(ends, ranges[1:]))


def append(row: dict) -> None:
    """Keep a row, at once: a way that follows may take too long."""
    RESULTS.parent.mkdir(exist_ok=True)
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main(argv: list[str] | None = None) -> int:
    """Measure, record and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="mamba-130m")
    parser.add_argument("--tokens", type=int, default=32768, help="of a packed step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--without",
        nargs="+",
        choices=PARTS,
        default=(),
        help="parts of the packed way to do without",
    )
    parser.add_argument("--profile", action="store_true", help="also print the kernels of a step")
    parser.add_argument("--commit", help="of this checkout, where git is missing")
    args = parser.parse_args(argv)

    commit = args.commit or subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], text=True, cwd=Path(__file__).parent
    )
    about = {
        "date": date.today().isoformat(),
        "commit": commit.strip(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "model": args.model,
    }
    table = Table("way", "s/step", "tokens/s", "peak GiB")
    for way in args.ways:
        row = about | measure(
            way, args.model, args.tokens, args.repeats, args.without, args.profile
        )
        torch.cuda.empty_cache()
        append(row)
        speed = f"{row['tokens_per_second']:,}"
        table.add_row(row["way"], f"{row['seconds']:.3f}", speed, f"{row['peak_gib']:.1f}")
    Console().print(f"{args.model}, {about['gpu']}", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
