"""Documents that a config trains on, or their lengths in a data file."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from mmengine.config import Config
from mmengine.logging import MMLogger
from xtuner.configs import cfgs_name_path
from xtuner.tools.utils import set_model_resource

from xtuner_mamba.dataset import document_map_fn, process_packed_dataset
from xtuner_mamba.dataset.documents import TokenizedDocuments
from xtuner_mamba.dataset.sources import check_source
from xtuner_mamba.tools.named_tokenizer import load_tokenizer

_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_PROCESSES = (
    "process_packed_dataset",
    "process_document_dataset",
    "process_chunk_dataset",
    "process_hf_dataset",
)
# tokens of a document at most
_LONGEST = 2**40
# whole documents, whatever the config does with long ones: in one row that holds all of them
_WHOLE = dict(
    max_length=_LONGEST,
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
    batch_sizes: list[int] | str | None = None
    too_long: str = "split"


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
        cfg = read_config(source, ["train_dataloader"])
        documents = read_documents(cfg)
        sampler = cfg.train_dataloader.get("batch_sampler") or {}
        return Corpus(
            documents.lengths[documents.has_label],
            cfg.train_dataloader.dataset.get("max_length"),
            sampler.get("boundaries"),
            sampler.get("tokens_per_batch"),
            sampler.get("batch_sizes"),
            cfg.train_dataloader.dataset.get("too_long", "split"),
        )
    reader = _READERS.get(Path(source).suffix)
    if reader is None:
        raise ValueError(
            f"the source must be a config, or a file that ends with {', '.join(_READERS)}, got "
            f"{source!r}; `xtuner list-cfg -p mamba` lists the templates"
        )
    check_source(dict(type=load_dataset, path=reader, data_files=source))
    return Corpus(_lengths_of_rows(_load_file(reader, source), tokenizer))


def read_config(source: str, needed: Sequence[str] = ()) -> Config:
    """Read what ``xtuner train`` would be given.

    Args:
        source: The name of a template, or a config's path.
        needed: What it must set.

    Raises:
        ValueError: There is no such file, it does not run, or does not set what is needed.
    """
    try:
        cfg = Config.fromfile(cfgs_name_path.get(source, source))
    except OSError as error:
        raise ValueError(
            f"a config must be a Python file that can be read, or the name of a template, got "
            f"{source!r} ({error}); `xtuner list-cfg -p mamba` lists the templates"
        ) from error
    # it runs the config, which can fail in any way
    except Exception as error:
        raise ValueError(
            f"a config must be Python that runs, got {type(error).__name__}: {error}; "
            "`xtuner list-cfg -p mamba` lists templates to begin with"
        ) from error
    for name in needed:
        if name not in cfg:
            raise ValueError(f"a config must set {name}, got none; copy it from a template")
    if "train_dataloader" in needed and not (cfg.train_dataloader or {}).get("dataset"):
        raise ValueError("train_dataloader must have a dataset, got none; copy it from a template")
    set_model_resource(cfg)
    return cfg


def read_documents(cfg: Config) -> TokenizedDocuments:
    """Tokenize the documents that a config trains on, whole.

    Raises:
        ValueError: The dataset is not built by one of the functions that are known here.
    """
    node = cfg.train_dataloader.dataset
    name = getattr(node.get("type"), "__name__", str(node.get("type"))).rpartition(".")[2]
    if name not in _PROCESSES:
        raise ValueError(
            f"train_dataloader.dataset must be built by {', '.join(_PROCESSES)}, got {name}; "
            "`xtuner-mamba lengths` also takes the data file itself"
        )
    known = inspect.signature(process_packed_dataset).parameters
    return _tokenize({key: value for key, value in node.items() if key in known})


def _load_file(reader: str, source: str) -> Dataset:
    try:
        with _files_explained():
            return load_dataset(reader, data_files=source, split="train")
    except ValueError as error:
        # what datasets says of a file that has no row
        if "corresponds to no data" not in str(error):
            raise
        raise ValueError(
            "a data file must hold documents, got no row; write one document a row"
        ) from None


def _lengths_of_rows(rows: Dataset, tokenizer: str | None) -> np.ndarray:
    if "length" in rows.column_names:
        return _check_lengths("length", rows.data.column("length"))
    if "input_ids" in rows.column_names:
        tokens = rows.data.column("input_ids")
        if not pa.types.is_nested(tokens.type):
            raise ValueError(
                f"input_ids must hold lists of tokens, got {tokens.type}; write texts in a column "
                "text"
            )
        return _check_lengths("input_ids", pc.list_value_length(tokens))
    if "text" not in rows.column_names:
        raise ValueError(
            f"a data file must have a column length, input_ids or text, got {rows.column_names}; "
            "give the config that trains on it"
        )
    if tokenizer is None:
        raise ValueError(
            "a tokenizer must be given for the column text, got none; add --tokenizer PATH"
        )
    built = load_tokenizer(tokenizer)
    documents = _tokenize(dict(dataset=rows, tokenizer=built, dataset_map_fn=document_map_fn))
    return documents.lengths[documents.has_label]


def _check_lengths(name: str, lengths: pa.ChunkedArray) -> np.ndarray:
    """Return tokens of each row, int64, ``(num_rows,)``, and let none pass that is no count."""
    if not (pa.types.is_integer(lengths.type) or pa.types.is_floating(lengths.type)):
        raise ValueError(
            f"{name} must hold integers, got {lengths.type}; count the tokens of each document"
        )
    counts = pc.and_(pc.greater_equal(lengths, 1), pc.equal(lengths, pc.floor(lengths)))
    # a sum of them must be an int64, too
    counts = pc.and_(counts, pc.less_equal(lengths, _LONGEST))
    row = pc.index(pc.fill_null(counts, False), False).as_py()
    if row >= 0:
        raise ValueError(
            f"{name} must tell of a whole number of tokens, from 1 to {_LONGEST:,}, got "
            f"{lengths[row].as_py()} in row {row}; mend the row, or leave it out"
        )
    return lengths.to_numpy().astype(np.int64)


def _tokenize(arguments: dict) -> TokenizedDocuments:
    with quiet(), _files_explained():
        return process_packed_dataset(**arguments | _WHOLE).documents


@contextmanager
def _files_explained() -> Iterator[None]:
    """Say of a data file that cannot be read what to do about it."""
    try:
        yield
    except (DatasetGenerationError, UnicodeDecodeError) as error:
        # a process that maps hands its error on with another cause
        is_known = isinstance(error, UnicodeDecodeError) or error.__cause__ is None
        cause = error if is_known else error.__cause__
        if isinstance(cause, UnicodeDecodeError):
            raise ValueError(
                f"a data file must be text in UTF-8, got the byte {cause.object[cause.start]:#x} "
                f"({cause.reason}); convert it, with `iconv -f latin1 -t utf-8` for example"
            ) from error
        raise ValueError(
            f"a data file must be whole, got {cause}; mend it, or write it anew"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the log off the terminal, which is for the table or for JSON."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel("WARNING")
    try:
        yield
    finally:
        logger.setLevel(level)
