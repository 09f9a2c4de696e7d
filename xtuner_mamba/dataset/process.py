"""Documents in, packs out: XTuner's ``process_hf_dataset`` with a plan instead of a packer."""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from numbers import Integral
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch.distributed
from mmengine.dist import get_rank, is_distributed
from mmengine.logging import print_log
from torch.utils.data import Dataset
from xtuner.dataset.huggingface import tokenize_dataset
from xtuner.dataset.utils import get_bos_eos_token_ids
from xtuner.registry import BUILDER

from xtuner_mamba.dataset.arguments import bind_arguments
from xtuner_mamba.dataset.conversations import map_rows, resolve_map_fn
from xtuner_mamba.dataset.documents import TokenizedDocuments
from xtuner_mamba.dataset.packed_dataset import PLANNERS, PackedDataset, pack_documents
from xtuner_mamba.dataset.sources import load_rows

# what XTuner starts at most
_MAX_NUM_PROC = 32
# what arguments may be, and what to do instead of anything else
_TEXT = "use xtuner.dataset.process_hf_dataset for rows that are no packs of text"
_CHOICES = {
    "split": (
        ("train", None),
        "use xtuner.dataset.process_hf_dataset with pack_to_max_length=False to evaluate",
    ),
    "packing": (tuple(PLANNERS), "'best_fit' cuts no document that fits, 'wrap' fills every pack"),
    "too_long": (("split", "drop", "error"), "choose what becomes of documents over max_length"),
    "do_dataset_tokenization": ((True, False), "leave it out to tokenize"),
    "shuffle_before_pack": ((True, False), "leave it out to draw packs at random"),
    "pack_to_max_length": ((True,), _TEXT),
    "use_varlen_attn": ((True,), _TEXT),
    "input_ids_with_output": ((True,), _TEXT),
    "with_image_token": ((False,), _TEXT),
}
# the least value of integers, and what they are
_LEAST = {
    "max_length": (2, "the number of tokens of a pack"),
    "max_dataset_length": (1, "the number of rows to sample; leave it out to use all"),
    "map_num_proc": (1, "the number of processes; leave it out for as many as there are CPUs"),
    "seed": (0, "what draws at random start from"),
}
_MAY_BE_NONE = ("max_dataset_length", "map_num_proc")


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
    # nothing else has a name yet
    packs = build_packs(locals())
    print_log(str(packs.packing_report), logger="current")
    return packs


def build_packs(arguments: Mapping[str, Any]) -> PackedDataset:
    """Build what :func:`process_packed_dataset` returns, and leave its report for others to log.

    Args:
        arguments: Of that function, by name.

    Raises:
        ValueError: As there.
    """
    check_arguments(arguments)
    given = SimpleNamespace(**bind_arguments(process_packed_dataset, arguments))

    def build() -> PackedDataset:
        if given.do_dataset_tokenization:
            built_tokenizer = _build_tokenizer(given.tokenizer)
        rows = load_rows(given.dataset, given.split)
        numbers = np.arange(len(rows))
        if given.max_dataset_length is not None and given.max_dataset_length < len(rows):
            draw = np.random.default_rng(given.seed)
            numbers = draw.choice(len(rows), given.max_dataset_length, replace=False)
            rows = rows.select(numbers)
        num_proc = num_processes(given.map_num_proc, len(rows))
        rows = map_rows(
            rows,
            numbers,
            dataset_map_fn=given.dataset_map_fn,
            template_map_fn=given.template_map_fn,
            rename_maps=given.rename_maps,
            num_proc=num_proc,
            tokenized=not given.do_dataset_tokenization,
        )
        if given.do_dataset_tokenization:
            # XTuner cuts documents at max_length without a word: too_long decides instead
            rows = tokenize_dataset(
                rows,
                built_tokenizer,
                max_length=sys.maxsize,
                with_image_token=given.with_image_token,
                input_ids_with_output=given.input_ids_with_output,
                remove_unused_columns=True,
                map_num_proc=num_proc,
            )
        documents = TokenizedDocuments(rows)
        if given.do_dataset_tokenization:
            _warn_of_empty_texts(documents.lengths, built_tokenizer)
        return pack_documents(
            documents,
            given.max_length,
            packing=given.packing,
            too_long=given.too_long,
            seed=given.seed if given.shuffle_before_pack else None,
        )

    return on_rank_zero(build)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of :func:`process_packed_dataset`, before anything is built.

    Args:
        arguments: By name, as a config has them.

    Raises:
        ValueError: One is unknown, missing, or cannot be met.
    """
    signature = inspect.signature(process_packed_dataset)
    try:
        call = signature.bind(**arguments)
    except TypeError as error:
        # "got an unexpected keyword argument" or "missing a required argument"
        said = str(error).removeprefix("got ")
        raise ValueError(
            f"process_packed_dataset must be given the arguments that it has, got {said}; they "
            f"are {', '.join(signature.parameters)}"
        ) from None
    call.apply_defaults()
    values = call.arguments
    for name, (choices, remedy) in _CHOICES.items():
        if values[name] not in choices:
            raise ValueError(
                f"{name} must be {' or '.join(map(repr, choices))} in process_packed_dataset, got "
                f"{values[name]!r}; {remedy}"
            )
    for name, (least, meaning) in _LEAST.items():
        value = values[name]
        if value is None and name in _MAY_BE_NONE:
            continue
        if not isinstance(value, Integral) or value < least:
            raise ValueError(
                f"{name} must be an integer of at least {least}, got {value!r}; it is {meaning}"
            )
    if values["do_dataset_tokenization"] and values["tokenizer"] is None:
        raise ValueError(
            "tokenizer must be given to tokenize, got None; set do_dataset_tokenization=False "
            "for a dataset that has input_ids and labels"
        )
    resolve_map_fn(values["dataset_map_fn"])
    template = values["template_map_fn"]
    if not (template is None or callable(template) or isinstance(template, dict)):
        raise ValueError(
            f"template_map_fn must be a function or a config, got {template!r}; write "
            "dict(type=template_map_fn_factory, template=...)"
        )
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in values["rename_maps"]):
        raise ValueError(
            f"rename_maps must be pairs of names, got {values['rename_maps']!r}; write "
            "[('old', 'new')]"
        )


def _build_tokenizer(tokenizer: Any) -> Any:
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


def _warn_of_empty_texts(lengths: np.ndarray, tokenizer: Any) -> None:
    num_special = sum(map(len, get_bos_eos_token_ids(tokenizer)))
    if num_empty := int((lengths <= num_special).sum()):
        print_log(
            f"{num_empty:,} of {len(lengths):,} documents have no text, only BOS and EOS, and "
            "train the model to end where it begins; leave such rows out with dataset.filter",
            logger="current",
            level=logging.WARNING,
        )


def num_processes(wanted: int | None, num_rows: int) -> int | None:
    """Decide how many processes map so many rows, ``None`` for this one alone."""
    if wanted is None:
        wanted = min(_MAX_NUM_PROC, os.cpu_count() or 1)
    num_proc = min(wanted, num_rows)
    return num_proc if num_proc > 1 else None


def on_rank_zero(build: Callable[[], Dataset]) -> Dataset:
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
