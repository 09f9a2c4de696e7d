"""Documents as a dataset, one a row: what buckets and padded batches are made of."""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from mmengine.logging import print_log
from torch.utils.data import Dataset

from xtuner_mamba.dataset.documents import TokenizedDocuments
from xtuner_mamba.dataset.plan import PackPlan, Pieces
from xtuner_mamba.dataset.process import build_packs, check_arguments, process_packed_dataset

_WHOLE_IN_ORDER = dict(
    packing="best_fit", shuffle_before_pack=False, pack_to_max_length=True, use_varlen_attn=True
)


class DocumentDataset(Dataset):
    """Documents, or pieces of long ones, as XTuner's datasets give rows.

    ``dataset[i]`` has the columns ``input_ids`` and ``labels``.

    Args:
        documents: Where the tokens are.
        pieces: What of them the rows are.
    """

    def __init__(self, documents: TokenizedDocuments, pieces: Pieces) -> None:
        self.documents, self.pieces = documents, pieces
        self.length: list[int] = pieces.lengths.tolist()
        """Tokens of each row, where batch samplers and XTuner's samplers look for them."""

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row must be in [0, {len(self)}), got {index}")
        index %= len(self)
        input_ids, labels = self.documents.read(self.pieces[index : index + 1])
        return {"input_ids": input_ids.tolist(), "labels": labels.tolist()}


def process_document_dataset(
    *args: Any,
    too_long: Literal["split", "truncate", "drop", "error"] = "split",
    **kwargs: Any,
) -> DocumentDataset:
    """Tokenize a dataset into rows of one document each.

    The documents are those that ``process_packed_dataset`` packs, so that a config changes from
    one scheme to another and trains on the same ones. They stay in order; a sampler shuffles.

    Args:
        *args: As in ``process_packed_dataset``.
        too_long: What happens to documents longer than ``max_length``. ``"truncate"`` keeps their
            first ``max_length`` tokens; the others as there.
        **kwargs: As there. ``max_length`` is the longest row. What is about packs has no say:
            ``packing``, ``shuffle_before_pack``, ``pack_to_max_length``, ``use_varlen_attn``.

    Raises:
        ValueError: An argument cannot be met, or nothing is left to train on.
    """
    signature = inspect.signature(process_packed_dataset)
    call = signature.bind(*args, **_arguments_of_packs(kwargs, too_long))
    packs = build_packs(call.arguments)
    documents, pieces, report = packs.documents, packs.pieces, packs.packing_report
    if too_long == "truncate":
        pieces = pieces[pieces.starts == 0]
    kept = documents.packs_with_target(PackPlan(pieces, np.arange(len(pieces) + 1)))
    if not kept.any():
        raise ValueError(
            f"a row must have a label after its first token, got none in {len(kept)} rows with "
            f"too_long={too_long!r}; raise max_length, or set too_long='split'"
        )
    rows = DocumentDataset(documents, pieces[kept])
    is_cut = pieces.lengths < documents.lengths[pieces.documents]
    print_log(
        f"{len(rows):,} rows of at most {max(rows.length):,} tokens, one document each; "
        f"{len(np.unique(pieces.documents[is_cut])):,} documents "
        f"{'truncated' if too_long == 'truncate' else 'split into several rows'}, "
        f"{report.num_dropped:,} dropped as too long, {report.num_masked + (~kept).sum():,} rows "
        f"left out for want of labels; {documents.lengths.sum() - sum(rows.length):,} tokens lost",
        logger="current",
    )
    return rows


def check_document_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of :func:`process_document_dataset`, before anything is built.

    Args:
        arguments: By name, as a config has them.

    Raises:
        ValueError: One is unknown, missing, or cannot be met.
    """
    others = dict(arguments)
    too_long = others.pop("too_long", "split")
    check_arguments(_arguments_of_packs(others, too_long))


def _arguments_of_packs(others: dict[str, Any], too_long: str) -> dict[str, Any]:
    if too_long not in ("split", "truncate", "drop", "error"):
        raise ValueError(
            f"too_long must be 'split', 'truncate', 'drop' or 'error', got {too_long!r}"
        )
    # a truncated document is the first piece of a split one
    rule = "split" if too_long == "truncate" else too_long
    return others | _WHOLE_IN_ORDER | dict(too_long=rule)
