"""Documents in, packs out: XTuner's ``process_hf_dataset`` with a plan instead of a packer."""

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch.distributed
from datasets import Dataset
from mmengine.dist import get_rank, is_distributed
from xtuner.dataset.huggingface import (
    add_template_to_dataset,
    build_origin_dataset,
    map_dataset,
    tokenize_dataset,
)
from xtuner.dataset.utils import get_bos_eos_token_ids
from xtuner.registry import BUILDER

from xtuner_mamba.dataset.documents import TokenizedDocuments
from xtuner_mamba.dataset.packed_dataset import PLANNERS, PackedDataset, pack_documents

# what XTuner starts at most
_MAX_NUM_PROC = 32


def process_packed_dataset(
    dataset: Any,
    do_dataset_tokenization: bool = True,
    tokenizer: Any = None,
    max_length: int | None = None,
    dataset_map_fn: Callable | str | None = None,
    template_map_fn: Callable | dict | None = None,
    max_dataset_length: int | None = None,
    split: str | None = "train",
    remove_unused_columns: bool = True,
    rename_maps: Sequence[tuple[str, str]] = (),
    shuffle_before_pack: bool = True,
    pack_to_max_length: bool = True,
    use_varlen_attn: bool = True,
    input_ids_with_output: bool = True,
    with_image_token: bool = False,
    map_num_proc: int | None = None,
    *,
    packing: Literal["best_fit", "wrap"] = "best_fit",
    too_long: Literal["split", "drop", "error"] = "split",
    seed: int = 0,
) -> PackedDataset:
    """Tokenize a dataset and pack its documents, losing none of them silently.

    Takes the place of ``process_hf_dataset`` in a config. In a distributed run rank 0 does the
    work and hands the result to the others. What became of the documents is logged in one line
    and kept as ``packing_report``.

    Args:
        dataset: A Hugging Face dataset, or the config of one.
        do_dataset_tokenization: Whether to tokenize; if not, the dataset has the columns
            ``input_ids`` and ``labels``.
        tokenizer: A tokenizer, or the config of one.
        max_length: Tokens of a pack.
        dataset_map_fn: Turns a row into XTuner's ``conversation``.
        template_map_fn: Puts the prompt template around it.
        max_dataset_length: Rows to sample, if there are more.
        split: Split to use of a dataset that has several, or all of them with ``None``.
        remove_unused_columns: Accepted for XTuner's configs; a pack has no other columns.
        rename_maps: Pairs of old and new column name.
        shuffle_before_pack: Whether packs are drawn at random. If not, documents stay in order
            and ``RedrawSampler`` has nothing to draw.
        pack_to_max_length: Must be ``True``.
        use_varlen_attn: Must be ``True``.
        input_ids_with_output: Must be ``True``.
        with_image_token: Must be ``False``.
        map_num_proc: Processes to map with; as many as there are CPUs, 32 at most, with
            ``None``. The result does not depend on it.
        packing: ``"best_fit"`` keeps documents whole; ``"wrap"`` fills every pack but the last
            to the brim and cuts documents to do so.
        too_long: What happens to documents longer than ``max_length``.
        seed: Of everything drawn at random.

    Returns:
        Packs with the columns of XTuner's ``Packer``.

    Raises:
        ValueError: An argument cannot be met, or nothing is left to train on.
    """
    _check_arguments(
        max_length=max_length,
        split=split,
        packing=packing,
        too_long=too_long,
        pack_to_max_length=pack_to_max_length,
        use_varlen_attn=use_varlen_attn,
        input_ids_with_output=input_ids_with_output,
        with_image_token=with_image_token,
    )

    def build() -> PackedDataset:
        if do_dataset_tokenization:
            built_tokenizer = _build_tokenizer(tokenizer)
        rows = build_origin_dataset(dataset, split)
        if max_dataset_length is not None:
            rows = _sample(rows, max_dataset_length, seed)
        num_proc = _num_proc(map_num_proc, len(rows))
        rows = _map(rows, dataset_map_fn, template_map_fn, rename_maps, num_proc)
        if do_dataset_tokenization:
            _check_conversations(rows)
            # XTuner cuts documents at max_length without a word: too_long decides instead
            rows = tokenize_dataset(
                rows,
                built_tokenizer,
                max_length=sys.maxsize,
                with_image_token=with_image_token,
                input_ids_with_output=input_ids_with_output,
                remove_unused_columns=True,
                map_num_proc=num_proc,
            )
        return pack_documents(
            TokenizedDocuments(rows),
            max_length,
            packing=packing,
            too_long=too_long,
            seed=seed if shuffle_before_pack else None,
        )

    return _on_rank_zero(build)


def _check_arguments(
    *, max_length: int | None, split: str | None, packing: str, too_long: str, **flags: bool
) -> None:
    if not isinstance(max_length, int) or max_length < 2:
        raise ValueError(
            f"max_length must be an integer of at least 2, got {max_length!r}; "
            "it is the number of tokens of a pack"
        )
    if split not in ("train", None):
        raise ValueError(
            f"split must be 'train' or None to be packed, got {split!r}; use "
            "xtuner.dataset.process_hf_dataset with pack_to_max_length=False to evaluate"
        )
    if packing not in PLANNERS:
        raise ValueError(f"packing must be one of {list(PLANNERS)}, got {packing!r}")
    if too_long not in ("split", "drop", "error"):
        raise ValueError(f"too_long must be 'split', 'drop' or 'error', got {too_long!r}")
    for name, value in flags.items():
        required = name != "with_image_token"
        if value is not required:
            raise ValueError(
                f"{name} must be {required} in process_packed_dataset, got {value!r}; use "
                "xtuner.dataset.process_hf_dataset for rows that are no packs of text"
            )


def _sample(rows: Dataset, count: int, seed: int) -> Dataset:
    if count >= len(rows):
        return rows
    return rows.select(np.random.default_rng(seed).choice(len(rows), count, replace=False))


def _map(
    rows: Dataset,
    dataset_map_fn: Callable | str | None,
    template_map_fn: Callable | dict | None,
    rename_maps: Sequence[tuple[str, str]],
    num_proc: int | None,
) -> Dataset:
    num_rows = len(rows)
    if num_rows and dataset_map_fn is not None:
        rows = map_dataset(rows, dataset_map_fn, num_proc)
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


def _build_tokenizer(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise ValueError(
            "tokenizer must be given to tokenize, got None; set do_dataset_tokenization=False "
            "for a dataset that has input_ids and labels"
        )
    if isinstance(tokenizer, dict):
        tokenizer = BUILDER.build(tokenizer)
    bos, eos = get_bos_eos_token_ids(tokenizer)
    if bos is None or eos is None:
        raise ValueError(
            f"tokenizer must have a BOS and an EOS token, got bos_token={tokenizer.bos_token!r} "
            f"and eos_token={tokenizer.eos_token!r}; XTuner puts them around every document: pass "
            "bos_token=... and eos_token=... to from_pretrained"
        )
    return tokenizer


def _check_conversations(rows: Dataset) -> None:
    if "conversation" not in rows.column_names:
        raise ValueError(
            f"rows must have the column conversation to be tokenized, got {rows.column_names}; "
            "make it with dataset_map_fn, [{'input': '', 'output': text}] for plain text"
        )


def _num_proc(wanted: int | None, num_rows: int) -> int | None:
    if wanted is None:
        wanted = min(_MAX_NUM_PROC, os.cpu_count() or 1)
    num_proc = min(wanted, num_rows)
    # one process is this one, without a pool
    return num_proc if num_proc > 1 else None


def _on_rank_zero(build: Callable[[], PackedDataset]) -> PackedDataset:
    """Build on rank 0 and hand the result, or what went wrong, to the others."""
    if not is_distributed():
        return build()
    # XTuner's own setting: others wait longer than NCCL would let them
    timeout = timedelta(minutes=int(os.getenv("XTUNER_DATASET_TIMEOUT", "60")))
    group = torch.distributed.new_group(backend="gloo", timeout=timeout)
    result: list[Any] = [None, None]
    failure = None
    if get_rank() == 0:
        try:
            result[0] = build()
        except Exception as error:
            failure, result[1] = error, f"{type(error).__name__}: {error}"
    torch.distributed.broadcast_object_list(result, src=0, group=group)
    torch.distributed.destroy_process_group(group)
    if failure is not None:
        raise failure
    if result[1] is not None:
        raise RuntimeError(
            f"rank 0 must build the dataset for all ranks, got {result[1]}; see its traceback"
        )
    return result[0]
