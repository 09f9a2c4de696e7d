"""Chunks that go on: every token once, each document on one row, the same on every replay."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from xtuner_mamba.dataset import (
    CarriedChunkBatchSampler,
    carried_collate_fn,
    process_chunk_dataset,
)
from xtuner_mamba.dataset.carried_chunks import (
    check_carried_arguments,
    check_chunk_arguments,
    share_documents,
)

LENGTHS = [23, 1, 4, 8, 2, 9, 16, 3]


def make(lengths=LENGTHS, max_length=4, num_rows=2, **options):
    options = dict(seed=3, tokens_per_batch=num_rows * max_length) | options
    return CarriedChunkBatchSampler(lengths, max_length, **options)


def rows_of(sampler, epoch=0):
    """The chunks of each row, in the order of the steps."""
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    return list(zip(*batches, strict=True))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=6, max_size=40),
    num_replicas=st.integers(1, 3),
    max_length=st.integers(1, 9),
    epoch=st.integers(0, 2),
)
def test_every_row_reads_its_documents_through(lengths, num_replicas, max_length, epoch):
    loads = np.bincount(share_documents(np.array(lengths), 2 * num_replicas), lengths)
    assume(loads.min() * max_length >= loads.max())
    seen = np.zeros(len(lengths), dtype=int)
    steps = set()
    for rank in range(num_replicas):
        sampler = make(lengths, max_length, num_replicas=num_replicas, rank=rank)
        for row in rows_of(sampler, epoch):
            steps.add(len(row))
            assert [(chunk.epoch, chunk.step) for chunk in row] == [
                (epoch, step) for step in range(len(row))
            ]
            assert all(sum(chunk.lengths) <= max_length for chunk in row)
            assert all(min(chunk.lengths) >= 1 for chunk in row)
            runs = [run for chunk in row for run in zip(*chunk[2:5])]
            before = (None, 0, 0)
            for document, start, length in runs:
                # it goes on where it was cut, or begins anew after the end of another
                if start:
                    assert (document, start) == (before[0], before[1] + before[2])
                elif before[0] is not None:
                    assert before[1] + before[2] == lengths[before[0]]
                seen[document] += length
                before = (document, start, length)
            assert before[1] + before[2] == lengths[before[0]]
    assert len(steps) == 1
    assert seen.tolist() == lengths


def test_order_is_a_function_of_the_seed_and_the_epoch():
    assert rows_of(make(), 1) == rows_of(make(), 1)
    assert rows_of(make(), 0) != rows_of(make(), 1)
    assert rows_of(make(seed=4)) != rows_of(make())
    in_order = make(shuffle=False)
    assert [row[0].documents[0] for row in rows_of(in_order)] == [0, 1]


def test_rows_share_the_tokens():
    row_of = share_documents(np.array(LENGTHS), 3)
    loads = np.bincount(row_of, LENGTHS)
    assert loads.tolist() == [23, 22, 21]


def test_a_row_has_what_is_predicted_after_it(make_rows):
    dataset = process_chunk_dataset(
        make_rows(LENGTHS), do_dataset_tokenization=False, max_length=4, shuffle_before_pack=False
    )
    rows = rows_of(make(dataset.length, shuffle=False))
    read = [dataset[chunk] for chunk in rows[0]]
    # the first row has documents 0, 3 and 4
    ids = [token for row in read for token in row["input_ids"]]
    assert ids == [*range(23), *range(3000, 3008), 4000, 4001]
    assert [row["continues"] for row in read[:6]] == [False, True, True, True, True, True]
    for row, after in pairwise(read):
        expected = after["input_ids"][0] if after["continues"] else -100
        assert row["next_label"] == expected
    assert dataset[2]["input_ids"] == list(range(2000, 2004))
    assert (dataset[2]["continues"], dataset[2]["next_label"]) == (False, -100)
    # first tokens of pieces are no targets here
    assert read[1]["labels"] == [-100, *read[1]["input_ids"][1:]]


def test_collate_tells_which_rows_go_on(make_rows):
    dataset = process_chunk_dataset(
        make_rows(LENGTHS), do_dataset_tokenization=False, max_length=4, shuffle_before_pack=False
    )
    batch = [dataset[chunk] for chunk in list(make(dataset.length, shuffle=False))[1]]
    data = carried_collate_fn(batch)["data"]
    assert data["input_ids"][0].tolist() == batch[0]["input_ids"] + batch[1]["input_ids"]
    carried = data["carried"]
    assert carried["chunk"] == (0, 1)
    assert carried["plan"]["documents"] == len(LENGTHS)
    assert sum(carried["num_pieces"]) == len(data["cumulative_len"][0]) - 1
    assert carried["continues"] == [row["continues"] for row in batch]
    assert carried["next_labels"] == [row["next_label"] for row in batch]
    assert carried_collate_fn(batch, return_hf_format=True).keys() == data.keys()
    with pytest.raises(ValueError, match=r"continues, got \['input_ids', 'labels'\]; build"):
        carried_collate_fn([dict(input_ids=[1], labels=[1])])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lengths=[5]), "each of 2 rows on 1 ranks, got 1; lower tokens_per_batch"),
        (dict(lengths=[50, 2]), "each of 13 steps, got rows of 2 to 50 tokens; some document"),
        (dict(max_length=0), "max_length must be an integer of at least 1, got 0"),
        (dict(tokens_per_batch=3), "tokens_per_batch must be an integer of at least 4, got 3"),
        (dict(shuffle="no"), "shuffle must be True or False, got 'no'"),
    ],
)
def test_what_cannot_be_met_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_arguments_are_checked_without_a_dataset():
    with pytest.raises(ValueError, match="got 'boundaries'; it has lengths, max_length"):
        check_carried_arguments(dict(boundaries=[4]))
    with pytest.raises(ValueError, match="of at least 8, got 7"):
        check_carried_arguments(dict(max_length=8, tokens_per_batch=7))
    with pytest.raises(ValueError, match=r"max_length must be an integer .* got 0"):
        check_chunk_arguments(dict(dataset=None, do_dataset_tokenization=False, max_length=0))
