"""process_packed_dataset: XTuner's arguments in, every token out."""

import copy
import multiprocessing
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, load_dataset
from mmengine.config import ConfigDict
from xtuner.dataset import process_hf_dataset
from xtuner.dataset.map_fns import alpaca_map_fn, template_map_fn_factory
from xtuner.registry import BUILDER
from xtuner.utils import PROMPT_TEMPLATE

from xtuner_mamba.dataset import (
    PackedDataset,
    document_map_fn,
    process_packed_dataset,
)
from xtuner_mamba.dataset.process import check_arguments


def to_conversation(row):
    return {"conversation": [{"input": row["ask"], "output": row["answer"]}]}


@pytest.fixture(scope="module")
def rows():
    """Conversations of 4 to 33 tokens, BOS and EOS included."""
    words = [[f"w{(i + t) % 200}" for t in range(2 + 7 * i % 30)] for i in range(40)]
    return Dataset.from_dict(
        {
            "ask": [" ".join(w[:1]) for w in words],
            "answer": [" ".join(w[1:]) for w in words],
            "meta": [{"source": "a", "tags": ["x", "y"]}] * len(words),
        }
    )


@pytest.fixture
def process(rows, tokenizer):
    def process(**options):
        arguments = dict(
            dataset=DatasetDict(train=rows),
            tokenizer=tokenizer,
            max_length=32,
            dataset_map_fn=to_conversation,
            map_num_proc=1,
        )
        return process_packed_dataset(**arguments | options)

    return process


def count_tokens(packs):
    return Counter(t for pack in packs for t in pack["input_ids"])


@pytest.fixture(scope="module")
def all_tokens(rows, tokenizer):
    counts = Counter()
    for row in rows:
        counts.update([1, *tokenizer.encode(f"{row['ask']} {row['answer']}"), 2])
    return counts


@pytest.mark.parametrize("packing", ["best_fit", "wrap"])
def test_every_token_of_the_text_is_packed(process, all_tokens, packing):
    packs = process(packing=packing)
    assert isinstance(packs, PackedDataset)
    assert count_tokens(packs) == all_tokens
    assert packs.packing_report.tokens == sum(all_tokens.values())
    # one document is longer than a pack; the others are cut only to fill packs to the brim
    assert (packs.packing_report.num_split == 1) == (packing == "best_fit")
    for pack in packs:
        # BOS and the question are no targets, which covers each whole document's first token
        assert all(label in (-100, t) for label, t in zip(pack["labels"], pack["input_ids"]))
        assert pack["labels"].count(-100) >= len(pack["cumulative_len"]) - 1


def test_xtuners_own_loses_tokens_of_the_same_rows(rows, tokenizer, all_tokens):
    packs = process_hf_dataset(
        dataset=rows,
        tokenizer=tokenizer,
        max_length=32,
        dataset_map_fn=to_conversation,
        pack_to_max_length=True,
        use_varlen_attn=True,
        map_num_proc=1,
    )
    assert sum(count_tokens(packs).values()) < sum(all_tokens.values())


def test_the_count_of_processes_changes_nothing(process):
    one, two, three = (process(map_num_proc=n, packing="wrap") for n in (1, 2, 3))
    assert list(one) == list(two) == list(three)
    assert one.packing_report == two.packing_report == three.packing_report


def test_it_builds_from_a_config(tmp_path, tokenizer):
    data = [{"instruction": "w1 w2", "input": "", "output": f"w{i} w3 w4"} for i in range(5)]
    Dataset.from_list(data).to_json(tmp_path / "train.json")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = ConfigDict(
        type=process_packed_dataset,
        dataset=dict(
            type=load_dataset,
            path="json",
            data_files=dict(train=str(tmp_path / "train.json")),
            cache_dir=str(tmp_path / "cache"),
        ),
        tokenizer=dict(
            type=type(tokenizer).from_pretrained,
            pretrained_model_name_or_path=str(tmp_path / "tokenizer"),
        ),
        max_length=64,
        dataset_map_fn=alpaca_map_fn,
        template_map_fn=dict(type=template_map_fn_factory, template=PROMPT_TEMPLATE.default),
        remove_unused_columns=True,
        shuffle_before_pack=True,
        pack_to_max_length=True,
        use_varlen_attn=True,
    )
    packs = BUILDER.build(config)
    assert packs.packing_report.documents == 5
    targets = Counter(label for pack in packs for label in pack["labels"] if label != -100)
    # the five answers and their EOS
    assert targets == Counter([*range(3, 8), *[6, 7, 2] * 5])


def test_a_tokenized_dataset_may_have_other_columns():
    rows = Dataset.from_dict(
        {
            "tokens": [[1, 2, 3], [4, 5], [6, 7]],
            "labels": [[1, 2, 3], [4, 5], [-100, -100]],
            "source": ["a", "b", "c"],
            "nested": [{"x": [1]}, {"x": []}, {"x": [2, 3]}],
        }
    )
    packs = process_packed_dataset(
        rows,
        do_dataset_tokenization=False,
        rename_maps=[("tokens", "input_ids")],
        max_length=8,
        shuffle_before_pack=False,
    )
    assert list(packs) == [
        {
            "input_ids": [1, 2, 3, 4, 5],
            "labels": [-100, 2, 3, -100, 5],
            "cumulative_len": [0, 3, 5],
            "position_ids": [0, 1, 2, 0, 1],
        }
    ]
    assert packs.packing_report.num_masked == 1
    with pytest.raises(ValueError, match=r"got \['tokens', 'labels', 'source', 'nested'\]"):
        process_packed_dataset(rows, do_dataset_tokenization=False, max_length=8)


def test_the_seed_decides_what_is_drawn(process):
    first, again, other = (list(process(seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_without_shuffling_documents_stay_in_order(process, rows, tokenizer):
    packs = process(shuffle_before_pack=False, packing="wrap")
    text = " ".join(f"<bos> {row['ask']} {row['answer']} <eos>" for row in rows)
    assert [t for pack in packs for t in pack["input_ids"]] == tokenizer.encode(text)


def test_rows_are_sampled_by_the_seed(process, rows):
    few, again, other = (process(max_dataset_length=9, seed=seed) for seed in (0, 0, 1))
    assert few.packing_report.documents == 9
    assert list(few) == list(again)
    assert count_tokens(few) != count_tokens(other)
    assert process(max_dataset_length=999).packing_report.documents == len(rows)


def test_the_report_is_logged(process, monkeypatch):
    lines = []
    module = "xtuner_mamba.dataset.process.print_log"
    monkeypatch.setattr(module, lambda line, logger: lines.append(line))
    report = process().packing_report
    assert lines == [str(report)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": None}, "max_length must be an integer of at least 2, got None"),
        ({"max_length": 1}, "max_length must be an integer of at least 2, got 1"),
        ({"split": "test"}, "split must be 'train' or None .*, got 'test'"),
        ({"max_length": 32.0}, "max_length must be an integer of at least 2, got 32.0; it is"),
        ({"packing": "first_fit"}, "packing must be 'best_fit' or 'wrap' .*, got 'first_fit'; "),
        ({"too_long": "truncate"}, "too_long must be .* or 'error' .*, got 'truncate'; choose"),
        ({"shuffle_before_pack": "no"}, "shuffle_before_pack must be .*, got 'no'; leave it out"),
        ({"max_dataset_length": 0}, "max_dataset_length must be .* least 1, got 0; it is the"),
        ({"map_num_proc": "4"}, "map_num_proc must be an integer of at least 1, got '4'; it is"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1; it is"),
        ({"seed": None}, "seed must be an integer of at least 0, got None; it is"),
        ({"dataset_map_fn": "alpaca_map_fnn"}, "the name of one, got 'alpaca_map_fnn'; write"),
        ({"dataset_map_fn": 3}, "the name of one, got 3; write"),
        ({"template_map_fn": "alpaca"}, "a function or a config, got 'alpaca'; write"),
        ({"rename_maps": ["ab"]}, r"pairs of names, got \['ab'\]; write"),
        ({"pack_to_max_length": False}, "pack_to_max_length must be True .*, got False"),
        ({"use_varlen_attn": False}, "use_varlen_attn must be True .*, got False"),
        ({"input_ids_with_output": False}, "input_ids_with_output must be True .*, got False"),
        ({"with_image_token": True}, "with_image_token must be False .*, got True"),
        ({"tokenizer": None}, "tokenizer must be given to tokenize, got None"),
        ({"dataset_map_fn": None}, r"conversation .*, got \['ask', 'answer', 'meta'\]"),
        ({"dataset": Dataset.from_dict({"ask": []})}, "one document, got 0 of 0 rows"),
        (
            {
                "dataset_map_fn": lambda row: {"conversation": []},
                "template_map_fn": lambda row: row,
            },
            "one document, got 0 of 40 rows",
        ),
        (
            {"too_long": "error"},
            r"at most max_length=32 tokens, got 33 in document 17 \(1 of 40 are longer\)",
        ),
    ],
)
def test_arguments_that_cannot_be_met_are_refused(process, options, message):
    with pytest.raises(ValueError, match=message):
        process(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"dataset": None, "max_length": 8, "pakcing": "wrap"},
            r"got an unexpected keyword argument 'pakcing'; they are dataset, .*, packing, ",
        ),
        ({"max_length": 8}, "got missing a required argument: 'dataset'; they are dataset, "),
    ],
)
def test_arguments_that_there_are_not_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"process_packed_dataset must be given .*{message}"):
        check_arguments(arguments)


def test_arguments_that_can_be_met_pass():
    arguments = dict(dataset=None, tokenizer=dict(type="any"), max_length=8)
    check_arguments(arguments)
    check_arguments(arguments | dict(max_dataset_length=np.int64(3), seed=np.int64(7)))
    name = "xtuner.dataset.map_fns.alpaca_map_fn"
    check_arguments(arguments | dict(dataset_map_fn=name, rename_maps=[["a", "b"]]))


@pytest.fixture
def process_text(tokenizer):
    def process(rows, **options):
        arguments = dict(
            tokenizer=tokenizer, max_length=32, dataset_map_fn=document_map_fn, map_num_proc=1
        )
        return process_packed_dataset(Dataset.from_dict(rows), **arguments | options)

    return process


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"text": ["a", None]}, "the output of a turn must be a text, got None in row 1; mend"),
        ({"text": [None]}, "the output of a turn must be a text, got None in row 0; mend"),
        ({"text": [5, 6]}, "the output of a turn must be a text, got 5 in row 0; mend"),
        ({"content": ["a"]}, r"reads, got no 'text' in row 0 with the columns \['content'\]; "),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_proc", [1, 2])
def test_rows_without_a_text_are_named(process_text, rows, message, num_proc):
    template = dict(type=template_map_fn_factory, template=PROMPT_TEMPLATE.default)
    for template_map_fn in (None, template):
        with pytest.raises(ValueError, match=message):
            process_text(rows, template_map_fn=template_map_fn, map_num_proc=num_proc)


def test_texts_of_mixed_kinds_are_named(tmp_path, tokenizer):
    (tmp_path / "train.jsonl").write_text('{"text": "w1"}\n{"text": "w2"}\n{"text": 3}\n')
    source = dict(
        type=load_dataset,
        path="json",
        data_files=str(tmp_path / "train.jsonl"),
        cache_dir=str(tmp_path / "cache"),
    )
    with pytest.raises(ValueError, match="must be a text, got 3 in row 2; mend"):
        process_packed_dataset(
            source, tokenizer=tokenizer, max_length=32, dataset_map_fn=document_map_fn
        )


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ([{"input": None, "output": "a"}], "the input of a turn must be a text, got None in row 1"),
        ([{"input": "", "output": None}], "the output of a turn must be a text, got None in row 1"),
        ([None], "the input of a turn must be a text, got None in row 1"),
        (None, "a conversation must be a list of turns, got None in row 1; make it"),
    ],
    ids=str,
)
def test_turns_without_a_text_are_named(process_text, conversation, message):
    good = [{"input": "w1", "output": "w2"}]
    rows = {"talk": [good, conversation, good]}
    options = dict(dataset_map_fn=None, rename_maps=[("talk", "conversation")])
    with pytest.raises(ValueError, match=message):
        process_text(rows, **options)
    rows["talk"][1] = []
    assert process_text(rows, **options).packing_report.documents == 2


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["a"], "a conversation must be a list of turns, got 'a' in row 0; make it"),
        ([["a"]], "the input of a turn must be a text, got None in row 0; mend"),
        ([[{"input": "a"}]], "the output of a turn must be a text, got None in row 0; mend"),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_named(process_text, column, message):
    with pytest.raises(ValueError, match=message):
        process_text({"conversation": column}, dataset_map_fn=None)


def test_a_template_makes_a_text_of_any_input(process_text):
    rows = {"conversation": [[{"input": None, "output": "w1"}], [{"input": None, "output": "w2"}]]}
    template = dict(type=template_map_fn_factory, template=PROMPT_TEMPLATE.default)
    packs = process_text(rows, dataset_map_fn=None, template_map_fn=template)
    assert packs.packing_report.documents == 2


def test_the_row_is_that_of_the_dataset_and_not_of_the_sample(process_text):
    texts = ["w1"] * 2000
    texts[1700] = None
    with pytest.raises(ValueError, match="got None in row 1700;"):
        process_text({"text": texts})
    # what is sampled is an accident of the seed: the row has its own name nevertheless
    texts = ["w1"] * 30 + [None] * 30
    with pytest.raises(ValueError, match=r"got None in row (3|4|5)\d;"):
        process_text({"text": texts}, max_dataset_length=20)


def pack_on_rank(rank, store, rows, options, outcomes):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    try:
        # only rank 0 may need the dataset
        packs = process_packed_dataset(
            rows if rank == 0 else None, do_dataset_tokenization=False, **options
        )
        outcomes.put((rank, [packs[1, i] for i in range(len(packs))]))
    except Exception as error:
        outcomes.put((rank, f"{type(error).__name__}: {error}"))
    torch.distributed.destroy_process_group()


@pytest.fixture
def on_two_ranks(tmp_path, make_rows):
    def run(**options):
        context = multiprocessing.get_context("fork")
        outcomes = context.Queue()
        arguments = (tmp_path / "store", make_rows([5, 3, 4, 2]), options, outcomes)
        ranks = [context.Process(target=pack_on_rank, args=(r, *arguments)) for r in range(2)]
        for process in ranks:
            process.start()
        result = dict(outcomes.get(timeout=60) for _ in ranks)
        for process in ranks:
            process.join()
        return [result[rank] for rank in range(2)]

    return run


def test_all_ranks_have_the_packs_of_rank_zero(on_two_ranks):
    first, second = on_two_ranks(max_length=8)
    assert first == second
    assert sum(len(pack["input_ids"]) for pack in first) == 14


def test_what_fails_on_rank_zero_fails_on_all(on_two_ranks):
    first, second = on_two_ranks(max_length=4, too_long="error")
    assert first.startswith("ValueError: documents must have at most max_length=4 tokens, got 5")
    assert second == (
        f"RuntimeError: rank 0 must build the dataset for all ranks, got {first}; see its traceback"
    )


def test_a_tokenizer_without_a_bos_token_is_refused(process, tokenizer):
    without = copy.deepcopy(tokenizer)
    without.bos_token = None
    with pytest.raises(ValueError, match=r"got bos_token=None and eos_token='<eos>'"):
        process(tokenizer=without)


def test_documents_without_a_text_are_counted(tokenizer, monkeypatch):
    lines = []
    module = "xtuner_mamba.dataset.process.print_log"
    monkeypatch.setattr(module, lambda line, **_: lines.append(line))
    texts = Dataset.from_dict({"text": ["w1 w2", "", "w3", ""]})
    options = dict(
        tokenizer=tokenizer, max_length=8, dataset_map_fn=document_map_fn, map_num_proc=1
    )
    packs = process_packed_dataset(texts, **options)
    assert [line[:34] for line in lines] == [
        "2 of 4 documents have no text, onl",
        "packed 4 documents of 11 tokens in",
    ]
    # they are told of, not lost
    assert packs.packing_report.documents == 4
    lines.clear()
    process_packed_dataset(texts.select([0, 2]), **options)
    assert [line[:18] for line in lines] == ["packed 2 documents"]
