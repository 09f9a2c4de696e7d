"""Lengths of the documents that a config trains on, or that a data file holds."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, load_dataset
from mmengine.config import Config
from mmengine.logging import MMLogger
from transformers import AutoTokenizer
from xtuner.configs import cfgs_name_path

from xtuner_mamba.dataset import document_map_fn, process_packed_dataset

_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_PROCESSES = ("process_packed_dataset", "process_document_dataset", "process_hf_dataset")
# whole documents, whatever the config does with long ones: in one row that holds all of them
_WHOLE = dict(
    max_length=2**40,
    too_long="split",
    packing="wrap",
    shuffle_before_pack=False,
    pack_to_max_length=True,
    use_varlen_attn=True,
)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents as measured, and what a config says about batches of them."""

    lengths: np.ndarray
    """Tokens of each document with a label, int64, ``(num_documents,)``."""
    max_length: int | None = None
    boundaries: list[int] | None = None
    tokens_per_batch: int | None = None


def read_corpus(source: str, tokenizer: str | None = None) -> Corpus:
    """Measure the documents of a config or a data file.

    Args:
        source: The name of a template, a config's path, or a file with a column ``length``,
            ``input_ids`` or ``text``.
        tokenizer: Name or path, for texts.

    Raises:
        ValueError: The source has no documents that could be measured.
    """
    if source in cfgs_name_path or source.endswith(".py"):
        return _corpus_of_config(Config.fromfile(cfgs_name_path.get(source, source)))
    if Path(source).suffix not in _READERS:
        raise ValueError(
            f"the source must be a config, or a file that ends with {', '.join(_READERS)}, got "
            f"{source!r}; `xtuner list-cfg -p mamba` lists the templates"
        )
    reader = _READERS[Path(source).suffix]
    rows = load_dataset(reader, data_files=source, split="train")
    return Corpus(_lengths_of_rows(rows, tokenizer))


def _corpus_of_config(cfg: Config) -> Corpus:
    node = cfg.train_dataloader.dataset
    name = getattr(node.get("type"), "__name__", str(node.get("type"))).rpartition(".")[2]
    if name not in _PROCESSES:
        raise ValueError(
            f"train_dataloader.dataset must be built by {' or '.join(_PROCESSES)}, got {name}; "
            "give the data file instead"
        )
    known = inspect.signature(process_packed_dataset).parameters
    arguments = {key: value for key, value in node.items() if key in known}
    sampler = cfg.train_dataloader.get("batch_sampler") or {}
    return Corpus(
        _lengths_of_documents(arguments),
        node.max_length,
        sampler.get("boundaries"),
        sampler.get("tokens_per_batch"),
    )


def _lengths_of_rows(rows: Dataset, tokenizer: str | None) -> np.ndarray:
    if "length" in rows.column_names:
        return rows.with_format("numpy")["length"][:].astype(np.int64)
    if "input_ids" in rows.column_names:
        return pc.list_value_length(rows.data.column("input_ids")).to_numpy().astype(np.int64)
    if "text" not in rows.column_names:
        raise ValueError(
            f"a data file must have a column length, input_ids or text, got {rows.column_names}; "
            "give the config that trains on it"
        )
    if tokenizer is None:
        raise ValueError(
            "a tokenizer must be given for the column text, got none; add --tokenizer PATH"
        )
    built = AutoTokenizer.from_pretrained(tokenizer)
    return _lengths_of_documents(
        dict(dataset=rows, tokenizer=built, dataset_map_fn=document_map_fn)
    )


def _lengths_of_documents(arguments: dict) -> np.ndarray:
    with _quiet():
        documents = process_packed_dataset(**arguments | _WHOLE).documents
    return documents.lengths[documents.has_label]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the log off the terminal, which is for the table or for JSON."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel("WARNING")
    try:
        yield
    finally:
        logger.setLevel(level)
