"""A corpus that every machine has, and a small Mamba with a tokenizer of its own to train on it."""

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

# as in the tokenizer of the published Mamba models, the first token begins and ends a document
END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"
# no source of the library itself, or tables of data
_LEFT_OUT = {
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}


class Document(NamedTuple):
    """A piece of source text."""

    name: str
    """For example ``argparse.ArgumentParser``."""
    text: str


def stdlib_documents(max_chars: int) -> list[Document]:
    """Cut the standard library into documents: every function, every class, what is between them.

    The choice and the order are drawn at random, but always the same for one release of Python.
    Lengths have a long tail: from a line to tens of thousands of characters.

    Args:
        max_chars: Characters of all documents together, at most.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not _LEFT_OUT.intersection(parts[:-1]):
            source = path.read_text(encoding="utf-8", errors="replace")
            documents += cut_module(".".join(parts), source)
    random.Random(0).shuffle(documents)
    chosen, chars = [], 0
    for document in documents:
        if chars + len(document.text) <= max_chars:
            chosen.append(document)
            chars += len(document.text)
    return chosen


def cut_module(module: str, source: str) -> Iterator[Document]:
    r"""Cut a module's source at its top level.

    >>> for document in cut_module("m", "import os\ndef f():\n    return 1\nX = 2\n"):
    ...     print(document)
    Document(name='m.f', text='def f():\n    return 1')
    Document(name='m', text='import os\nX = 2')
    """
    try:
        nodes = ast.parse(source).body
    except SyntaxError:
        # the library keeps a few files that are broken on purpose
        return
    lines = source.split("\n")
    rest = dict(enumerate(lines))
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            text = "\n".join(lines[first : node.end_lineno])
            yield Document(f"{module}.{node.name}", text)
            for line in range(first, node.end_lineno):
                rest.pop(line, None)
    text = "\n".join(rest.values()).strip()
    if text:
        yield Document(module, text)


def write_jsonl(documents: list[Document], path: Path) -> None:
    """Write a JSON object a line, with the fields ``name`` and ``text``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(document._asdict()) + "\n" for document in documents)


def train_tokenizer(documents: list[Document], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE from the corpus."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        pad_token=PADDING,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int, num_layers: int
) -> MambaForCausalLM:
    """Build a Mamba with random weights, the same at every call."""
    config = MambaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        # transformers' 0.1 makes a model this small predict the token it has just read
        initializer_range=0.02,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MambaForCausalLM(config)
