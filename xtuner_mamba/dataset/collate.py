"""One pack makes a batch."""

from collections.abc import Sequence

import torch
from xtuner.dataset.collate_fns import default_collate_fn
from xtuner.parallel.sequence import get_sequence_parallel_world_size
from xtuner.utils import DEFAULT_PAD_TOKEN_INDEX

from xtuner_mamba.layout import check_cu_seqlens

_COLUMNS = ("input_ids", "labels", "cumulative_len", "position_ids")


def packed_collate_fn(
    instances: Sequence[dict],
    pad_index: int = DEFAULT_PAD_TOKEN_INDEX,
    return_hf_format: bool = False,
) -> dict:
    """Turn a pack into what ``PackedLayoutHook`` and the model take.

    XTuner's ``default_collate_fn(use_varlen_attn=True)``, after checks that say what to do.

    Args:
        instances: A single pack, from ``process_packed_dataset``.
        pad_index: Token that would fill up a batch; a pack is never filled up.
        return_hf_format: Whether to return the inner dict alone.

    Returns:
        ``{"data": ..., "data_samples": None}``, where data has ``input_ids``, ``labels`` and
        ``position_ids``, int64, ``(1, total)``, ``cumulative_len``, a list of one int32 tensor,
        ``(num_seqs + 1,)``, and ``max_seqlen``, a Python int.

    Raises:
        ValueError: There are several instances, or the one is no whole pack of text.
    """
    if len(instances) != 1:
        raise ValueError(
            f"batch_size must be 1 with packs, which hold many documents each, got "
            f"{len(instances)}; raise max_length instead, or use padded_collate_fn for rows of one "
            "document"
        )
    pack = instances[0]
    if pack.get("pixel_values") is not None:
        raise ValueError(
            f"a pack must hold text only, got the columns {sorted(pack)}; use XTuner's "
            "default_collate_fn for images"
        )
    missing = [name for name in _COLUMNS if name not in pack]
    if missing:
        raise ValueError(
            f"a pack must hold {', '.join(_COLUMNS)}, got {sorted(pack)}; build the dataset "
            "with process_packed_dataset, or with pack_to_max_length and use_varlen_attn"
        )
    total = len(pack["input_ids"])
    for name in ("labels", "position_ids"):
        if len(pack[name]) != total:
            raise ValueError(
                f"{name} must have the pack's {total} entries, got {len(pack[name])}; "
                "cut or pad before packing, not after"
            )
    check_cu_seqlens(torch.tensor(pack["cumulative_len"], dtype=torch.int32), total)
    ways = get_sequence_parallel_world_size()
    if total % ways:
        raise ValueError(
            f"a pack's tokens must be divisible by the sequence parallel size {ways}, got "
            f"{total}; set sequence_parallel_size = 1"
        )
    return default_collate_fn(instances, pad_index, return_hf_format, use_varlen_attn=True)
