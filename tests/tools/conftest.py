"""A config that is healthy, to be made ill in one place."""

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xtuner_mamba.demo.inputs import Document, build_model, train_tokenizer, write_jsonl

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "run", "away"]

CONFIG = """
from datasets import load_dataset
from mmengine.dataset import DefaultSampler
from mmengine.optim import OptimWrapper
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer
from xtuner.dataset import process_hf_dataset
from xtuner.dataset.collate_fns import default_collate_fn
from xtuner.dataset.map_fns import alpaca_map_fn
from xtuner.engine.runner import TrainLoop
from xtuner.model import SupervisedFinetune

from xtuner_mamba.dataset import (
    BucketBatchSampler,
    CarriedChunkBatchSampler,
    carried_collate_fn,
    document_map_fn,
    packed_collate_fn,
    padded_collate_fn,
    process_chunk_dataset,
    process_document_dataset,
    process_packed_dataset,
)
from xtuner_mamba.engine import MambaOptimWrapperConstructor
from xtuner_mamba.engine.hooks import CarriedStateHook, PackedLayoutHook
from xtuner_mamba.model import PackedSupervisedFinetune

path = "model"
use_varlen_attn = True
tokenizer = dict(type=AutoTokenizer.from_pretrained, pretrained_model_name_or_path=path)
model = dict(
    type=PackedSupervisedFinetune,
    use_varlen_attn=use_varlen_attn,
    use_activation_checkpointing=False,
    llm=dict(type=AutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path=path),
)
train_dataset = dict(
    type=process_packed_dataset,
    dataset=dict(type=load_dataset, path="json", data_files="documents.jsonl"),
    tokenizer=tokenizer,
    max_length=256,
    dataset_map_fn=document_map_fn,
    map_num_proc=1,
    pack_to_max_length=True,
    use_varlen_attn=use_varlen_attn,
)
train_dataloader = dict(
    batch_size=1,
    num_workers=0,
    dataset=train_dataset,
    sampler=dict(type=DefaultSampler, shuffle=True),
    collate_fn=dict(type=packed_collate_fn),
)
optim_wrapper = dict(
    type=OptimWrapper,
    constructor=MambaOptimWrapperConstructor,
    optimizer=dict(type=AdamW, lr=1e-2, weight_decay=0.1),
    accumulative_counts=1,
)
train_cfg = dict(type=TrainLoop, max_epochs=1)
custom_hooks = [dict(type=PackedLayoutHook)]
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=1), checkpoint=dict(type="CheckpointHook", interval=99)
)
log_processor = dict(by_epoch=False, window_size=1)
visualizer = None
"""

_BUCKETS = {
    "type=process_packed_dataset": "type=process_document_dataset",
    "type=packed_collate_fn": "type=padded_collate_fn, use_varlen_attn=use_varlen_attn",
    "sampler=dict(type=DefaultSampler": (
        "batch_sampler=dict(type=BucketBatchSampler, boundaries=[64, 96, 128, 176, 256], "
        "tokens_per_batch=512),\n    sampler=dict(type=DefaultSampler"
    ),
}
_WITHOUT_BOUNDARIES = {
    "use_varlen_attn = True": "use_varlen_attn = False",
    "[dict(type=PackedLayoutHook)]": "[]",
}
_FAULTY = {"import AdamW\n": "import AdamW\n\nfrom faulty import collate\n"}
CHANGES = {
    "packs": {},
    "buckets": _BUCKETS,
    "padded": _BUCKETS | _WITHOUT_BOUNDARIES,
    # what XTuner makes of packs where nobody tells it that documents have boundaries
    "unmarked packs": _WITHOUT_BOUNDARIES
    | {
        "type=process_packed_dataset": "type=process_hf_dataset",
        "type=packed_collate_fn": "type=default_collate_fn",
    },
    "chunks": {
        "type=packed_collate_fn": "type=padded_collate_fn",
        "    pack_to_max_length": '    packing="wrap",\n    pack_to_max_length',
    },
    "carried": {
        "type=process_packed_dataset": "type=process_chunk_dataset",
        "type=packed_collate_fn": "type=carried_collate_fn",
        "sampler=dict(type=DefaultSampler": (
            "batch_sampler=dict(type=CarriedChunkBatchSampler, max_length=64, "
            "tokens_per_batch=256),\n    sampler=dict(type=DefaultSampler"
        ),
        "LayoutHook)]": "LayoutHook), dict(type=CarriedStateHook)]",
    },
    "tokenized": {
        "tokenizer=tokenizer": "do_dataset_tokenization=False",
        "documents.jsonl": "tokenized.jsonl",
        "dataset_map_fn=document_map_fn": "dataset_map_fn=None",
    },
    "conversations": {
        "documents.jsonl": "conversations.jsonl",
        "dataset_map_fn=document_map_fn": "dataset_map_fn=alpaca_map_fn",
    },
    # of the module that ``write_collate`` writes
    "faulty packs": _FAULTY
    | {"collate_fn=dict(type=packed_collate_fn": "collate_fn=dict(type=collate"},
    "faulty padding": _BUCKETS
    | _WITHOUT_BOUNDARIES
    | _FAULTY
    | {"collate_fn=dict(type=padded_collate_fn": "collate_fn=dict(type=collate"},
}
"""What makes another config of it, by name."""


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """A folder with a model, its tokenizer, documents and conversations."""
    folder = tmp_path_factory.mktemp("inputs")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(30, 150))) for _ in range(60)]
    documents = [Document(str(number), text) for number, text in enumerate(texts)]
    tokenizer = train_tokenizer(documents, vocab_size=280)
    tokenizer.save_pretrained(folder / "model")
    build_model(tokenizer, hidden_size=16, num_layers=1).save_pretrained(folder / "model")
    write_jsonl(documents, folder / "documents.jsonl")
    conversations = [dict(instruction=text[:40], input="", output=text[40:240]) for text in texts]
    (folder / "conversations.jsonl").write_text("\n".join(map(json.dumps, conversations)))
    return folder


@pytest.fixture
def folder(inputs, tmp_path, monkeypatch) -> Path:
    """An empty folder to run in, with what the config reads."""
    for entry in inputs.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.fixture
def write_config(folder) -> Callable[..., str]:
    """Write the config with some of its text replaced, and return its path."""

    def write(*changes: str | dict[str, str]) -> str:
        text = CONFIG
        for change in changes:
            replacements = CHANGES[change] if isinstance(change, str) else change
            for old, new in replacements.items():
                assert old in text, f"{old} is not in {text}"
                text = text.replace(old, new)
        (folder / "config.py").write_text(text)
        return "config.py"

    return write


@pytest.fixture
def write_collate(folder) -> Iterator[Callable[..., None]]:
    """Write a collate function: ours, and what a line of code then does to its ``data``."""

    def write(line: str, ours: str) -> None:
        sys.modules.pop("faulty", None)
        (folder / "faulty.py").write_text(
            f"from xtuner_mamba.dataset import {ours} as ours\n\n\n"
            "def collate(instances, **options):\n"
            "    batch = ours(instances, **options)\n"
            "    data = batch['data']\n"
            f"    {line}\n"
            "    return batch\n"
        )

    yield write
    sys.modules.pop("faulty", None)
