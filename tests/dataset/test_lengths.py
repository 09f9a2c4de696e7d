"""The numbers about a corpus against ones counted by hand, and the advice that they lead to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtuner_mamba.dataset import BucketBatchSampler, plan_best_fit, plan_wrap
from xtuner_mamba.dataset.length_advice import advise
from xtuner_mamba.dataset.lengths import analyse_lengths, choose_bucket_count


def mixed(count=2000):
    """Mostly short documents, few long ones."""
    rng = np.random.default_rng(0)
    return np.concatenate([rng.integers(20, 200, count), rng.integers(2000, 4000, count // 100)])


def test_a_corpus_counted_by_hand():
    report = analyse_lengths([3, 3, 10, 4], max_length=8, boundaries=[4, 8], tokens_per_batch=16)
    assert (report.documents, report.tokens, report.long_documents, report.long_tokens) == (
        4,
        20,
        1,
        10,
    )
    assert report.quantiles["min"] == report.quantiles["10 %"] == 3
    assert report.quantiles["max"] == 10

    rows = report.scheme("fixed rows")
    assert (rows.num_truncated, rows.num_lost_tokens) == (1, 2)
    assert rows.padding == pytest.approx(1 - 18 / 32)
    # cut after 8 and 16 tokens: the third document twice, but it is one document
    chunks = report.scheme("fixed chunks")
    # 20 tokens need 3 rows of 8, whatever the scheme
    assert (chunks.num_split, chunks.padding) == (1, pytest.approx(1 - 20 / 24))
    assert report.scheme("packed, wrap").padding == chunks.padding
    # pieces of 3 3 8 2 4
    assert report.scheme("powers of two").boundaries == (2, 4, 8)
    assert report.scheme("powers of two").padding == pytest.approx(1 - 20 / (2 + 3 * 4 + 8))
    assert report.scheme("your buckets").padding == pytest.approx(1 - 20 / (4 * 4 + 8))
    assert report.scheme("optimal buckets, 1").padding == pytest.approx(1 - 20 / 40)
    assert report.scheme("optimal buckets, 4").padding == 0
    assert report.scheme("packed, best fit").padding == pytest.approx(1 - 20 / 24)
    assert report.unused_but_last == 0
    assert report.scheme("packed, best fit").num_split == 1
    # two batches of 4 and 8 led by 8 8 and 4: as few as there can be
    assert report.scheme("rolling window").padding == pytest.approx(1 - 20 / (8 * 2 + 3 * 3))
    short, long = report.buckets
    assert (short.boundary, short.documents, short.batch_size) == (4, 4, 4)
    assert (short.padding, short.natural) == (pytest.approx(1 / 4), pytest.approx(12 / 20))
    assert (short.best_split, long.best_split) == (3, None)
    assert (long.boundary, long.documents, long.batch_size, long.padding) == (8, 1, 2, 0)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), max_length=st.integers(2, 60))
def test_counts_are_those_of_the_planners(lengths, max_length):
    report = analyse_lengths(lengths, max_length)
    assert sum(report.bin_documents) == len(lengths)
    assert sum(report.bin_tokens) == sum(lengths)
    assert report.bin_edges[0] == min(lengths)
    assert report.bin_edges[-1] > max(lengths)
    wrapped = plan_wrap(lengths, max_length)
    pieces_of = np.bincount(wrapped.pieces.documents, minlength=len(lengths))
    assert report.scheme("packed, wrap").num_split == (pieces_of > 1).sum()
    packs = len(plan_best_fit(report_pieces(lengths, max_length), max_length))
    unused = 1 - sum(lengths) / (packs * max_length)
    assert report.scheme("packed, best fit").padding == pytest.approx(unused)
    assert report.unused_but_last == 1 - -(-sum(lengths) // max_length) / packs
    for share in ("natural", "sqrt_tokens"):
        assert sum(getattr(bucket, share) for bucket in report.buckets) == pytest.approx(1)


def report_pieces(lengths, max_length):
    """Documents, cut every ``max_length`` tokens."""
    return [
        min(max_length, length - start)
        for length in lengths
        for start in range(0, length, max_length)
    ]


@pytest.mark.parametrize("sampling", ["natural", "sqrt_tokens"])
def test_shares_of_tokens_are_what_the_sampler_draws(sampling):
    lengths, boundaries = mixed(20_000), [64, 128, 256, 4096]
    sampler = BucketBatchSampler(lengths, boundaries, 16_000, seed=0, sampling=sampling)
    drawn = np.zeros(len(boundaries))
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for batch in sampler:
            drawn[np.searchsorted(boundaries, lengths[batch].max())] += lengths[batch].sum()
    report = analyse_lengths(lengths, 4096, boundaries=boundaries, tokens_per_batch=16_000)
    expected = [getattr(bucket, sampling) for bucket in report.buckets]
    np.testing.assert_allclose(drawn / drawn.sum(), expected, rtol=0.05)


@pytest.mark.parametrize("batch_sizes", [None, [9, 3]])
def test_shares_of_buckets_that_fill_no_batch(batch_sizes):
    draw = np.random.default_rng(0)
    # two documents where a batch could have 250
    lengths = np.concatenate([draw.integers(30, 60, 2), draw.integers(1025, 2049, 60)])
    settings = dict(boundaries=[64, 2048], tokens_per_batch=16_000, batch_sizes=batch_sizes)
    sampler = BucketBatchSampler(lengths, **settings, seed=0, sampling="sqrt_tokens")
    drawn = np.zeros(2)
    for epoch in range(400):
        sampler.set_epoch(epoch)
        for batch in sampler:
            drawn[int(lengths[batch[0]] > 64)] += lengths[batch].sum()
    report = analyse_lengths(lengths, 2048, **settings)
    assert [bucket.batch_size for bucket in report.buckets] == (batch_sizes or [250, 7])
    shares = [bucket.sqrt_tokens for bucket in report.buckets]
    np.testing.assert_allclose(shares, drawn / drawn.sum(), rtol=0.05)


def test_boundaries_that_hold_not_all_are_refused():
    with pytest.raises(ValueError, match="got 8 for 9 tokens in document 1"):
        analyse_lengths([3, 9], max_length=16, boundaries=[4, 8])


def test_one_more_bucket_must_pay():
    assert choose_bucket_count([0.7, 0.4, 0.38, 0.2]) == 2
    assert choose_bucket_count([0.7, 0.6, 0.5]) == 3
    assert choose_bucket_count([0.0]) == 1


def test_packing_is_recommended_where_packs_are_full():
    advice = advise(analyse_lengths(mixed(), max_length=8192))
    assert advice.scheme == "packed"
    assert "cut no document that fits" in advice.reason
    assert "powers of two" in advice.reason
    assert not [note for note in advice.notes if "longer than max_length" in note]


def test_buckets_are_recommended_where_documents_fit_nowhere_together():
    lengths = np.random.default_rng(0).integers(600, 1000, 1000)
    advice = advise(analyse_lengths(lengths, max_length=1024))
    assert advice.scheme == "bucket"
    assert advice.boundaries[-1] == lengths.max()
    assert len(advice.boundaries) > 1
    assert "of their places unused" in advice.reason
    # with room for many they pack
    assert advise(analyse_lengths(lengths, max_length=16_384)).scheme == "packed"


def test_a_corpus_of_less_than_a_row_is_packed():
    advice = advise(analyse_lengths([3, 5, 7], max_length=8192))
    assert advice.scheme == "packed"
    assert (
        "packs leave 99.8% of their places unused (0.0% but for the last one, which nothing could "
        "fill) and cut" in advice.reason
    )
    full = advise(analyse_lengths([3, 5], max_length=8))
    assert "packs leave 0.0% of their places unused and cut" in full.reason
    # 10 tokens need 2 rows of 8, but no two of these documents share one
    report = analyse_lengths([5, 5], max_length=8)
    assert report.unused_but_last == 0
    report = analyse_lengths([5, 5, 6], max_length=8)
    assert report.unused_but_last == pytest.approx(1 / 3)
    assert report.scheme("packed, best fit").padding == pytest.approx(1 / 3)


def test_documents_cut_at_max_length_are_told():
    (note,) = advise(analyse_lengths([100, 100, 300], max_length=200)).notes
    assert "1 documents with 60.0% of the tokens are longer than max_length=200" in note
    assert "The longest has 300" in note


@pytest.mark.parametrize(
    ("too_long", "kept", "counts"),
    [
        ("split", [100, 100, 200, 100], (0, 0, 0)),
        ("error", [100, 100, 200, 100], (0, 0, 0)),
        ("truncate", [100, 100, 200], (1, 0, 100)),
        ("drop", [100, 100], (0, 1, 300)),
    ],
)
def test_long_documents_become_what_the_config_says(too_long, kept, counts):
    settings = dict(max_length=200, boundaries=[128, 200], tokens_per_batch=400)
    report = analyse_lengths([100, 100, 300], **settings, too_long=too_long)
    assert (report.documents, report.tokens, report.long_documents) == (3, 500, 1)
    whole = analyse_lengths(kept, **settings)
    assert report.buckets == whole.buckets
    names = ["your buckets", "random batches", "packed, best fit", "fixed chunks", "rolling window"]
    for scheme in map(report.scheme, names):
        assert scheme.padding == whole.scheme(scheme.name).padding
        assert (scheme.num_truncated, scheme.num_dropped, scheme.num_lost_tokens) == counts
    assert report.scheme("packed, best fit").num_split == (counts == (0, 0, 0))
    fixed = report.scheme("fixed rows")
    dropped = counts if too_long == "drop" else (1, 0, 100)
    assert (fixed.num_truncated, fixed.num_dropped, fixed.num_lost_tokens) == dropped
    fate = {"split": "cut, so", "truncate": "truncated.", "drop": "dropped.", "error": "refused."}
    (note,) = advise(report).notes
    assert f"longer than max_length=200 and are {fate[too_long]}" in note


def test_a_corpus_that_is_dropped_whole_is_refused():
    with pytest.raises(ValueError, match="too_long='drop', got 8 for 2 documents of at least 9"):
        analyse_lengths([9, 10], max_length=8, too_long="drop")


def test_a_coarse_bucket_is_told_with_the_boundary_to_add():
    lengths = np.concatenate([np.full(100, 500), np.full(100, 600), np.full(10, 1024)])
    report = analyse_lengths(lengths, 1024, boundaries=[512, 1024])
    (note,) = advise(report).notes
    assert (
        "the bucket up to 1,024 is 38% padding; the boundary that spares most in it is 600" in note
    )
    assert not advise(analyse_lengths(lengths, 1024, boundaries=[512, 600, 1024])).notes


def test_lengths_seldom_seen_are_told():
    report = analyse_lengths(mixed(), 4096, boundaries=[50, 4096], tokens_per_batch=16_000)
    notes = [note for note in advise(report).notes if "sqrt_tokens" in note]
    assert len(notes) == 1
    assert "documents of 1 to 50 tokens are " in notes[0]
