"""Where rows come from: the files that a config names, and the dataset that comes of them."""

import os
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, DatasetDict
from datasets.data_files import resolve_pattern, sanitize_patterns
from mmengine.config import Config
from xtuner.dataset.huggingface import build_origin_dataset
from xtuner.registry import BUILDER

# of load_dataset's own builders, those that make documents of files
_FILE_FORMATS = ("arrow", "csv", "json", "parquet", "text")


def check_source(source: Any) -> None:
    """Check the files on this machine that the config of a dataset names, without reading them.

    ``load_dataset`` passes over a pattern that matches nothing, and stops at an empty file
    without naming it.

    Args:
        source: The config of a ``load_dataset`` or ``load_from_disk``; anything else, and what
            the Hub has, is left to whoever builds it.

    Raises:
        ValueError: A file or folder is missing or empty, or rows would be streamed.
    """
    if not _is_config(source):
        return
    if source.get("streaming"):
        raise ValueError(
            f"streaming must be False to be packed, got {source['streaming']}; the lengths of all "
            "documents are measured before the first pack is made"
        )
    for name in ("path", "data_dir", "dataset_path"):
        path = source.get(name)
        if _is_local(name, path, source) and not os.path.exists(path):
            raise ValueError(
                f"{name} must be on this machine, got {path!r}; it is looked for in {os.getcwd()}"
            )
    for path in _files(source):
        if os.path.isfile(path) and not os.path.getsize(path):
            raise ValueError(
                f"a data file must hold documents, got the empty {path}; remove it, or leave it "
                "out of data_files"
            )


def load_rows(source: Any, split: str | None) -> Dataset:
    """Build a dataset, and choose its split.

    Args:
        source: A dataset, or the config of one.
        split: All of them with ``None``.

    Raises:
        ValueError: There is no such split, or rows cannot be counted.
    """
    check_source(source)
    if _is_config(source):
        source = BUILDER.build(source)
    if isinstance(source, DatasetDict) and split is not None and split not in source:
        raise ValueError(
            f"the dataset must have a split {split!r}, got {sorted(source)}; set split=None to "
            "pack all of them, or name the files in data_files=dict(train=...)"
        )
    if not isinstance(source, Dataset | DatasetDict):
        raise ValueError(
            "dataset must be a Dataset or DatasetDict of Hugging Face, or the config of one, got "
            f"{type(source).__name__}; load it with load_dataset and streaming=False"
        )
    return build_origin_dataset(source, split)


def _is_config(source: Any) -> bool:
    # a DatasetDict is a dict, too
    return isinstance(source, dict | Config) and "type" in source


def _is_local(name: str, path: Any, source: dict) -> bool:
    if not isinstance(path, str) or "://" in path:
        return False
    if name == "path":
        # without a dot or a slash in front it may be a name on the Hub
        return path.startswith((".", os.sep))
    return name == "dataset_path" or source.get("path") in _FILE_FORMATS


def _files(source: dict) -> Iterator[str]:
    path, folder = source.get("path"), source.get("data_dir") or ""
    if not isinstance(path, str) or not source.get("data_files"):
        return
    if path not in _FILE_FORMATS:
        if not os.path.isdir(path):
            return
        folder = os.path.join(path, folder)
    for patterns in sanitize_patterns(source["data_files"]).values():
        for pattern in patterns:
            if "://" in pattern:
                continue
            try:
                yield from resolve_pattern(pattern, os.path.abspath(folder))
            except FileNotFoundError:
                raise ValueError(
                    f"data_files must match files, got none for {pattern!r} in "
                    f"{os.path.abspath(folder)}; check the path, and from where the run is started"
                ) from None
