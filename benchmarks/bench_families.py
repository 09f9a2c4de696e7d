"""Train what a template trains of a Falcon-Mamba, a Jamba and a Mamba: LoRA, QLoRA and DPO.

Models have the published widths, few layers and random weights; model, adapters, precision and
optimizer are the templates' own, the learning rate is not. A row of packed documents of random
tokens is learnt by heart. Every adapter must get a gradient, the loss must fall, and no document
may change when another one is overwritten. Writes families.md and families.csv to --out.
"""

import argparse
import csv
import gc
import math
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, fields
from datetime import date
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from mmengine.config import Config
from mmengine.optim import OptimWrapper, build_optim_wrapper
from torch import Tensor, nn
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)
from xtuner.registry import BUILDER

from xtuner_mamba.dataset import packed_collate_fn, preference_packed_collate_fn
from xtuner_mamba.dataset.preference import pack_pairs
from xtuner_mamba.engine.hooks.packed_layout_hook import publish_batch
from xtuner_mamba.integration.config_rewrites import fit_cpu
from xtuner_mamba.integration.templates import templates
from xtuner_mamba.layout import PackedLayout, withdraw_layout
from xtuner_mamba.testing import lognormal_lengths, relative_rms

# of a change without boundaries: experts round by how many rows they are given
CLEAR = 1 / 4
# one batch is learnt by heart, in few steps: of adapters that begin at zero, or of all weights
LORA_RATE, FULL_RATE = 1e-2, 1e-4


@dataclass(frozen=True)
class Case:
    """A template, and what is trained by it."""

    name: str
    template: str
    model: str
    """One of those that :func:`make_models` makes."""
    quantized: bool = False
    pairs: bool = False


CASES = (
    Case("Falcon-Mamba, LoRA", "falcon_mamba_7b_lora_alpaca_e3_varlen", "falcon_mamba"),
    Case("Falcon-Mamba, QLoRA", "falcon_mamba_7b_qlora_alpaca_e3_varlen", "falcon_mamba", True),
    # the template without its quantization
    Case("Jamba, LoRA", "xtuner_mamba_jamba_1_5_mini_qlora_alpaca_e3_varlen", "jamba"),
    Case("Jamba, QLoRA", "xtuner_mamba_jamba_1_5_mini_qlora_alpaca_e3_varlen", "jamba", True),
    Case("Mamba, DPO", "mamba_1_4b_dpo_full_varlen", "mamba", pairs=True),
)


@dataclass(frozen=True)
class Row:
    """What came of a case; numbers are NaN where there was no training."""

    case: str
    template: str
    trained: int = 0
    """Tensors that the optimizer has."""
    without_gradient: int = 0
    """Of these, in the last step: none, all zero, or not finite."""
    first_loss: float = math.nan
    last_loss: float = math.nan
    seconds: float = math.nan
    """Of a step: forward, backward and optimizer; the median of the second half."""
    peak_gib: float = math.nan
    """Of the GPU's memory."""
    change: float = math.nan
    """Of the other documents' logits when one is overwritten, relative; 0 is: not a bit."""
    change_without_boundaries: float = math.nan
    has_experts: bool = False
    not_run: str = ""
    """Why there is nothing to train with."""
    failure: str = ""
    """What stopped it."""

    def faults(self) -> list[str]:
        """Return what should not be."""
        if self.not_run or self.failure:
            return [self.failure] if self.failure else []
        found = []
        if self.without_gradient:
            found.append(f"{self.without_gradient} of {self.trained} tensors have no gradient")
        if not self.last_loss < self.first_loss:
            found.append(f"the loss goes from {self.first_loss} to {self.last_loss}")
        allowed = CLEAR * self.change_without_boundaries if self.has_experts else 0
        if not self.change <= allowed or not self.change_without_boundaries > 0:
            found.append(f"other documents change by {self.change}")
        return found

    def cells(self) -> tuple[str, ...]:
        """Describe it, a cell a column of :data:`COLUMNS`."""
        if self.not_run or self.failure:
            said = f"failed: {self.failure}" if self.failure else f"not run: {self.not_run}"
            return (self.case, said, *("-" for _ in COLUMNS[2:]))
        return (
            self.case,
            f"{self.trained - self.without_gradient} of {self.trained}",
            f"{self.first_loss:.4f} -> {self.last_loss:.4f}",
            f"{self.seconds:.3f}",
            "-" if math.isnan(self.peak_gib) else f"{self.peak_gib:.1f}",
            "not a bit" if self.change == 0 else f"{self.change:.1e}",
            f"{self.change_without_boundaries:.1e}",
        )


COLUMNS = (
    "case",
    "tensors with a gradient",
    "loss",
    "s a step",
    "peak GiB",
    "change of others",
    "without boundaries",
)


def make_models(folder: Path, device: str, small: bool) -> None:
    """Write a model of each kind to a folder of its own."""
    width, layers, vocab = (32, 4, 128) if small else (4096, 4, 65024)
    common = dict(vocab_size=vocab, num_hidden_layers=layers, initializer_range=0.02)
    tokens = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    falcon_mamba = FalconMambaConfig(hidden_size=width, **common, **tokens)
    jamba = JambaConfig(
        hidden_size=width,
        # a quarter, and four experts of sixteen: what stands around them is looked at
        intermediate_size=7 * width // 8,
        num_attention_heads=width // 128 or 1,
        num_key_value_heads=width // 512 or 1,
        num_experts=4,
        attn_layer_period=4,
        attn_layer_offset=1,
        **common,
        **tokens,
    )
    of_130m = dict(vocab_size=50280, hidden_size=768, num_hidden_layers=24)
    of_small = dict(vocab_size=vocab, hidden_size=width, num_hidden_layers=2)
    mamba = MambaConfig(**(of_small if small else of_130m), initializer_range=0.02, **tokens)
    for name, build, config in (
        ("falcon_mamba", FalconMambaForCausalLM, falcon_mamba),
        ("jamba", JambaForCausalLM, jamba),
        ("mamba", MambaForCausalLM, mamba),
    ):
        torch.manual_seed(0)
        with torch.device(device):
            build(config).save_pretrained(folder / name)


def run(case: Case, models: Path, tokens: int, steps: int) -> Row:
    """Train a case and overwrite its documents."""
    if case.quantized and not quantizes():
        return Row(case.name, case.template, not_run="bitsandbytes finds no CUDA here")
    # whatever was built before
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model, optim_wrapper = build(case, models / case.model)
    llm = model.llm
    batch = make_batch(tokens, llm.config.vocab_size, case.pairs)
    losses, seconds = [], []
    for _ in range(steps):
        start = now()
        losses.append(backward(model, optim_wrapper, collate(batch, case.pairs)))
        trained = [p for p in model.parameters() if p.requires_grad]
        missing = sum(not has_gradient(p) for p in trained)
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        seconds.append(now() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else math.nan
    with optim_wrapper.optim_context(model):
        changes = changes_of_others(llm.eval(), batch)
    return Row(
        case.name,
        case.template,
        trained=len(trained),
        without_gradient=missing,
        first_loss=losses[0],
        last_loss=losses[-1],
        seconds=statistics.median(seconds[steps // 2 :]),
        peak_gib=peak,
        change=changes[0],
        change_without_boundaries=changes[1],
        has_experts=hasattr(llm.config, "num_experts"),
    )


def quantizes() -> bool:
    """Tell whether bitsandbytes can make 4 bits of a model here."""
    from bitsandbytes.cextension import lib

    return torch.cuda.is_available() and getattr(lib, "compiled_with_cuda", False)


def build(case: Case, folder: Path) -> tuple[nn.Module, OptimWrapper]:
    """Build a template's model and optimizer, for steps of one micro-batch."""
    cfg = Config.fromfile(templates()[case.template])
    fit_cpu(cfg, argparse.Namespace(launcher="none", deepspeed=None))
    cfg.model.llm.pretrained_model_name_or_path = str(folder)
    if not case.quantized and cfg.model.llm.pop("quantization_config", None):
        cfg.model.llm.torch_dtype = torch.bfloat16
    cfg.optim_wrapper.optimizer.lr = LORA_RATE if "lora" in cfg.model else FULL_RATE
    cfg.optim_wrapper.pop("accumulative_counts")
    torch.manual_seed(0)
    model = BUILDER.build(cfg.model).to("cuda" if torch.cuda.is_available() else "cpu")
    return model.train(), build_optim_wrapper(model, cfg.optim_wrapper)


def make_batch(tokens: int, vocab_size: int, pairs: bool) -> dict[str, list[int]]:
    """Draw a row of packed documents, or of pairs of them, of random tokens."""
    draw = torch.Generator().manual_seed(0)
    # a dozen documents, however few tokens
    lengths = lognormal_lengths(tokens, scale=min(tokens / 8192, 1))

    def draw_tokens(length: int) -> list[int]:
        return torch.randint(1, vocab_size, (length,), generator=draw).tolist()

    if pairs:
        # a prompt and two answers of as many tokens: four parts of what a pair has
        parts = [max(length // 4, 1) for length in lengths]
        columns = {
            f"{name}_ids": list(map(draw_tokens, parts))
            for name in ("prompt", "chosen", "rejected")
        }
        dataset = Dataset.from_dict(columns)
        return pack_pairs(dataset, max_length=tokens, max_packed_length=tokens)[0]
    layout = PackedLayout.from_lengths(lengths)
    input_ids = draw_tokens(tokens)
    return dict(
        input_ids=input_ids,
        labels=input_ids,
        cumulative_len=layout.cu_seqlens.tolist(),
        position_ids=layout.positions[0].tolist(),
    )


def collate(batch: dict[str, list[int]], pairs: bool) -> dict:
    """Make of a row what the model is given."""
    return (preference_packed_collate_fn if pairs else packed_collate_fn)([batch])


def backward(model: nn.Module, optim_wrapper: OptimWrapper, collated: dict) -> float:
    """Run forward and backward as ``BaseModel.train_step`` does, and return the loss."""
    publish_batch(collated)
    try:
        data = model.data_preprocessor(collated, True)
        with optim_wrapper.optim_context(model):
            losses = model(**data, mode="loss")
        loss, _ = model.parse_losses(losses)
        optim_wrapper.backward(optim_wrapper.scale_loss(loss))
    finally:
        withdraw_layout()
    return float(loss.detach())


def has_gradient(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter learns."""
    gradient = parameter.grad
    if gradient is None:
        return False
    return bool(gradient.isfinite().all() and gradient.count_nonzero())


@torch.no_grad()
def changes_of_others(model: PreTrainedModel, batch: dict[str, list[int]]) -> tuple[float, float]:
    """Overwrite the first document's embeddings, also with NaN, and look at the others' logits.

    Returns:
        The largest relative change with the boundaries, and the one of a number without them.
    """
    embeddings = model.get_input_embeddings()
    input_ids = torch.tensor([batch["input_ids"]], device=embeddings.weight.device)
    lengths = [stop - start for start, stop in pairwise(batch["cumulative_len"])]
    end = lengths[0]
    inputs = embeddings(input_ids)

    def logits_of_others(boundaries: list[int], value: float | None) -> Tensor:
        overwritten = inputs.clone()
        if value is not None:
            overwritten[:, :end] = value
        with PackedLayout.from_lengths(boundaries).to(inputs.device).published():
            return model(inputs_embeds=overwritten, use_cache=False).logits[:, end:]

    before = logits_of_others(lengths, None)
    change = max(change_of(logits_of_others(lengths, value), before) for value in (0.5, math.nan))
    before = logits_of_others([sum(lengths)], None)
    return change, change_of(logits_of_others([sum(lengths)], 0.5), before)


def change_of(after: Tensor, before: Tensor) -> float:
    """Return the relative change, 0 if every bit is the same and infinity for NaN."""
    if torch.equal(after, before):
        return 0.0
    change = relative_rms(after, before)
    return math.inf if math.isnan(change) else change


def now() -> float:
    """Return the time at which all that was begun is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def write(rows: list[Row], folder: Path, about: dict[str, str], command: str) -> str:
    """Write the table and the numbers, and return the table."""
    lines = [
        "# LoRA, QLoRA and DPO on packed documents",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        f"- command: `{command}`",
        "",
        *(f"| {' | '.join(cells)} |" for cells in (COLUMNS, len(COLUMNS) * ("---",))),
        *(f"| {' | '.join(row.cells())} |" for row in rows),
    ]
    page = "\n".join(lines) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "families.md").write_text(page)
    with (folder / "families.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*about, *(field.name for field in fields(Row))])
        writer.writeheader()
        writer.writerows(about | asdict(row) for row in rows)
    return page


def main(argv: list[str] | None = None) -> int:
    """Train every case, write and print the table; 1 if something is as it should not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of the row (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--case", choices=[c.name for c in CASES], action="append")
    parser.add_argument("--small", action="store_true", help="narrow models, for a CPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", help="of this checkout, where git is missing")
    args = parser.parse_args(argv)

    cuda = torch.cuda.is_available()
    commit = args.commit or subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], text=True, cwd=Path(__file__).parent
    )
    about = {
        "date": str(date.today()),
        "commit": commit.strip(),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
    }
    rows = []
    with TemporaryDirectory() as folder:
        make_models(Path(folder), "cuda" if cuda else "cpu", args.small)
        for case in CASES:
            if args.case and case.name not in args.case:
                continue
            try:
                rows.append(run(case, Path(folder), args.tokens, args.steps))
            # whatever it is, the other cases are still to be run
            except Exception as error:
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                rows.append(Row(case.name, case.template, failure=text))
            print(
                f"{case.name}: {rows[-1].faults() or rows[-1].not_run or 'as it should be'}",
                flush=True,
            )
    small = " --small" if args.small else ""
    command = f"python benchmarks/bench_families.py --tokens {args.tokens} --steps {args.steps}"
    print(write(rows, args.out, about, command + small))
    faults = {row.case: row.faults() for row in rows if row.faults()}
    for case, found in faults.items():
        print(f"{case}: {'; '.join(found)}", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
