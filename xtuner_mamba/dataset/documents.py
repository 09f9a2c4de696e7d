"""Tokenized documents on disk, and the few numbers about each that packing needs."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from xtuner_mamba.dataset.plan import PackPlan, Pieces
from xtuner_mamba.layout import IGNORE_INDEX

# rows measured at a time
_BATCH = 1000


class TokenizedDocuments:
    """Token ids and labels, left in their Arrow table (a memory-mapped file after a ``map``).

    A *target* is a labelled token that some logit is trained on: not a document's or a piece's
    first token, which has no predecessor in its pack.

    Args:
        dataset: Has the columns ``input_ids`` and ``labels``; others are ignored.

    Raises:
        ValueError: A column is missing or no list of integers, null somewhere, or the two
            disagree in length; or labels are unsigned.
    """

    lengths: np.ndarray
    """Tokens of each document, int64, ``(num_documents,)``."""
    has_label: np.ndarray
    """Whether any token has one, the first included, bool, ``(num_documents,)``."""

    def __init__(self, dataset: Dataset) -> None:
        _check_columns(dataset)
        self._table = dataset.select_columns(["input_ids", "labels"]).with_format("arrow")
        self.lengths, self.has_label, self._targets = _measure(self._table)

    def read(self, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
        """Return the pieces' token ids and labels, end to end, ``(total,)`` each."""
        table = self._table[pieces.documents.tolist()]
        row_ends = self.lengths[pieces.documents].cumsum()
        starts = row_ends - self.lengths[pieces.documents] + pieces.starts
        offsets = pieces.lengths.cumsum() - pieces.lengths
        tokens = np.arange(pieces.lengths.sum()) + np.repeat(starts - offsets, pieces.lengths)
        return tuple(_flat(table[name])[tokens] for name in ("input_ids", "labels"))

    def packs_with_target(self, plan: PackPlan) -> np.ndarray:
        """Tell which packs have a target, bool, ``(num_packs,)``.

        Labels are read only where the measured numbers cannot tell: inside documents that have
        longer stretches without a target than the piece is long.
        """
        pieces = plan.pieces
        first, last, gap = self._targets[pieces.documents].T
        before, stop = pieces.starts, pieces.starts + pieces.lengths
        inside = (first <= before) & (last >= stop)
        sure = (before < first) & (first < stop) | (before < last) & (last < stop)
        sure |= inside & (gap < pieces.lengths)
        found = np.logical_or.reduceat(sure, plan.offsets[:-1])
        unsure = ~found & np.logical_or.reduceat(inside, plan.offsets[:-1])
        for pack in np.flatnonzero(unsure):
            _, labels = self.read(plan[pack])
            labels[plan[pack].lengths.cumsum() - plan[pack].lengths] = IGNORE_INDEX
            found[pack] = (labels != IGNORE_INDEX).any()
        return found


def _measure(table: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each document's length, whether it has a label, and the outline of its targets."""
    lengths, has_label, targets = [], [], []
    for number, batch in enumerate(table.iter(batch_size=_BATCH)):
        first_row = number * _BATCH
        for name in ("input_ids", "labels"):
            _check_no_null(name, batch[name], first_row)
        lengths.append(_list_lengths(batch["input_ids"]))
        num_labels = _list_lengths(batch["labels"])
        if (wrong := np.flatnonzero(lengths[-1] != num_labels)).size:
            raise ValueError(
                "labels must have as many entries as input_ids, got "
                f"{num_labels[wrong[0]]} and {lengths[-1][wrong[0]]} in row {first_row + wrong[0]}"
                f"; set a label to {IGNORE_INDEX} where a token is no target"
            )
        labelled = _flat(batch["labels"]) != IGNORE_INDEX
        stops = num_labels.cumsum()
        counts = np.concatenate([[0], labelled.cumsum()])
        has_label.append(counts[stops] > counts[stops - num_labels])
        targets.append(_outline_targets(labelled, num_labels))
    return np.concatenate(lengths), np.concatenate(has_label), np.concatenate(targets)


def _outline_targets(labelled: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return ``(first, last, gap)`` of each document, int64, ``(num_documents, 3)``.

    ``first`` and ``last`` are the places of its outermost targets, ``gap`` is the longest step
    from a target to the next; all are 0 if it has none. For labels ``[7, 7, -100, -100, 7]``
    they are 1, 4 and 3.
    """
    stops = lengths.cumsum()
    starts = stops - lengths
    labelled[starts[lengths > 0]] = False
    places = np.flatnonzero(labelled)
    begin, end = np.searchsorted(places, starts), np.searchsorted(places, stops)
    some = begin < end
    begin, end, starts = begin[some], end[some], starts[some]
    outline = np.zeros((len(lengths), 3), dtype=np.int64)
    if some.any():
        steps = np.diff(places, prepend=0)
        steps[begin] = 0
        gap = np.maximum.reduceat(steps, begin)
        outline[some] = np.stack([places[begin] - starts, places[end - 1] - starts, gap], axis=1)
    return outline


def _list_lengths(column: pa.ChunkedArray) -> np.ndarray:
    return pc.list_value_length(column).to_numpy().astype(np.int64)


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    return pc.list_flatten(column).to_numpy()


def _check_no_null(name: str, column: pa.ChunkedArray, first_row: int) -> None:
    values = pc.list_flatten(column)
    if column.null_count:
        row, got = pc.index(column.is_null(), True).as_py(), "None"
    elif values.null_count:
        place = pc.index(values.is_null(), True).as_py()
        stops = _list_lengths(column).cumsum()
        row = np.searchsorted(stops, place, side="right")
        got = f"None at {place - (stops[row - 1] if row else 0)}"
    else:
        return
    raise ValueError(
        f"{name} must be lists of integers, got {got} in row {first_row + row}; leave the row out "
        "with dataset.filter, or mend it where it was tokenized"
    )


def _check_columns(dataset: Dataset) -> None:
    schema = dataset.data.schema
    for name in ("input_ids", "labels"):
        if name not in schema.names:
            raise ValueError(
                f"a tokenized dataset must have the columns input_ids and labels, got "
                f"{dataset.column_names}; rename yours with rename_maps, or set "
                "do_dataset_tokenization=True to tokenize conversations"
            )
        kind = schema.field(name).type
        is_list = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        if not (any(test(kind) for test in is_list) and pa.types.is_integer(kind.value_type)):
            raise ValueError(
                f"{name} must be lists of integers, got {kind}; tokenize the text first "
                "(do_dataset_tokenization=True)"
            )
        if name == "labels" and pa.types.is_unsigned_integer(kind.value_type):
            raise ValueError(
                f"labels must be signed integers, to hold {IGNORE_INDEX}, got {kind}; cast them "
                "with dataset.cast_column('labels', datasets.List(datasets.Value('int64')))"
            )
