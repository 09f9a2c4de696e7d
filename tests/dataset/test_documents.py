"""TokenizedDocuments: what packing must know of the labels, against a reading of all of them."""

import datasets
import numpy as np
import pytest
from datasets import Dataset, Features, LargeList, List, Value
from hypothesis import given
from hypothesis import strategies as st

from xtuner_mamba.dataset.documents import TokenizedDocuments
from xtuner_mamba.dataset.plan import Pieces, plan_wrap

# mostly masked, so that packs without a target are common
LABELS = st.lists(st.sampled_from([-100, -100, -100, 5]), max_size=25)


@given(
    labels=st.lists(LABELS, min_size=1, max_size=6).filter(any),
    max_length=st.integers(1, 8),
    seed=st.integers(0, 3),
)
def test_packs_with_a_target_are_told_exactly(make_documents, labels, max_length, seed):
    documents = make_documents([len(row) for row in labels], labels)
    assert documents.lengths.tolist() == [len(row) for row in labels]
    assert documents.has_label.tolist() == [5 in row for row in labels]

    chosen = np.flatnonzero(documents.lengths)
    whole = Pieces.whole(chosen, documents.lengths[chosen])
    plan = plan_wrap(whole.lengths, max_length, np.random.default_rng(seed))
    plan = type(plan)(plan.pieces.of(whole), plan.offsets)
    expected = [
        any(
            5 in labels[d][start + 1 : start + n]
            for d, start, n in zip(plan[p].documents, plan[p].starts, plan[p].lengths)
        )
        for p in range(len(plan))
    ]
    assert documents.packs_with_target(plan).tolist() == expected


def test_labels_are_read_only_where_the_outline_cannot_tell(make_documents, monkeypatch):
    reads = []
    read = TokenizedDocuments.read
    monkeypatch.setattr(
        TokenizedDocuments, "read", lambda self, pieces: reads.append(1) or read(self, pieces)
    )
    masked = [-100] * 10
    for labels, expected, num_reads in (
        ([[5] * 30], [True] * 3, 0),
        ([[5] * 12 + masked + [5] * 8], [True, True, True], 1),
        ([[5] * 10 + masked + [5] * 10], [True, False, True], 1),
    ):
        documents = make_documents([30], labels)
        reads.clear()
        plan = plan_wrap(documents.lengths, 10)
        assert documents.packs_with_target(plan).tolist() == expected
        assert len(reads) == num_reads


def test_pieces_are_read_from_any_table(tmp_path, make_rows):
    rows = make_rows([4, 2, 3])
    rows.save_to_disk(tmp_path / "rows")
    pieces = Pieces(np.array([2, 0, 1]), np.array([0, 1, 1]), np.array([3, 2, 1]))
    # in memory, on disk, and behind a selection that left the file as it was
    on_disk = Dataset.load_from_disk(tmp_path / "rows")
    reversed_rows = on_disk.select([2, 1, 0]).select([2, 1, 0])
    for table in (rows, on_disk, reversed_rows):
        input_ids, labels = TokenizedDocuments(table).read(pieces)
        assert input_ids.tolist() == labels.tolist() == [2000, 2001, 2002, 1, 2, 1001]


@pytest.mark.parametrize(
    "kind", [List(Value("int32")), LargeList(Value("int64")), List(Value("uint16"), length=2)]
)
def test_any_kind_of_list_is_read(kind):
    columns = {"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [-100, 4]]}
    features = Features(input_ids=kind, labels=List(Value("int64")))
    documents = TokenizedDocuments(Dataset.from_dict(columns, features=features))
    input_ids, labels = documents.read(Pieces.whole(np.array([1, 0]), documents.lengths))
    assert input_ids.tolist() == [3, 4, 1, 2]
    assert labels.tolist() == [-100, 4, 1, 2]


def test_more_rows_than_are_measured_at_a_time(make_documents):
    lengths = np.arange(2500) % 7
    assert make_documents(lengths.tolist()).lengths.tolist() == lengths.tolist()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[1]], "text": ["a"]}, r"got \['input_ids', 'text'\]; rename"),
        (
            {"input_ids": ["a b"], "labels": [[1]]},
            "input_ids must be lists of integers, got string",
        ),
        ({"input_ids": [[1]], "labels": [[0.5]]}, "labels must be lists .* got list<item: double>"),
        ({"input_ids": [[1], [1, 2]], "labels": [[1], [1]]}, "got 1 and 2 in row 1"),
        (
            {"input_ids": [[1], [1, 2]], "labels": [[1], None]},
            "labels must be lists of integers, got None in row 1; leave",
        ),
        (
            {"input_ids": [None, [1, 2]], "labels": [None, [1, 2]]},
            "input_ids must be lists of integers, got None in row 0; leave",
        ),
        (
            {"input_ids": [[1], [], [1, 2, None]], "labels": [[1], [], [1, 2, 3]]},
            "input_ids must be lists of integers, got None at 2 in row 2; leave",
        ),
        (
            {"input_ids": [[1, 2]], "labels": [[None, 2]]},
            "labels must be lists of integers, got None at 0 in row 0; leave",
        ),
    ],
)
def test_columns_that_cannot_be_packed_are_named(columns, message):
    with pytest.raises(ValueError, match=message):
        TokenizedDocuments(Dataset.from_dict(columns))


def test_the_row_is_counted_from_the_first_batch_on():
    rows = [[7, 8]] * 1500
    columns = {"input_ids": rows, "labels": [*rows[:1234], [7, None], *rows[1235:]]}
    with pytest.raises(ValueError, match="got None at 1 in row 1234;"):
        TokenizedDocuments(Dataset.from_dict(columns))
    columns["labels"][1234] = [7]
    with pytest.raises(ValueError, match="got 1 and 2 in row 1234;"):
        TokenizedDocuments(Dataset.from_dict(columns))


def test_labels_that_cannot_be_masked_are_refused():
    features = Features(input_ids=List(Value("uint16")), labels=List(Value("uint16")))
    columns = {"input_ids": [[1, 2]], "labels": [[1, 2]]}
    with pytest.raises(ValueError, match=r"to hold -100, got list<item: uint16>; cast") as info:
        TokenizedDocuments(Dataset.from_dict(columns, features=features))
    # what the message says to do is enough
    call = str(info.value).rpartition("cast them with ")[2]
    dataset = Dataset.from_dict(columns, features=features)
    documents = TokenizedDocuments(eval(call, {"dataset": dataset, "datasets": datasets}))
    assert documents.lengths.tolist() == [2]
