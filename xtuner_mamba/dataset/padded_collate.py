"""Several documents make a batch: padded rows, or the same rows without their padding."""

from collections.abc import Sequence
from itertools import accumulate, chain

from xtuner.dataset.collate_fns import default_collate_fn
from xtuner.utils import DEFAULT_PAD_TOKEN_INDEX

from xtuner_mamba.dataset.collate import packed_collate_fn
from xtuner_mamba.layout import IGNORE_INDEX


def padded_collate_fn(
    instances: Sequence[dict],
    pad_index: int = DEFAULT_PAD_TOKEN_INDEX,
    return_hf_format: bool = False,
    use_varlen_attn: bool = True,
) -> dict:
    """Turn documents into a batch, one a row.

    Documents ``[5, 6, 7]`` and ``[8]`` make, padded on the right::

        input_ids = [[5, 6, 7],  attention_mask = [[1, 1, 1],  labels = [[5, 6,    7],
                     [8, 0, 0]]                    [1, 0, 0]]            [8, -100, -100]]

    With ``use_varlen_attn`` the rows are laid end to end instead, and ``PackedLayoutHook`` tells
    the model where each starts. Loss and gradients are those of the padded batch, and nothing is
    computed for padding::

        input_ids = [[5, 6, 7, 8]]   cumulative_len = [[0, 3, 4]]   labels = [[-100, 6, 7, -100]]

    A pack is a row as well: what stands in it besides tokens and labels is ignored, so that nothing
    resets the state at a document's start.

    Args:
        instances: Documents, from ``process_document_dataset``, or fixed chunks, from
            ``process_packed_dataset``.
        pad_index: Token that rows are padded with.
        return_hf_format: Whether to return the inner dict alone.
        use_varlen_attn: Whether padding is left out. The same as the model's.

    Returns:
        ``{"data": ..., "data_samples": None}``, where data is what ``packed_collate_fn`` gives, or
        has ``input_ids``, ``labels`` and ``position_ids``, int64, and ``attention_mask``, bool,
        ``(batch, longest)``.

    Raises:
        ValueError: There is no instance, or one that is no text with as many labels as tokens.
    """
    if not instances:
        raise ValueError(f"a batch must have a document, got {list(instances)}")
    rows = [_check_row(instance) for instance in instances]
    if use_varlen_attn:
        return packed_collate_fn([_lay_end_to_end(rows)], pad_index, return_hf_format)
    return default_collate_fn(rows, pad_index, return_hf_format)


def _check_row(instance: dict) -> dict[str, Sequence[int]]:
    """Return the tokens and labels of an instance, and nothing else."""
    if instance.get("pixel_values") is not None:
        raise ValueError(
            f"a document must hold text only, got the columns {sorted(instance)}; use XTuner's "
            "default_collate_fn for images"
        )
    if not {"input_ids", "labels"} <= set(instance):
        raise ValueError(
            f"a document must hold input_ids and labels, got {sorted(instance)}; build the dataset "
            "with process_document_dataset"
        )
    input_ids, labels = instance["input_ids"], instance["labels"]
    if not len(input_ids) or len(labels) != len(input_ids):
        raise ValueError(
            f"a document must have tokens and as many labels, got {len(input_ids)} and "
            f"{len(labels)}; set a label to {IGNORE_INDEX} where a token is no target"
        )
    return {"input_ids": input_ids, "labels": labels}


def _lay_end_to_end(rows: list[dict[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Make a pack of documents, with XTuner's columns."""
    lengths = [len(row["input_ids"]) for row in rows]
    # a document's first token is no target of the one before it
    labels = [[IGNORE_INDEX, *row["labels"][1:]] for row in rows]
    return {
        "input_ids": list(chain.from_iterable(row["input_ids"] for row in rows)),
        "labels": list(chain.from_iterable(labels)),
        "cumulative_len": list(accumulate(lengths, initial=0)),
        "position_ids": list(chain.from_iterable(map(range, lengths))),
    }
