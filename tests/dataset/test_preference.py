"""process_preference_dataset: pairs in, packs of whole pairs out, and XTuner's columns."""

import copy
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.formatting.np_formatter import NumpyFormatter
from mmengine.config import ConfigDict
from xtuner.dataset.preference_dataset import (
    PackedDatasetWrapper,
    orpo_dpo_mix_40k_map_fn,
    tokenize,
)
from xtuner.registry import BUILDER

from xtuner_mamba.dataset import preference_packed_collate_fn, process_preference_dataset
from xtuner_mamba.dataset.preference import check_preference_arguments
from xtuner_mamba.engine.hooks.packed_layout_hook import publish_batch
from xtuner_mamba.engine.step_windows import StepWindows, TokenWindows
from xtuner_mamba.layout import PackedLayout, current_mean_targets, withdraw_layout

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ 'w190 ' if m.role == 'user' else 'w191 ' }}{{ m.content }} "
    "{{ '<eos> ' if m.role == 'assistant' }}{% endfor %}"
    "{{ 'w191 ' if add_generation_prompt }}"
)
EOS = 2


@pytest.fixture(scope="module")
def chat(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def message(role: str, first: int, count: int) -> list[dict]:
    content = " ".join(f"w{(first + i) % 180}" for i in range(count))
    return [{"role": role, "content": content}]


def make_rows(count: int = 30) -> Dataset:
    """Prompts of 1 to 9 words, answers of 1 to 13."""
    return Dataset.from_list(
        [
            {
                "prompt": message("user", i, 1 + i % 9),
                "chosen": message("assistant", 2 * i, 1 + 5 * i % 13),
                "rejected": message("assistant", 3 * i, 1 + 7 * i % 13),
            }
            for i in range(count)
        ]
    )


@pytest.fixture
def process(chat):
    def process(**options):
        arguments = dict(dataset=make_rows(), tokenizer=chat, max_length=64, num_proc=1)
        return process_preference_dataset(**arguments | dict(max_packed_length=80) | options)

    return process


def documents_of(pack) -> list[tuple[list[int], list[int]]]:
    return [
        (pack["input_ids"][start:end], pack["labels"][start:end])
        for start, end in pairwise(pack["cumulative_len"])
    ]


def pairs_of(packs) -> list:
    """Both documents of every pair, in a fixed order."""
    documents = [documents_of(pack) for pack in packs]
    return sorted(
        (of_pack[i], of_pack[i + 1]) for of_pack in documents for i in range(0, len(of_pack), 2)
    )


def as_xtuner_tokenizes(chat, is_reward=False) -> list:
    tokenized = [
        tokenize(row, chat, 10_000, is_reward=is_reward, reward_token_id=0) for row in make_rows()
    ]
    return sorted(
        tuple((pair[f"{name}_ids"], pair[f"{name}_labels"]) for name in ("chosen", "rejected"))
        for pair in tokenized
    )


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_pair_is_in_one_pack_as_xtuner_tokenizes_it(process, chat, shuffle):
    packs = process(shuffle_before_pack=shuffle)
    assert pairs_of(packs) == as_xtuner_tokenizes(chat)
    assert len(packs) < 30
    assert all(len(pack["input_ids"]) == n <= 80 for pack, n in zip(packs, packs.length))
    report = packs.packing_report
    assert (report.pairs, report.num_dropped, report.packs) == (30, 0, len(packs))
    assert report.tokens == sum(packs.length)
    assert packs[-1] == packs[len(packs) - 1]
    with pytest.raises(IndexError, match=rf"\[0, {len(packs)}\), got {len(packs)}"):
        packs[len(packs)]


def test_columns_are_those_of_xtuners_packs(process, chat):
    ours = process(shuffle_before_pack=False, max_packed_length=10_000)[0]
    pairs = [tokenize(row, chat, 10_000) for row in make_rows()]
    theirs = PackedDatasetWrapper(pairs, 10_000, shuffle_before_pack=False)[0]
    # best fit takes the longest pair first; there are more in the pack than one
    assert ours.keys() == theirs.keys()
    assert len(ours["cumulative_len"]) == len(theirs["cumulative_len"]) == 61
    for name in ("input_ids", "labels", "position_ids"):
        assert Counter(ours[name]) == Counter(theirs[name])
    positions = PackedLayout.from_lengths(np.diff(ours["cumulative_len"]).tolist()).positions
    assert ours["position_ids"] == positions[0].tolist()


def test_an_end_of_answer_is_a_target_and_a_prompt_is_none(process):
    for input_ids, labels in documents_of(process()[0]):
        num_prompt = labels.count(-100)
        assert labels == [-100] * num_prompt + input_ids[num_prompt:]
        assert input_ids[num_prompt - 1] == 191 + 3, "the prompt ends where an answer begins"
        assert labels[-1] == EOS


def test_reward_is_read_at_a_token_of_its_own(process, chat):
    packs = process(is_dpo=False, is_reward=True, reward_token_id=0)
    assert pairs_of(packs) == as_xtuner_tokenizes(chat, is_reward=True)
    for rank, (input_ids, labels) in enumerate(documents_of(packs[0])):
        assert input_ids[-2:] == [EOS, 0]
        assert labels == [-100] * (len(labels) - 1) + [rank % 2]


def test_pairs_that_do_not_fit_are_counted_and_told(process, monkeypatch):
    with pytest.raises(ValueError, match=r"max_length=12 .*, got \d+ and \d+ in row \d+ \(\d+ of"):
        process(max_length=12)
    with pytest.raises(ValueError, match=r"max_packed_length=20, got \d+ and \d+ in row"):
        process(max_packed_length=20)
    lines = []
    monkeypatch.setattr(
        "xtuner_mamba.dataset.preference.print_log", lambda line, **_: lines.append(line)
    )
    packs = process(max_length=12, too_long="drop")
    report = packs.packing_report
    assert 0 < report.num_dropped == 30 - report.pairs
    assert report.num_dropped_tokens + report.tokens == process().packing_report.tokens
    assert max(len(ids) for pack in packs for ids, _ in documents_of(pack)) == 12
    assert f"{report.num_dropped} pairs dropped as too long" in lines[0]
    with pytest.raises(ValueError, match=r"\(30 of 30 pairs are longer\); raise them"):
        process(max_length=2, too_long="drop")


def test_prompt_template_of_fine_tuning_stands_in_for_a_chat_template(process, tokenizer):
    template = dict(SYSTEM="{system}", INSTRUCTION="w190 {input} w191 ", SEP="w192")
    packs = process(tokenizer=tokenizer, prompt_template=template, shuffle_before_pack=False)
    for input_ids, labels in documents_of(packs[0]):
        assert input_ids[:2] == [1, 190 + 3]
        assert input_ids[labels.count(-100) - 1] == 191 + 3
        assert labels[-1] == EOS


def test_order_is_drawn_from_the_seed(process):
    assert process()[0] == process()[0]
    assert process()[0] != process(seed=1)[0]


def test_runs_without_the_format_that_imports_torchvision(process, monkeypatch):
    """That of datasets 3 asks it for a class that newer releases lack."""
    monkeypatch.setattr(NumpyFormatter, "__init__", lambda *_, **__: pytest.fail("is made"))
    with pytest.raises(pytest.fail.Exception):
        make_rows().with_format("numpy")["prompt"]
    assert len(process()) > 0


def test_rows_are_mapped_first(process):
    rows = make_rows().map(
        lambda row: {name: row["prompt"] + row[name] for name in ("chosen", "rejected")},
        remove_columns="prompt",
    )
    name = f"{orpo_dpo_mix_40k_map_fn.__module__}.{orpo_dpo_mix_40k_map_fn.__name__}"
    assert pairs_of(process(dataset=rows, dataset_map_fn=name)) == pairs_of(process())
    with pytest.raises(ValueError, match=r"got no prompt in row 0 with the columns \['chosen',"):
        process(dataset=rows)


def test_rows_that_are_no_pairs_are_named(process):
    name = "xtuner.dataset.preference_dataset.intel_orca_dpo_map_fn"
    with pytest.raises(ValueError, match=r"got no 'system' in row 0 with the columns \['prompt',"):
        process(dataset_map_fn=name)
    with pytest.raises(ValueError, match="at least one pair, got 0 rows"):
        process(dataset=make_rows().select([]))


@pytest.mark.parametrize(
    ("part", "message", "said"),
    [
        (
            "chosen",
            {"role": "assistant", "content": None},
            r"got .*None.* in chosen of row 2; mend",
        ),
        ("prompt", {"role": "user", "content": None}, r"got .*None.* in prompt of row 2; mend"),
        ("rejected", {"role": None, "content": "w1"}, r"got .*None.* in rejected of row 2; mend"),
        ("chosen", {"role": "user", "content": "w1"}, "chosen answer must .*, got 'user' in row 2"),
        ("rejected", {"role": "asistant", "content": "w1"}, "got 'asistant' in row 2; mend"),
    ],
)
def test_messages_that_would_be_trained_on_as_other_texts_are_named(process, part, message, said):
    rows = make_rows().to_list()
    rows[2][part] = [message]
    with pytest.raises(ValueError, match=said):
        process(dataset=Dataset.from_list(rows))


def test_texts_in_the_place_of_messages_are_named(process):
    rows = [{name: ["w1"] for name in ("prompt", "chosen", "rejected")}]
    with pytest.raises(ValueError, match="both texts, got 'w1' in prompt of row 0; mend"):
        process(dataset=Dataset.from_list(rows))


def test_answer_that_does_not_follow_its_prompt_is_refused(process, chat):
    tokenizer = copy.deepcopy(chat)
    tokenizer.chat_template = "{{ messages | length }} {{ messages[-1].content }}"
    with pytest.raises(
        ValueError, match=r"chosen answer must .*, got '2 w0' after '1 w0' in row 0"
    ):
        process(tokenizer=tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="must have a chat template, got none; set prompt_temp"):
        process(tokenizer=tokenizer)
    rows = make_rows().to_list()
    rows[3] |= {"prompt": [], "rejected": []}
    with pytest.raises(ValueError, match="got no prompt and no rejected in row 3 with"):
        process(dataset=Dataset.from_list(rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_lenght=8), "unexpected keyword argument 'max_lenght'; they are dataset, "),
        (dict(max_length="8k"), "max_length must be an integer of at least 2, got '8k'"),
        (dict(max_packed_length=1), "max_packed_length must be an integer .*, got 1"),
        (dict(too_long="split"), "too_long must be 'error' or 'drop', got 'split'; half a pair"),
        (dict(use_varlen_attn=False), "use_varlen_attn must be True to pack pairs, got False"),
        (dict(is_reward=True), "one of is_dpo and is_reward must be True, got True and True"),
        (dict(is_dpo=False, is_reward=True), "must be a token with is_reward, got -1; choose"),
        (dict(dataset_map_fn="nowhere.to_find"), "got 'nowhere.to_find'; write"),
        (dict(prompt_template="default"), "prompt_template must be .*, got 'default'; write PROM"),
        (dict(prompt_template={}), "prompt_template must be an entry of .*, got {}; write PROM"),
    ],
)
def test_argument_that_cannot_be_met_is_refused(options, message):
    arguments = dict(dataset=None, tokenizer=None, max_length=8)
    with pytest.raises(ValueError, match=message):
        check_preference_arguments(arguments | options)


def test_config_builds_it_and_a_batch_counts_its_pairs(chat, tmp_path):
    chat.save_pretrained(tmp_path)
    make_rows().to_json(tmp_path / "rows.jsonl")
    cfg = ConfigDict(
        type=process_preference_dataset,
        dataset=dict(
            type="xtuner.dataset.preference_dataset.load_jsonl_dataset",
            data_files=[str(tmp_path / "rows.jsonl")],
        ),
        tokenizer=dict(
            type="transformers.AutoTokenizer.from_pretrained",
            pretrained_model_name_or_path=str(tmp_path),
        ),
        max_length=64,
        max_packed_length=80,
        num_proc=1,
    )
    packs = BUILDER.build(cfg)
    batches = [preference_packed_collate_fn([pack]) for pack in packs]
    pairs = [(len(pack["cumulative_len"]) - 1) // 2 for pack in packs]
    assert [batch["data"]["num_pairs"] for batch in batches] == pairs
    assert batches[0]["data"]["input_ids"].shape == (1, packs.length[0])
    assert preference_packed_collate_fn([packs[0]], return_hf_format=True)["num_pairs"] == pairs[0]
    # the loss of a step is the mean over its pairs
    assert len(set(pairs)) > 1
    windows = StepWindows(iter(batches), micro_steps=len(batches), max_iters=len(batches))
    batch = next(windows)
    publish_batch(batch)
    assert current_mean_targets() == pytest.approx(np.mean(pairs))
    assert batch["data"].keys() == {"input_ids", "labels", "position_ids"}
    withdraw_layout()
    with pytest.raises(ValueError, match="tokens_per_step must count target tokens, got 512 for"):
        next(TokenWindows(iter(batches[1:]), tokens_per_step=512, epoch_length=9))


def test_pack_of_single_documents_is_refused(process):
    pack = process()[0]
    end = pack["cumulative_len"][1]
    half = {name: column[:end] for name, column in pack.items()} | {"cumulative_len": [0, end]}
    with pytest.raises(ValueError, match="even number of documents, got 1; build the dataset"):
        preference_packed_collate_fn([half])
    assert torch.tensor(half["labels"]).ne(-100).any()
