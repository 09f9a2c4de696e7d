"""Convert a checkpoint from mamba_ssm's format to transformers', or back.

SOURCE is a folder with a config.json and the weights of mamba_ssm's MambaLMHeadModel, as on
state-spaces/mamba-130m, or of transformers' MambaForCausalLM or Mamba2ForCausalLM. Its config.json
tells which; TARGET becomes the other. Every weight keeps its bits and its dtype.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from huggingface_hub import save_torch_state_dict
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import no_init_weights

from xtuner_mamba.tools.mamba_ssm_format import (
    config_from_mamba_ssm,
    config_to_mamba_ssm,
    is_mamba_ssm,
    weights_from_mamba_ssm,
    weights_to_mamba_ssm,
)
from xtuner_mamba.tools.named_tokenizer import load_tokenizer

# what PyTorch and safetensors raise for damaged files
_UNREADABLE = (EOFError, OSError, RuntimeError, SafetensorError, TypeError, UnpicklingError)


@dataclass(frozen=True)
class Conversion:
    """What was converted."""

    source: str
    target: str
    source_format: str
    target_format: str
    model: str
    layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the embeddings: the tokenizer's vocabulary, rounded up."""
    parameters: int
    dtypes: list[str]


def main(argv: list[str] | None = None) -> int:
    """Convert, and print what was."""
    args = _parse_args(argv)
    console = Console(stderr=args.json)
    try:
        with console.status(f"converting {args.source}"):
            # first, so that nothing is written where there is none
            tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
            done = convert(args.source, args.target)
            if tokenizer is not None:
                tokenizer.save_pretrained(args.target)
    except (ValueError, OSError) as error:
        print(f"{args.source}: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(asdict(done), indent=2))
        return 0
    table = Table(box=SIMPLE, show_header=False)
    for name, value in asdict(done).items():
        text = f"{value:,}" if isinstance(value, int) else value
        table.add_row(name, ", ".join(text) if isinstance(text, list) else text)
    console.print(table)
    if not args.tokenizer and done.target_format == "transformers":
        console.print("No tokenizer: that of mamba-130m to mamba2-2.7b is EleutherAI/gpt-neox-20b.")
    return 0


def convert(source: Path, target: Path) -> Conversion:
    """Write the checkpoint in ``source`` to ``target`` in the other format.

    Raises:
        ValueError: The target is there already, or the other format has no such model, or the
            weights are not those of the config.
        OSError: A file cannot be read or written.
    """
    if target.exists():
        raise ValueError(f"the target must not exist, got {target}; choose another, or remove it")
    if not (source / "config.json").is_file():
        raise ValueError(
            f"the source must be a folder on this machine with a config.json, got {source}; "
            "download a checkpoint of the Hub first"
        )
    written = json.loads((source / "config.json").read_text())
    if not isinstance(written, dict):
        raise ValueError(f"config.json must hold an object, got {written!r}; download it again")
    weights = _read_weights(source)
    imports = is_mamba_ssm(written)
    config = config_from_mamba_ssm(written) if imports else AutoConfig.from_pretrained(source)
    tied = config.tie_word_embeddings
    if imports:
        weights = weights_from_mamba_ssm(weights, tied)
        # before a folder is made
        _check_weights(weights, config)
        config.torch_dtype = weights["backbone.embeddings.weight"].dtype
        target.mkdir(parents=True)
        config.save_pretrained(target)
        save_torch_state_dict(weights, target, metadata={"format": "pt"})
    else:
        exported = config_to_mamba_ssm(config)
        _check_weights(weights, config)
        target.mkdir(parents=True)
        (target / "config.json").write_text(json.dumps(exported, indent=2) + "\n")
        if tied:
            # which a pytorch_model.bin has under both names
            weights.pop("lm_head.weight", None)
        torch.save(weights_to_mamba_ssm(weights, tied), target / "pytorch_model.bin")
    formats = ("mamba_ssm", "transformers") if imports else ("transformers", "mamba_ssm")
    return Conversion(
        str(source),
        str(target),
        *formats,
        model=config.architectures[0],
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        parameters=sum(weight.numel() for weight in weights.values()),
        dtypes=sorted({str(weight.dtype).removeprefix("torch.") for weight in weights.values()}),
    )


def _read_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    for path in paths:
        try:
            weights |= _read_file(path)
        except _UNREADABLE as error:
            raise ValueError(
                f"{path.name} must hold tensors by name, got a file that cannot be read "
                f"({type(error).__name__}); download it again"
            ) from error
    if not weights:
        raise ValueError(
            f"the source must hold *.safetensors or pytorch_model*.bin, got "
            f"{sorted(path.name for path in folder.iterdir())}; download the whole folder"
        )
    return weights


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    # files of PyTorch before 1.6 are no archives, which alone can be mapped
    is_mapped = is_zipfile(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)


def _check_weights(weights: dict[str, Tensor], config: PretrainedConfig) -> None:
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
        weights = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
    got = {name: tuple(weight.shape) for name, weight in weights.items()}
    wrong = sorted(name for name in {*expected, *got} if expected.get(name) != got.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"the weights must be those of config.json, got {got.get(name, 'no')} for {name}, "
            f"which should be {expected.get(name, 'none')} ({len(wrong)} of {len(expected)} differ)"
        )


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="xtuner-mamba convert-mamba-ssm", description=__doc__)
    parser.add_argument("source", metavar="SOURCE", type=Path)
    parser.add_argument("target", metavar="TARGET", type=Path)
    parser.add_argument("--tokenizer", help="name or path of one to save beside the weights")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)
