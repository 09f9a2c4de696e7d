"""PackedDataset: what packs hold, epoch by epoch, and the numbers reported about them."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xtuner.engine.hooks import DatasetInfoHook

from xtuner_mamba.dataset.packed_dataset import PackedDataset, pack_documents
from xtuner_mamba.dataset.plan import Pieces, plan_wrap

PACKINGS = ["best_fit", "wrap"]


def tokens_of(packs):
    return sorted(t for pack in packs for t in pack["input_ids"])


def check_pack(pack, max_length):
    """Boundaries, positions and masked first tokens, from the token ids alone."""
    tokens = pack["input_ids"]
    assert 1 <= len(tokens) <= max_length
    starts = [at for at, t in enumerate(tokens) if at == 0 or t != tokens[at - 1] + 1]
    assert pack["cumulative_len"] == [*starts, len(tokens)]
    assert pack["labels"] == [-100 if at in starts else t for at, t in enumerate(tokens)]
    begins = np.maximum.accumulate([at if at in starts else 0 for at in range(len(tokens))])
    assert pack["position_ids"] == (np.arange(len(tokens)) - begins).tolist()


@pytest.mark.parametrize("packing", PACKINGS)
@given(lengths=st.lists(st.integers(1, 30), max_size=25), seed=st.integers(0, 3))
def test_packs_hold_every_token_once(make_documents, packing, lengths, seed):
    lengths = [*lengths, 4]
    documents = make_documents(lengths)
    packs = pack_documents(documents, 12, packing=packing, seed=seed)
    for pack in packs:
        check_pack(pack, 12)
    report = packs.packing_report
    tokens = {1000 * i + t for i, n in enumerate(lengths) for t in range(n)}
    packed = tokens_of(packs)
    assert len(set(packed)) == len(packed)
    assert set(packed) <= tokens
    # a pack of pieces of one token has no target: nothing else may be missing
    assert len(tokens) - len(packed) == report.num_masked_tokens
    num_single = sum(n % 12 == 1 for n in lengths)
    assert report.num_masked_tokens <= num_single + 2 * report.num_masked_packs


LABELS = st.lists(st.sampled_from([-100, -100, 5]), min_size=1, max_size=20)


@pytest.mark.parametrize("packing", PACKINGS)
@given(
    labels=st.lists(LABELS, max_size=12),
    too_long=st.sampled_from(["split", "drop"]),
)
def test_the_report_accounts_for_every_token(make_documents, packing, labels, too_long):
    # wherever this one is cut, a piece of it has a target
    labels = [*labels, [5] * 4]
    lengths = [len(row) for row in labels]
    documents = make_documents(lengths, labels)
    packs = pack_documents(documents, 7, packing=packing, too_long=too_long)
    report = packs.packing_report
    tokens = tokens_of(packs)
    assert all(any(label == 5 for label in pack["labels"]) for pack in packs)
    assert report.tokens == len(tokens)
    assert report.documents == len({t // 1000 for t in tokens})
    assert report.packs == len(packs)
    assert report.tokens + report.num_dropped_tokens + report.num_masked_tokens == sum(lengths)
    assert report.num_masked == sum(5 not in row for row in labels)
    dropped = [n for n, row in zip(lengths, labels) if n > 7 and 5 in row]
    assert report.num_dropped == (len(dropped) if too_long == "drop" else 0)
    assert report.num_dropped_tokens == (sum(dropped) if too_long == "drop" else 0)


def test_the_report_in_numbers(make_documents):
    masked = [-100] * 5
    labels = [[1] * 8, [1] * 3, masked, [1] * 20, [1] * 4]
    documents = make_documents([len(row) for row in labels], labels)
    report = pack_documents(documents, 8, too_long="drop").packing_report
    assert (report.documents, report.tokens, report.packs) == (3, 15, 2)
    assert report.utilisation == 15 / 16
    assert report.padding == 1 - 15 / 24
    assert (report.num_dropped, report.num_dropped_tokens) == (1, 20)
    assert (report.num_masked, report.num_masked_tokens) == (1, 5)
    assert str(report) == (
        "packed 3 documents of 15 tokens into 2 packs of 8, 93.75% used (padded in batches of 16: "
        "37.5% padding); 0 documents split, 1 dropped as too long (20 tokens), 1 documents and 0 "
        "packs left out for want of labels (5 tokens)"
    )
    assert pack_documents(documents, 8).packing_report.num_split == 1


def test_a_pack_without_a_target_is_left_out(make_documents):
    # wrapped every 4 tokens, the second pack holds nothing but a prompt
    labels = [[5] * 4, [-100] * 6 + [5] * 2, [5] * 3]
    documents = make_documents([4, 8, 3], labels)
    packs = pack_documents(documents, 4, packing="wrap", seed=None)
    assert [pack["input_ids"][0] for pack in packs] == [0, 1004, 2000]
    assert packs.packing_report.num_masked_packs == 1
    assert packs.packing_report.num_masked_tokens == 4
    # the document itself is kept whole where it fits
    assert pack_documents(documents, 8).packing_report.num_masked_tokens == 0


@pytest.mark.parametrize("packing", PACKINGS)
def test_packs_are_drawn_anew_by_seed_and_epoch(make_documents, packing):
    lengths = np.random.default_rng(0).integers(2, 200, 60)
    documents = make_documents(lengths)
    packs, again = (pack_documents(documents, 256, packing=packing, seed=7) for _ in range(2))
    mates = []
    for epoch in range(4):
        drawn = [packs[epoch, i] for i in range(len(packs))]
        for pack in drawn:
            check_pack(pack, 256)
        assert len(tokens_of(drawn)) == lengths.sum()
        assert tokens_of(drawn) == tokens_of(packs)
        mates.append({frozenset(t // 1000 for t in pack["input_ids"]) for pack in drawn})
        # whatever was asked for before, and in whatever order
        assert drawn == [again[epoch, i] for i in reversed(range(len(again)))][::-1]
        again.draw(99)
    assert [packs[0, i] for i in range(len(packs))] == list(packs)
    assert all(len(mates[0] & other) < len(mates[0]) / 2 for other in mates[1:])
    other_seed = pack_documents(documents, 256, packing=packing, seed=8)
    assert list(other_seed) != list(packs)


def test_a_draw_with_another_count_of_packs_is_drawn_again(make_documents):
    documents = make_documents([4] * 6)
    attempts = []

    def planner(lengths, max_length, rng):
        attempts.append(rng.integers(10**9))
        return plan_wrap(lengths, max_length if len(attempts) == 1 else num_tokens.pop(0), rng)

    def dataset():
        whole = Pieces.whole(np.arange(6), documents.lengths)
        return PackedDataset(documents, whole, planner=planner, max_length=8, seed=0)

    num_tokens = [5, 12, 8]
    packs = dataset()
    assert len(packs) == len(packs.draw(1)) == 3
    assert len(set(attempts)) == 4
    # and if none comes out right, the first draw serves again
    attempts.clear()
    num_tokens = [5] * 8 + [8]
    packs = dataset()
    assert len(packs.draw(1)) == 3
    assert attempts[-1] == attempts[0]


def test_it_is_what_xtuner_expects(make_documents):
    packs = pack_documents(make_documents([4, 3, 2, 8, 5]), 8)
    assert packs.length == [len(pack["input_ids"]) for pack in packs]
    assert isinstance(packs.length, list)
    assert packs[-1] == packs[len(packs) - 1]
    assert packs[np.int64(0)] == packs[0]
    assert all(type(value) is int for column in packs[0].values() for value in column)
    copy = pickle.loads(pickle.dumps(packs))
    assert [copy[1, i] for i in range(len(copy))] == [packs[1, i] for i in range(len(packs))]
    assert copy.packing_report == packs.packing_report
    with pytest.raises(IndexError, match=rf"pack must be in \[0, {len(packs)}\), got 9"):
        packs[9]


def test_xtuner_logs_an_example(make_documents, tokenizer):
    lines = []
    runner = SimpleNamespace(logger=SimpleNamespace(info=lines.append))
    packs = pack_documents(make_documents([4]), 8)
    DatasetInfoHook(tokenizer=dict(type=lambda: tokenizer)).log(runner, packs)
    assert lines == ["Num train samples 1", "train example:", "<unk> <bos> <eos> w0"]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([[-100] * 3, [-100] * 2], {}, "got none in 2 documents of 5 tokens"),
        ([[5, -100], [5]], {}, "got none in 1 packs of max_length=4"),
        (
            [[5] * 3, [5] * 9, [5] * 8],
            {"too_long": "error"},
            r"max_length=4 tokens, got 9 in document 1 \(2 of 3 are longer\)",
        ),
        ([[5] * 9], {"too_long": "drop"}, "max_length=4 tokens, got none of 1 with too_long"),
        ([[-100, -100, -100, -100, 5]], {"packing": "wrap"}, "none in 2 packs of max_length=4"),
    ],
)
def test_nothing_to_train_on_is_refused(make_documents, labels, options, message):
    documents = make_documents([len(row) for row in labels], labels)
    with pytest.raises(ValueError, match=message):
        pack_documents(documents, 4, **options)
