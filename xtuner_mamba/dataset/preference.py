"""Pairs of a chosen and a rejected answer in, packs of whole pairs out."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow.compute as pc
from mmengine.logging import print_log
from torch.utils.data import Dataset
from xtuner.registry import BUILDER
from xtuner.utils import DEFAULT_PAD_TOKEN_INDEX

from xtuner_mamba.dataset.chat_template import chat_template_of
from xtuner_mamba.dataset.collate import packed_collate_fn
from xtuner_mamba.dataset.conversations import resolve_map_fn
from xtuner_mamba.dataset.plan import PackPlan, Pieces, plan_best_fit
from xtuner_mamba.dataset.preference_pairs import PARTS, TokenizePair
from xtuner_mamba.dataset.process import num_processes, on_rank_zero
from xtuner_mamba.dataset.sources import load_rows
from xtuner_mamba.layout import IGNORE_INDEX


@dataclass(frozen=True)
class PreferenceReport:
    """What packing did to the pairs. Those packed and dropped add up to the dataset's."""

    pairs: int
    tokens: int
    packs: int
    max_packed_length: int
    num_dropped: int
    """Pairs dropped because they, or one of their documents, are too long."""
    num_dropped_tokens: int

    def __str__(self) -> str:
        used = self.tokens / (self.packs * self.max_packed_length)
        return (
            f"packed {self.pairs:,} pairs of {self.tokens:,} tokens into {self.packs:,} packs of "
            f"{self.max_packed_length:,}, {used:.2%} used; {self.num_dropped:,} pairs dropped as "
            f"too long ({self.num_dropped_tokens:,} tokens)"
        )


class PreferencePacks(Dataset):
    """Packs of pairs, with the columns of XTuner's: chosen and rejected documents in turn.

    Args:
        pairs: Has the columns ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``; an answer goes
            on where the prompt ends.
        plan: Which pairs share a pack.
        reward_token_id: Appended to every document for its reward to be read at, the labels are
            then 0 (chosen) and 1 (rejected) there. With ``None`` the labels are the answers.
    """

    packing_report: PreferenceReport
    """What became of the dataset; set by :func:`process_preference_dataset`."""

    def __init__(
        self, pairs: datasets.Dataset, plan: PackPlan, reward_token_id: int | None = None
    ) -> None:
        self._pairs, self._plan, self._reward_token_id = pairs, plan, reward_token_id
        self.length: list[int] = plan.lengths.tolist()
        """Tokens of each pack, where XTuner's samplers look for them."""

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack must be in [0, {len(self)}), got {index}")
        rows = self._pairs[self._plan[index % len(self)].documents.tolist()]
        pack = {"input_ids": [], "labels": [], "cumulative_len": [0], "position_ids": []}
        for prompt, *answers in zip(*(rows[f"{part}_ids"] for part in PARTS)):
            for rank, answer in enumerate(answers):
                if self._reward_token_id is None:
                    input_ids, labels = prompt + answer, [IGNORE_INDEX] * len(prompt) + answer
                else:
                    input_ids = [*prompt, *answer, self._reward_token_id]
                    labels = [IGNORE_INDEX] * (len(input_ids) - 1) + [rank]
                pack["input_ids"] += input_ids
                pack["labels"] += labels
                pack["position_ids"] += range(len(input_ids))
                pack["cumulative_len"].append(len(pack["input_ids"]))
        return pack


def process_preference_dataset(
    dataset: Any,
    tokenizer: Any,
    max_length: int,
    dataset_map_fn: Callable | str | None = None,
    is_dpo: bool = True,
    is_reward: bool = False,
    reward_token_id: int = -1,
    num_proc: int | None = None,
    use_varlen_attn: bool = True,
    max_packed_length: int = 16384,
    shuffle_before_pack: bool = True,
    *,
    prompt_template: Mapping | None = None,
    too_long: Literal["error", "drop"] = "error",
    seed: int = 0,
) -> PreferencePacks:
    """Tokenize pairs and pack them whole, losing none of them silently.

    Takes the place of XTuner's ``build_preference_dataset`` in a config. An answer is tokenized
    apart from its prompt, as generation would go on after it, and never cut. In a distributed run
    rank 0 does the work and hands the result to the others.

    Args:
        dataset: A Hugging Face dataset of ``prompt``, ``chosen`` and ``rejected``, lists of
            messages with ``role`` and ``content``; or the config of one.
        tokenizer: A tokenizer, or the config of one.
        max_length: Tokens of a document, a prompt with an answer, at most.
        dataset_map_fn: Makes these three columns of a row.
        is_dpo: Whether labels are the answers (DPO, ORPO).
        is_reward: Whether labels mark the token that the reward is read at.
        reward_token_id: That token, appended to every document; with ``is_reward`` only.
        num_proc: Processes to tokenize with; as many as there are CPUs, 32 at most, with ``None``.
        use_varlen_attn: Must be ``True``.
        max_packed_length: Tokens of a pack. Both documents of a pair are in the same.
        shuffle_before_pack: Whether pairs are packed in random order.
        prompt_template: An entry of XTuner's ``PROMPT_TEMPLATE``, in the place of the tokenizer's
            chat template.
        too_long: What happens to pairs that do not fit; ``"drop"`` counts them in the log.
        seed: Of the random order.

    Raises:
        ValueError: An argument cannot be met, a row is no pair, or a pair is too long.
    """
    check_preference_arguments(locals())

    def build() -> PreferencePacks:
        built = BUILDER.build(tokenizer) if isinstance(tokenizer, dict) else tokenizer
        template = built.chat_template
        if prompt_template is not None:
            template = chat_template_of(prompt_template)
        if template is None:
            raise ValueError(
                "the tokenizer must have a chat template, got none; set prompt_template to that of "
                "the model's fine-tuning, PROMPT_TEMPLATE.default for example"
            )
        rows = load_rows(dataset, "train")
        if not len(rows):
            raise ValueError("the dataset must have at least one pair, got 0 rows; check its path")
        pairs = rows.map(
            TokenizePair(built, template, resolve_map_fn(dataset_map_fn)),
            with_indices=True,
            remove_columns=rows.column_names,
            num_proc=num_processes(num_proc, len(rows)),
            desc="Tokenizing pairs",
        )
        return pack_pairs(
            pairs,
            max_length,
            max_packed_length,
            reward_token_id=reward_token_id if is_reward else None,
            too_long=too_long,
            seed=seed if shuffle_before_pack else None,
        )

    return on_rank_zero(build)


def pack_pairs(
    pairs: datasets.Dataset,
    max_length: int,
    max_packed_length: int,
    *,
    reward_token_id: int | None = None,
    too_long: Literal["error", "drop"] = "error",
    seed: int | None = 0,
) -> PreferencePacks:
    """Pack tokenized pairs: the second half of :func:`process_preference_dataset`.

    Args:
        pairs: See :class:`PreferencePacks`.
        max_length: See there, as is ``too_long``.
        max_packed_length: See there.
        reward_token_id: ``None`` for labels that are the answers.
        too_long: See there.
        seed: Of the order; ``None`` keeps pairs in order.

    Raises:
        ValueError: A pair is too long, or all are.
    """
    # the numpy format of datasets 3 imports what newer releases of torchvision lack
    columns = pairs.with_format("arrow")[:]
    prompt, *answers = (
        pc.list_value_length(columns[f"{part}_ids"]).to_numpy().astype(np.int64) for part in PARTS
    )
    documents = np.stack([prompt + answer + (reward_token_id is not None) for answer in answers])
    lengths = documents.sum(axis=0)
    dropped = (documents.max(axis=0) > max_length) | (lengths > max_packed_length)
    if dropped.any() and (too_long == "error" or dropped.all()):
        row = dropped.argmax()
        raise ValueError(
            f"documents must have at most max_length={max_length} tokens and pairs "
            f"max_packed_length={max_packed_length}, got {documents[0, row]} and "
            f"{documents[1, row]} in row {row} ({dropped.sum()} of {len(pairs)} pairs are longer); "
            "raise them, or set too_long='drop' if others are left"
        )
    chosen = np.flatnonzero(~dropped)
    rng = None if seed is None else np.random.default_rng(seed)
    plan = plan_best_fit(lengths[chosen], max_packed_length, rng)
    plan = PackPlan(plan.pieces.of(Pieces.whole(chosen, lengths[chosen])), plan.offsets)
    packs = PreferencePacks(pairs, plan, reward_token_id)
    packs.packing_report = PreferenceReport(
        pairs=len(chosen),
        tokens=int(lengths[chosen].sum()),
        packs=len(packs),
        max_packed_length=max_packed_length,
        num_dropped=int(dropped.sum()),
        num_dropped_tokens=int(lengths[dropped].sum()),
    )
    print_log(str(packs.packing_report), logger="current")
    return packs


def check_preference_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of :func:`process_preference_dataset`, before anything is built.

    Args:
        arguments: By name, as a config has them.

    Raises:
        ValueError: One is unknown, missing, or cannot be met.
    """
    signature = inspect.signature(process_preference_dataset)
    try:
        call = signature.bind(**arguments)
    except TypeError as error:
        # "got an unexpected keyword argument" or "missing a required argument"
        said = str(error).removeprefix("got ")
        raise ValueError(
            f"process_preference_dataset must be given the arguments that it has, got {said}; "
            f"they are {', '.join(signature.parameters)}"
        ) from None
    call.apply_defaults()
    values = call.arguments
    for name in ("max_length", "max_packed_length"):
        if not isinstance(values[name], Integral) or values[name] < 2:
            raise ValueError(f"{name} must be an integer of at least 2, got {values[name]!r}")
    if values["too_long"] not in ("error", "drop"):
        raise ValueError(
            f"too_long must be 'error' or 'drop', got {values['too_long']!r}; half a pair teaches "
            "nothing, so none is cut"
        )
    if values["use_varlen_attn"] is not True:
        raise ValueError(
            f"use_varlen_attn must be True to pack pairs, got {values['use_varlen_attn']!r}; use "
            "xtuner.dataset.preference_dataset.build_preference_dataset for padded ones"
        )
    template = values["prompt_template"]
    if template is not None and not (isinstance(template, Mapping) and "INSTRUCTION" in template):
        raise ValueError(
            f"prompt_template must be an entry of XTuner's PROMPT_TEMPLATE, got {template!r}; "
            "write PROMPT_TEMPLATE.default for example, or None for the tokenizer's chat template"
        )
    if values["is_dpo"] == values["is_reward"]:
        raise ValueError(
            f"one of is_dpo and is_reward must be True, got {values['is_dpo']} and "
            f"{values['is_reward']}; a reward model needs is_dpo=False, is_reward=True"
        )
    if values["is_reward"] and values["reward_token_id"] < 0:
        raise ValueError(
            f"reward_token_id must be a token with is_reward, got {values['reward_token_id']}; "
            "choose one that ends no turn, such as the tokenizer's end of text"
        )
    resolve_map_fn(values["dataset_map_fn"])


def preference_packed_collate_fn(
    instances: Sequence[dict],
    pad_index: int = DEFAULT_PAD_TOKEN_INDEX,
    return_hf_format: bool = False,
) -> dict:
    """Turn a pack of pairs into what ``PackedLayoutHook`` and the model take.

    Args:
        instances: A single pack, from ``process_preference_dataset``.
        pad_index: Token that would fill up a batch; a pack is never filled up.
        return_hf_format: Whether to return the inner dict alone.

    Returns:
        As :func:`~xtuner_mamba.dataset.packed_collate_fn`; data has ``num_pairs`` too, a Python
        int, over which the loss of an optimizer step is the mean.

    Raises:
        ValueError: It is no whole pack, or one of single documents.
    """
    data = packed_collate_fn(instances, pad_index, return_hf_format=True)
    num_documents = len(data["cumulative_len"][0]) - 1
    if num_documents % 2:
        raise ValueError(
            f"a pack of pairs must hold an even number of documents, got {num_documents}; build "
            "the dataset with process_preference_dataset"
        )
    data["num_pairs"] = num_documents // 2
    return data if return_hf_format else {"data": data, "data_samples": None}
