"""packed_collate_fn: the batch that the hook takes, or a refusal that says what to do."""

import pytest
import torch
from xtuner.dataset.collate_fns import default_collate_fn

from xtuner_mamba.dataset import VarlenPacker, collate, packed_collate_fn


@pytest.fixture
def pack():
    documents = [[5, 6, 7], [8], [9, 10]]
    packs = VarlenPacker(6)({"input_ids": documents, "labels": documents})
    return {name: column[0] for name, column in packs.items()}


def test_the_batch_is_what_the_hook_takes(pack):
    batch = packed_collate_fn([pack])
    assert batch["data_samples"] is None
    data = batch["data"]
    expected = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, 10]]),
        "labels": torch.tensor([[-100, 6, 7, -100, -100, 10]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1]]),
    }
    for name, tensor in expected.items():
        torch.testing.assert_close(data.pop(name), tensor, rtol=0, atol=0)
    (cumulative_len,) = data.pop("cumulative_len")
    assert cumulative_len.dtype == torch.int32
    assert cumulative_len.tolist() == [0, 3, 4, 6]
    assert data == {"max_seqlen": 3}


def test_it_takes_the_place_of_xtuners(pack):
    theirs = default_collate_fn([pack], use_varlen_attn=True)
    assert str(packed_collate_fn([pack])) == str(theirs)
    assert str(packed_collate_fn([pack], return_hf_format=True)) == str(theirs["data"])


@pytest.mark.parametrize("count", [0, 2])
def test_only_one_pack_makes_a_batch(pack, count):
    message = f"batch_size must be 1 .*, got {count}; raise max_length .* padded_collate_fn"
    with pytest.raises(ValueError, match=message):
        packed_collate_fn([pack] * count)


@pytest.mark.parametrize("name", ["cumulative_len", "position_ids"])
def test_a_row_without_boundaries_is_refused(pack, name):
    del pack[name]
    with pytest.raises(ValueError, match=r"got \[.*'labels'.*\]; build .* process_packed_dataset"):
        packed_collate_fn([pack])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cumulative_len": [0, 3, 4, 5]}, "must end at the row's 6 tokens, got 5"),
        ({"cumulative_len": [0, 3, 3, 6]}, r"got \[0, 3, 3, 6\] at 1"),
        ({"labels": [1, 2]}, "labels must have the pack's 6 entries, got 2"),
        ({"position_ids": [0]}, "position_ids must have the pack's 6 entries, got 1"),
        ({"pixel_values": [1.0]}, r"text only, got the columns \[.*'pixel_values'"),
    ],
)
def test_what_is_no_whole_pack_of_text_is_refused(pack, changes, message):
    with pytest.raises(ValueError, match=message):
        packed_collate_fn([pack | changes])


def test_a_pack_must_divide_among_sequence_parallel_ranks(pack, monkeypatch):
    monkeypatch.setattr(collate, "get_sequence_parallel_world_size", lambda: 3)
    assert packed_collate_fn([pack])["data"]["max_seqlen"] == 3
    monkeypatch.setattr(collate, "get_sequence_parallel_world_size", lambda: 4)
    with pytest.raises(ValueError, match="divisible by the sequence parallel size 4, got 6"):
        packed_collate_fn([pack])
