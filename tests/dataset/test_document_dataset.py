"""process_document_dataset: the packed scheme's documents, one a row."""

import numpy as np
import pytest

from xtuner_mamba.dataset import process_document_dataset, process_packed_dataset


def process(rows, **options):
    return process_document_dataset(rows, do_dataset_tokenization=False, **options)


def test_a_row_is_a_document(make_rows):
    rows = process(make_rows([3, 9, 5]), max_length=9)
    assert rows.length == [3, 9, 5]
    assert [rows[i]["input_ids"][0] for i in range(len(rows))] == [0, 1000, 2000]
    assert rows[0] == {"input_ids": [0, 1, 2], "labels": [0, 1, 2]}
    assert rows[-1]["input_ids"] == [2000, 2001, 2002, 2003, 2004]


def test_its_rows_hold_what_packs_hold(make_rows):
    # even ones: a piece of one token would have no target
    lengths = 2 * np.random.default_rng(0).integers(1, 30, 40)
    rows = process(make_rows(lengths), max_length=32, packing="wrap", shuffle_before_pack=True)
    packs = process_packed_dataset(make_rows(lengths), do_dataset_tokenization=False, max_length=32)
    in_rows = sorted(token for i in range(len(rows)) for token in rows[i]["input_ids"])
    assert in_rows == sorted(token for pack in packs for token in pack["input_ids"])
    assert max(rows.length) == 32


def test_what_is_about_packs_has_no_say(make_rows):
    settings = dict(pack_to_max_length=False, use_varlen_attn=False, packing="wrap")
    assert process(make_rows([3, 9, 5]), max_length=9, **settings).length == [3, 9, 5]


LONG = [3, 7, 2]


@pytest.mark.parametrize(
    ("too_long", "expected"),
    [
        ("split", [[0, 1, 2], [1000, 1001, 1002], [1003, 1004, 1005], [2000, 2001]]),
        ("truncate", [[0, 1, 2], [1000, 1001, 1002], [2000, 2001]]),
        ("drop", [[0, 1, 2], [2000, 2001]]),
    ],
)
def test_documents_longer_than_a_row(make_rows, too_long, expected):
    rows = process(make_rows(LONG), max_length=3, too_long=too_long)
    # the last token of document 1 is a piece without a target
    assert [rows[i]["input_ids"] for i in range(len(rows))] == expected


def test_a_document_longer_than_a_row_can_be_an_error(make_rows):
    with pytest.raises(ValueError, match="at most max_length=3 tokens, got 7 in document 1"):
        process(make_rows(LONG), max_length=3, too_long="error")


@pytest.mark.parametrize(
    ("too_long", "line"),
    [
        (
            "truncate",
            "4 rows of at most 3 tokens, one document each; 1 documents truncated, 0 dropped as "
            "too long, 1 rows left out for want of labels; 9 tokens lost",
        ),
        (
            "split",
            # the last token of document 1, and the last document
            "5 rows of at most 3 tokens, one document each; 1 documents split into several rows, "
            "0 dropped as too long, 2 rows left out for want of labels; 6 tokens lost",
        ),
        (
            "drop",
            "3 rows of at most 3 tokens, one document each; 0 documents split into several rows, "
            "1 dropped as too long, 1 rows left out for want of labels; 12 tokens lost",
        ),
    ],
)
def test_what_became_of_the_documents_is_the_only_line_in_the_log(
    make_rows, monkeypatch, too_long, line
):
    lines = []
    for module in ("document_dataset", "process"):
        monkeypatch.setattr(
            f"xtuner_mamba.dataset.{module}.print_log", lambda line, logger: lines.append(line)
        )
    lengths = [*LONG, 3, 5]
    labels = [[1] * 3, [1] * 7, [1] * 2, [1] * 3, [-100] * 5]
    process(make_rows(lengths, labels), max_length=3, too_long=too_long)
    assert lines == [line]


def test_truncation_that_leaves_no_label_is_refused(make_rows):
    rows = make_rows([4, 5], [[-100] * 3 + [1], [-100] * 4 + [1]])
    message = "label after its first token, got none in 2 rows with too_long='truncate'; raise"
    with pytest.raises(ValueError, match=message):
        process(rows, max_length=3, too_long="truncate")


@pytest.mark.parametrize("index", [3, -4])
def test_a_row_that_there_is_not(make_rows, index):
    with pytest.raises(IndexError, match=rf"row must be in \[0, 3\), got {index}"):
        process(make_rows([3, 9, 5]), max_length=9)[index]


def test_an_unknown_rule_is_refused(make_rows):
    with pytest.raises(ValueError, match="'drop' or 'error', got 'cut'"):
        process(make_rows(LONG), max_length=3, too_long="cut")
