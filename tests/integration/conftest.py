import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast
from xtuner.configs import cfgs_name_path

from xtuner_mamba.integration.templates import templates

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def pristine() -> Callable[[str], ModuleType]:
    """Execute a module anew, beside the one that is in use and that the plugin may have joined."""

    def execute(name: str) -> ModuleType:
        # the loader is named, since the plugin's finder would prepare the one that it finds
        loader = SourceFileLoader(name, importlib.util.find_spec(name).origin)
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
        loader.exec_module(module)
        return module

    return execute


class Environment:
    """A Python environment of its own that sees the packages of this one."""

    def __init__(self, path: Path) -> None:
        venv.create(path, symlinks=True)
        self.path = path
        self.python = path / "bin" / "python"
        self.site_packages = next(path.glob("lib/python*/site-packages"))
        seen = [entry for entry in sys.path if entry.endswith("-packages")]
        (self.site_packages / "outer.pth").write_text("\n".join(seen))

    def pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, *arguments, "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def install(self, *options: str) -> None:
        """Install the checkout, nothing else, without a network."""
        self.pip("install", "--no-deps", "--no-build-isolation", *options, str(ROOT))

    def files(self) -> set[str]:
        return {path.name for path in self.site_packages.iterdir()}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.fixture(scope="session")
def xtuner(tmp_path_factory) -> Callable[..., subprocess.CompletedProcess]:
    """Run an ``xtuner`` command where the plugin is installed and no GPU is seen."""
    environment = Environment(tmp_path_factory.mktemp("installed") / "environment")
    environment.install()
    work = tmp_path_factory.mktemp("work")
    settings = dict(
        HF_HUB_OFFLINE="1",
        HF_DATASETS_CACHE=str(work / "datasets"),
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        PATH=os.pathsep.join([str(environment.python.parent), os.environ["PATH"]]),
    )

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [environment.python, "-c", "from xtuner import cli; cli()", *arguments],
            capture_output=True,
            text=True,
            cwd=work,
            env={**os.environ, **settings, **variables},
        )

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with a Mamba of random weights, its tokenizer, and conversations like alpaca's."""
    path = tmp_path_factory.mktemp("tiny")
    make_tokenizer().save_pretrained(path / "model")
    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(**TINY)).save_pretrained(path / "model")
    (path / "data").mkdir()
    (path / "data" / "train.json").write_text(json.dumps(make_conversations()))
    return path


# ids as in GPT-NeoX's tokenizer, whose end of text is 0
TINY = dict(
    vocab_size=264,
    hidden_size=16,
    state_size=4,
    num_hidden_layers=2,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of single bytes."""
    end = "<|endoftext|>"
    alphabet = [end, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end, unk_token=end
    )


def make_conversations(count: int = 100) -> list[dict[str, str]]:
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "run", "away"]
    draw = random.Random(0)
    return [
        {
            "instruction": " ".join(draw.choices(words, k=draw.randint(2, 8))),
            "input": "",
            "output": " ".join(draw.choices(words, k=draw.randint(1, 40))),
        }
        for _ in range(count)
    ]


@pytest.fixture(scope="session")
def write_config(tmp_path_factory) -> Callable[..., Path]:
    """Copy a config, with values of its settings block replaced."""

    def write(source: str, **settings: object) -> Path:
        text = Path(cfgs_name_path.get(source) or templates()[source]).read_text()
        for name, value in settings.items():
            text, count = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", text, flags=re.M)
            assert count == 1, f"{source} sets {name} {count} times"
        path = tmp_path_factory.mktemp("config") / f"{source}_copy.py"
        path.write_text(text)
        return path

    return write
