"""PackedLayout, the checks of boundaries, and the MessageHub they travel on."""

import pytest
import torch
from mmengine import MessageHub

from xtuner_mamba.layout import (
    IGNORE_INDEX,
    PackedLayout,
    check_cu_seqlens,
    current_layout,
    current_mean_targets,
    publish_layout,
    withdraw_layout,
)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def hub():
    yield MessageHub.get_instance("varlen_attn_args")
    withdraw_layout()


def test_the_worked_example():
    layout = PackedLayout.from_lengths([3, 1, 2])
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert layout.seq_idx.tolist() == [[0, 0, 0, 1, 2, 2]]
    assert layout.positions.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert layout.lengths == (3, 1, 2)
    assert (layout.total, layout.num_seqs, layout.max_seqlen) == (6, 3, 3)
    assert layout.cu_seqlens.dtype == layout.seq_idx.dtype == torch.int32
    assert layout.positions.dtype == torch.int64


def test_offsets_describe_what_lengths_describe():
    layout = PackedLayout.from_cu_seqlens(offsets(0, 3, 4, 6))
    assert layout.lengths == (3, 1, 2)
    assert layout.positions.tolist() == [[0, 1, 2, 0, 0, 1]]


def test_lengths_may_be_numbers_of_any_library():
    lengths = PackedLayout.from_lengths(torch.tensor([2, 5]).numpy()).lengths
    assert lengths == (2, 5)
    assert all(type(length) is int for length in lengths)


def test_targets_stay_within_documents():
    labels = torch.tensor([[10, 11, 12, 13, 14, 15]])
    targets = PackedLayout.from_lengths([3, 1, 2]).targets(labels)
    none = IGNORE_INDEX
    assert targets.tolist() == [11, 12, none, none, 15, none]
    assert labels.tolist() == [[10, 11, 12, 13, 14, 15]]


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 2], [4, -1]])
def test_documents_without_tokens_are_refused(lengths):
    message = rf"positive and not empty, got {lengths}".replace("[", r"\[")
    with pytest.raises(ValueError, match=message):
        PackedLayout.from_lengths(lengths)


@pytest.mark.parametrize(
    ("lengths", "got"),
    [
        ([2.7, 1], r"\[2.7, 1\]"),
        ([2, "3"], r"\[2, '3'\]"),
        ("23", r"\['2', '3'\]"),
        ([2, None], r"\[2, None\]"),
        (torch.tensor([2.0, 3.0]), r"\[tensor\(2.\), tensor\(3.\)\]"),
    ],
    ids=str,
)
def test_lengths_that_are_no_integers_are_refused(lengths, got):
    with pytest.raises(ValueError, match=f"lengths must be integers, got {got}; count"):
        PackedLayout.from_lengths(lengths)


def test_more_tokens_than_int32_counts_are_refused():
    most = 2**31 - 1
    assert PackedLayout.from_lengths([most - 5, 5]).cu_seqlens.tolist() == [0, most - 5, most]
    for lengths in ([most, 1], [2**70]):
        with pytest.raises(ValueError, match=f"at most {most} tokens, got {sum(lengths)}; pack"):
            PackedLayout.from_lengths(lengths)


@pytest.mark.parametrize("shape", [(1, 5), (1, 7), (2, 6), ()])
def test_labels_of_another_pack_are_refused(shape):
    labels = torch.ones(shape, dtype=torch.int64)
    got = rf"got {labels.numel()} of shape {shape}; ".replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=f"labels must have the layout's 6 tokens, {got}"):
        PackedLayout.from_lengths([3, 1, 2]).targets(labels)


def test_the_layout_does_not_change_with_the_tensor_it_was_read_from():
    cu_seqlens = offsets(0, 3, 6)
    layout = PackedLayout.from_cu_seqlens(cu_seqlens)
    cu_seqlens[1] = 1
    assert layout.cu_seqlens.tolist() == [0, 3, 6]
    assert layout.seq_idx.tolist() == [[0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([0, 3]), r"must be int32 .* got torch.int64 of shape \(2,\)"),
        (offsets(0), r"num_seqs >= 1, got torch.int32 of shape \(1,\)"),
        (offsets(0, 3)[None], r"got torch.int32 of shape \(1, 2\)"),
        (offsets(1, 3), r"start at 0 and rise strictly .* got \[1, 3\]"),
        (offsets(0, 3, 3, 6), r"got \[0, 3, 3, 6\] at 1: \[3, 3\]"),
        (offsets(0, 4, 2), r"got \[0, 4, 2\] at 1: \[4, 2\]"),
        (offsets(*range(9), 8), r"got \[0, 1, 2, 3, 4, 5, 6, 7, '...'\] at 8: \[8, 8\]"),
    ],
)
def test_offsets_that_do_not_rise_from_zero_are_refused(cu_seqlens, message):
    with pytest.raises(ValueError, match=message):
        PackedLayout.from_cu_seqlens(cu_seqlens)
    with pytest.raises(ValueError, match=message):
        check_cu_seqlens(cu_seqlens, total=6)


def test_offsets_of_another_pack_are_refused():
    with pytest.raises(ValueError, match="end at the row's 7 tokens, got 6"):
        check_cu_seqlens(offsets(0, 3, 6), total=7)
    cu_seqlens = PackedLayout.from_lengths([3, 3]).cu_seqlens
    check_cu_seqlens(cu_seqlens, total=6)
    with pytest.raises(ValueError, match="end at the row's 7 tokens, got 6"):
        check_cu_seqlens(cu_seqlens, total=7)


def test_offsets_somebody_writes_into_are_read_again():
    cu_seqlens = offsets(0, 3, 6)
    check_cu_seqlens(cu_seqlens, total=6)
    cu_seqlens[1] = 0
    with pytest.raises(ValueError, match=r"got \[0, 0, 6\] at 0: \[0, 0\]"):
        check_cu_seqlens(cu_seqlens, total=6)


def test_layouts_can_be_made_in_inference_mode():
    with torch.inference_mode():
        layout = PackedLayout.from_lengths([3, 2])
        check_cu_seqlens(layout.cu_seqlens, 5)
        with pytest.raises(ValueError, match="the row's 6 tokens, got 5"):
            check_cu_seqlens(layout.cu_seqlens, 6)


def test_covers_the_batch_it_was_packed_with():
    layout = PackedLayout.from_lengths([3, 1, 4])
    layout.check_covers(1, 8)
    layout.check_covers(2, 4)
    with pytest.raises(RuntimeError, match="batch of 1 x 9 tokens, got 3 documents with 8 tokens"):
        layout.check_covers(1, 9)
    with pytest.raises(
        RuntimeError, match=r"got none at \[2, 6\] of 4 rows x 2 tokens; pack every"
    ):
        layout.check_covers(4, 2)


def test_published_for_the_length_of_a_block(hub):
    layout = PackedLayout.from_lengths([3, 2])
    assert current_layout() is None
    with layout.published() as published:
        assert published is layout
        assert current_layout() is layout
        # what XTuner's own attention reads
        assert hub.get_info("cumulative_len_rank_0").tolist() == [0, 3, 5]
        assert hub.get_info("max_seqlen_rank_0") == 3
    assert current_layout() is None
    assert hub.get_info("max_seqlen_rank_0") is None


def test_withdrawn_after_an_exception(hub):
    with pytest.raises(KeyError), PackedLayout.from_lengths([3, 2]).published():
        raise KeyError
    assert current_layout() is None


def test_the_inner_block_gives_the_outer_layout_back(hub):
    outer, inner = PackedLayout.from_lengths([3, 2]), PackedLayout.from_lengths([4])
    mean_targets = torch.tensor(2.5)
    publish_layout(outer, mean_targets)
    with inner.published():
        assert current_layout() is inner
        assert current_mean_targets() is None
    assert current_layout() is outer
    assert current_mean_targets() is mean_targets
    assert hub.get_info("cumulative_len_rank_0") is outer.cu_seqlens


def test_xtuners_own_hook_is_enough(hub):
    hub.update_info("cumulative_len_rank_0", offsets(0, 3, 5))
    hub.update_info("max_seqlen_rank_0", 3)
    layout = current_layout()
    assert layout.lengths == (3, 2)
    # every layer of the forward asks; the offsets are read once
    assert current_layout() is layout
    # and XTuner's attention layers still find them
    assert hub.get_info("cumulative_len_rank_0").tolist() == [0, 3, 5]


def test_the_inner_block_gives_back_what_xtuners_own_hook_had_published(hub):
    hub.update_info("cumulative_len_rank_0", offsets(0, 3, 5))
    with PackedLayout.from_lengths([4]).published():
        assert current_layout().lengths == (4,)
    assert current_layout().lengths == (3, 2)
    assert hub.get_info("cumulative_len_rank_0").tolist() == [0, 3, 5]


def test_a_stale_layout_gives_way_to_xtuners_new_offsets(hub):
    publish_layout(PackedLayout.from_lengths([3, 2]), torch.tensor(2.5))
    # XTuner's hook knows nothing of our keys, and withdraws only its own
    hub.update_info("cumulative_len_rank_0", offsets(0, 4, 5))
    assert current_layout().lengths == (4, 1)
    assert current_mean_targets() is None
    hub.update_info("cumulative_len_rank_0", None)
    assert current_layout() is None


def test_a_write_that_pytorch_does_not_count_is_seen_on_the_cpu():
    cu_seqlens = offsets(0, 3, 6)
    check_cu_seqlens(cu_seqlens, total=6)
    cu_seqlens.numpy()[1] = 9
    with pytest.raises(ValueError, match=r"rise strictly .*got \[0, 9, 6\]"):
        check_cu_seqlens(cu_seqlens, total=6)
    with torch.inference_mode():
        cu_seqlens = offsets(0, 3, 6)
        check_cu_seqlens(cu_seqlens, total=6)
        cu_seqlens[1] = 9
        with pytest.raises(ValueError, match=r"rise strictly .*got \[0, 9, 6\]"):
            check_cu_seqlens(cu_seqlens, total=6)
