"""How many documents a batch of each bucket has: by a budget of tokens, or as measured."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml


def choose_batch_sizes(
    boundaries: np.ndarray, tokens_per_batch: int, batch_sizes: Sequence[int] | str | None = None
) -> np.ndarray:
    """Return the documents of a full batch of each bucket, int64, ``(num_buckets,)``.

    >>> choose_batch_sizes(np.array([4, 16]), tokens_per_batch=16).tolist()
    [4, 1]

    Args:
        boundaries: ``(num_buckets,)``.
        tokens_per_batch: Places of a batch, where no sizes are given.
        batch_sizes: A number a boundary, or the file in which ``xtuner-mamba probe-batch`` wrote
            what a device can hold.

    Raises:
        ValueError: A boundary has no size, or one below 1; or there is no such file.
    """
    if batch_sizes is None:
        return np.maximum(tokens_per_batch // boundaries, 1)
    if isinstance(batch_sizes, str):
        batch_sizes = _read(batch_sizes, boundaries)
    # not int64 at once, which makes 1 of 1.5
    sizes = np.asarray(batch_sizes)
    is_whole = np.issubdtype(sizes.dtype, np.integer)
    if not is_whole or sizes.shape != boundaries.shape or sizes.min() < 1:
        raise ValueError(
            "batch_sizes must be integers of at least 1 for each of the boundaries "
            f"{boundaries.tolist()}, got {batch_sizes!r}"
        )
    return sizes.astype(np.int64)


def _read(path: str, boundaries: np.ndarray) -> list[int]:
    if not Path(path).is_file():
        raise ValueError(
            f"batch_sizes must be numbers, or a file on this machine, got {path!r}; "
            "`xtuner-mamba probe-batch CONFIG` writes one, with batch_sizes=None in the config"
        )
    try:
        contents = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError:
        contents = None
    if not isinstance(contents, dict) or "batch_sizes" not in contents:
        raise ValueError(
            f"batch_sizes must be numbers, or a file that has them, got {path!r} without; "
            "`xtuner-mamba probe-batch CONFIG` writes one"
        )
    measured = contents["batch_sizes"]
    missing = [boundary for boundary in boundaries.tolist() if boundary not in measured]
    if missing:
        raise ValueError(
            f"batch_sizes must have every boundary, got none for {missing} in {path}, which has "
            f"{sorted(measured)}; run `xtuner-mamba probe-batch` on the config as it is now"
        )
    return [measured[boundary] for boundary in boundaries.tolist()]
