"""VarlenPacker: XTuner's packs, with nothing lost."""

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from xtuner.dataset.utils import Packer

from xtuner_mamba.dataset import VarlenPacker

COLUMNS = ["input_ids", "labels", "cumulative_len", "position_ids"]


def batches(lengths, size):
    documents = [[100 * i + t for t in range(n)] for i, n in enumerate(lengths)]
    for at in range(0, len(documents), size):
        rows = documents[at : at + size]
        yield {
            "input_ids": rows,
            "labels": [list(row) for row in rows],
            "source": ["a"] * len(rows),
        }


def run(packer, lengths, size):
    """All packs, the flushed tail included, a dict each."""
    results = [packer(batch) for batch in batches(lengths, size)]
    if isinstance(packer, VarlenPacker):
        results.append(packer.flush())
    return [dict(zip(result, row)) for result in results for row in zip(*result.values())]


@given(
    lengths=st.lists(st.integers(0, 9), max_size=20),
    chunk_size=st.integers(1, 12),
    size=st.integers(1, 7),
)
def test_nothing_is_lost_and_boundaries_are_exact(lengths, chunk_size, size):
    packs = run(VarlenPacker(chunk_size), lengths, size)
    stream = [(i, t) for i, n in enumerate(lengths) for t in range(n)]
    assert [t for pack in packs for t in pack["input_ids"]] == [100 * i + t for i, t in stream]
    full, rest = divmod(len(stream), chunk_size)
    assert [len(pack["input_ids"]) for pack in packs] == [chunk_size] * full + [rest] * (rest > 0)
    for pack in packs:
        tokens = pack["input_ids"]
        starts = [at for at, t in enumerate(tokens) if at == 0 or t // 100 != tokens[at - 1] // 100]
        assert pack["cumulative_len"] == [*starts, len(tokens)]
        assert pack["labels"] == [-100 if at in starts else t for at, t in enumerate(tokens)]
        assert pack["position_ids"] == [
            at - max(start for start in starts if start <= at) for at in range(len(tokens))
        ]


def test_xtuner_loses_the_tail_that_we_keep():
    lengths = [28] * 10
    packed = {
        kind: sum(
            len(pack["input_ids"]) for pack in run(kind(16, use_varlen_attn=True), lengths, 5)
        )
        for kind in (Packer, VarlenPacker)
    }
    assert packed == {Packer: 272, VarlenPacker: 280}


def test_full_packs_are_xtuners_but_for_the_masked_first_tokens():
    lengths = [5, 3, 8, 1, 1, 6, 20, 4]
    theirs = run(Packer(8, use_varlen_attn=True), lengths, size=8)
    ours = run(VarlenPacker(8), lengths, size=8)[: len(theirs)]
    assert theirs
    for name in ("input_ids", "cumulative_len", "position_ids"):
        assert [pack[name] for pack in ours] == [pack[name] for pack in theirs]
    assert [pack["labels"] for pack in ours] != [pack["labels"] for pack in theirs]


def on_disk(tmp_path, lengths):
    rows = next(batches(lengths, len(lengths)))
    Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    return Dataset.load_from_disk(tmp_path / "rows")


def test_it_maps_a_dataset(tmp_path):
    dataset = on_disk(tmp_path, [3, 1, 2, 5])
    # the second time too, when map() could answer from its cache without calling the packer
    for _ in range(2):
        packer = VarlenPacker(4)
        packs = dataset.map(packer, batched=True, batch_size=1, remove_columns=dataset.column_names)
        assert packs.column_names == COLUMNS
        assert packs["input_ids"][:] == [[0, 1, 2, 100], [200, 201, 300, 301]]
        assert packer.flush()["input_ids"] == [[302, 303, 304]]
        assert packer.flush() == {name: [] for name in COLUMNS}


def test_worker_processes_are_refused(tmp_path):
    dataset = on_disk(tmp_path, [3, 1])
    with pytest.raises(RuntimeError, match=r"must run in process \d+, which flushes it, got \d+"):
        dataset.map(VarlenPacker(4), batched=True, num_proc=2)


def test_the_last_pack_can_be_dropped():
    packs = run(VarlenPacker(4, drop_last=True), [3, 3], size=1)
    assert [pack["input_ids"] for pack in packs] == [[0, 1, 2, 100]]


def test_without_varlen_attention_there_are_no_boundaries():
    packs = run(VarlenPacker(4, use_varlen_attn=False), [3, 3], size=1)
    assert packs == [
        {"input_ids": [0, 1, 2, 100], "labels": [0, 1, 2, 100]},
        {"input_ids": [101, 102], "labels": [101, 102]},
    ]


def test_labels_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="got 1 and 2 in row 1 of the batch"):
        VarlenPacker(4)({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]})
