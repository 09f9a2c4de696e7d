"""Rows to XTuner's conversations: what tokenizing needs of them, told before it fails."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from mmengine.utils import get_object_from_string
from xtuner.dataset.huggingface import add_template_to_dataset
from xtuner.registry import MAP_FUNC


def resolve_map_fn(dataset_map_fn: Any) -> Callable | None:
    """Return the function that XTuner would call, be it given itself or by name.

    Raises:
        ValueError: There is no such function.
    """
    found = dataset_map_fn
    if isinstance(found, str):
        found = MAP_FUNC.get(found) or get_object_from_string(found)
    if dataset_map_fn is not None and not callable(found):
        raise ValueError(
            f"dataset_map_fn must be a function or the name of one, got {dataset_map_fn!r}; write "
            "a name in full, as 'xtuner.dataset.map_fns.alpaca_map_fn'"
        )
    return found


def map_rows(
    rows: Dataset,
    numbers: np.ndarray,
    *,
    dataset_map_fn: Callable | str | None,
    template_map_fn: Callable | dict | None,
    rename_maps: Sequence[tuple[str, str]],
    num_proc: int | None,
    tokenized: bool,
) -> Dataset:
    """Do what XTuner does before it tokenizes.

    Args:
        rows: As they were loaded.
        numbers: What to call each row in a message, ``(num_rows,)``.
        dataset_map_fn: See ``process_packed_dataset``.
        template_map_fn: See there.
        rename_maps: See there.
        num_proc: Processes to map with; none but this one with ``None``.
        tokenized: Whether the rows are tokenized already; if not, they must become conversations.

    Raises:
        ValueError: No row is left, or ``dataset_map_fn`` reads what a row does not have, or a
            text of a conversation is missing or is something else.
    """
    num_rows = len(rows)
    map_fn = resolve_map_fn(dataset_map_fn)
    column = {new: old for old, new in rename_maps}.get("conversation", "conversation")
    # a template makes a text of any input
    texts = ("input", "output") if template_map_fn is None else ("output",)
    row_map = _RowMap(map_fn, column, () if tokenized else texts, numbers)
    if num_rows and not (tokenized and map_fn is None):
        rows = rows.map(row_map, with_indices=True, num_proc=num_proc)
    if num_rows and not tokenized and column not in rows.column_names:
        raise ValueError(
            f"rows must have the column {column} to be tokenized, got {rows.column_names}; "
            "make it with dataset_map_fn, [{'input': '', 'output': text}] for plain text"
        )
    if num_rows and template_map_fn is not None:
        rows = add_template_to_dataset(rows, template_map_fn, num_proc)
    if not len(rows):
        raise ValueError(
            f"the dataset must have at least one document, got 0 of {num_rows} rows; check its "
            "path and split, and that dataset_map_fn returns a conversation"
        )
    for old, new in rename_maps:
        rows = rows.rename_column(old, new)
    return rows


class _RowMap:
    """Map a row, and look at the conversation at once.

    Later it is too late: processes that map a share of the rows each can disagree about the type
    of a column of nulls, and ``datasets`` then stops without naming a row.
    """

    def __init__(
        self, map_fn: Callable | None, column: str, texts: tuple[str, ...], numbers: np.ndarray
    ) -> None:
        self._map_fn, self._column, self._texts, self._numbers = map_fn, column, texts, numbers

    def __call__(self, row: Mapping, index: int) -> Mapping | None:
        number = self._numbers[index]
        try:
            made = row if self._map_fn is None else self._map_fn(row)
        except KeyError as error:
            raise ValueError(
                f"a row must have what dataset_map_fn reads, got no {error} in row {number} with "
                f"the columns {list(row)}; rename a column of the data, or choose another "
                "dataset_map_fn"
            ) from error
        if self._texts and isinstance(made, Mapping) and self._column in made:
            self._check_texts(made[self._column], number)
        # nothing is written for rows that stay as they are
        return None if self._map_fn is None else made

    def _check_texts(self, conversation: Any, number: int) -> None:
        if not isinstance(conversation, list):
            raise ValueError(
                f"a conversation must be a list of turns, got {reprlib.repr(conversation)} in row "
                f"{number}; make it with dataset_map_fn"
            )
        for turn in conversation:
            for name in self._texts:
                text = turn.get(name) if isinstance(turn, Mapping) else None
                if not isinstance(text, str):
                    raise ValueError(
                        f"the {name} of a turn must be a text, got {reprlib.repr(text)} in row "
                        f"{number}; mend the row, or leave it out with dataset.filter"
                    )
