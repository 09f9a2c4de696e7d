"""Planners: every token once, no pack too long, and packs that are full and mixed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtuner_mamba.dataset.plan import PackPlan, Pieces, cut_pieces, plan_best_fit, plan_wrap

PLANNERS = [plan_best_fit, plan_wrap]
SEEDS = st.none() | st.integers(0, 5)
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=40)


def draw(seed):
    return None if seed is None else np.random.default_rng(seed)


def log_normal_lengths(count):
    """The lengths of an instruction data set: log-normal(6.2, 0.85) kept in [57, 2048]."""
    lengths = np.random.default_rng(0).lognormal(6.2, 0.85, 2 * count).astype(int)
    return lengths[(lengths >= 57) & (lengths <= 2048)][:count]


def packs_of(plan):
    """A list of (document, start, length) a pack."""
    columns = ("documents", "starts", "lengths")
    return [
        list(zip(*(getattr(plan[pack], name).tolist() for name in columns)))
        for pack in range(len(plan))
    ]


def tokens_of(pieces):
    return sorted((d, t) for d, start, n in pieces for t in range(start, start + n))


@pytest.mark.parametrize("planner", PLANNERS)
@given(lengths=LENGTHS, max_length=st.integers(12, 30), seed=SEEDS)
def test_every_token_is_in_one_pack_and_no_pack_is_too_long(planner, lengths, max_length, seed):
    packs = packs_of(planner(lengths, max_length, draw(seed)))
    pieces = [piece for pack in packs for piece in pack]
    assert tokens_of(pieces) == [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    assert all(1 <= sum(n for _, _, n in pack) <= max_length for pack in packs)


@given(lengths=LENGTHS, max_length=st.integers(1, 30), seed=SEEDS)
def test_wrap_fills_every_pack_but_the_last(lengths, max_length, seed):
    plan = plan_wrap(lengths, max_length, draw(seed))
    full, rest = divmod(sum(lengths), max_length)
    assert plan.lengths.tolist() == [max_length] * full + [rest] * (rest > 0)


@given(lengths=LENGTHS, max_length=st.integers(1, 30))
def test_wrap_without_a_draw_keeps_the_order(lengths, max_length):
    packs = packs_of(plan_wrap(lengths, max_length))
    tokens = [(d, t) for pack in packs for d, start, n in pack for t in range(start, start + n)]
    assert tokens == tokens_of([(d, 0, n) for d, n in enumerate(lengths)])


@given(lengths=LENGTHS, max_length=st.integers(12, 30), seed=SEEDS)
def test_best_fit_splits_no_document(lengths, max_length, seed):
    packs = packs_of(plan_best_fit(lengths, max_length, draw(seed)))
    pieces = [piece for pack in packs for piece in pack]
    assert sorted(pieces) == [(d, 0, n) for d, n in enumerate(lengths)]


@given(lengths=LENGTHS, max_length=st.integers(12, 30), order=st.randoms(), seed=st.integers(0, 9))
def test_best_fit_needs_as_many_packs_in_every_draw(lengths, max_length, order, seed):
    shuffled = order.sample(lengths, len(lengths))
    first = plan_best_fit(lengths, max_length, draw(0))
    assert len(plan_best_fit(shuffled, max_length, draw(seed))) == len(first)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_draw_is_a_function_of_its_seed(planner):
    lengths = log_normal_lengths(300)
    same, again, other = (packs_of(planner(lengths, 8192, draw(seed))) for seed in (1, 1, 2))
    assert same == again
    mates, other_mates = (
        {frozenset(d for d, _, _ in pack) for pack in packs} for packs in (same, other)
    )
    assert len(mates & other_mates) < len(mates) / 10


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_best_fit_uses_99_percent_of_the_room(seed):
    lengths = log_normal_lengths(20_000)
    plan = plan_best_fit(lengths, 8192, draw(seed))
    assert lengths.sum() / (len(plan) * 8192) >= 0.99
    # closing a pack at the first document that does not fit misses the bound
    num_packs, room = 1, 8192
    for length in lengths.tolist():
        num_packs, room = (num_packs, room) if length <= room else (num_packs + 1, 8192)
        room -= length
    assert lengths.sum() / (num_packs * 8192) < 0.97


def correlation_with_pack_mates(lengths, plan):
    pack_of = np.repeat(np.arange(len(plan)), np.diff(plan.offsets))
    own = plan.pieces.lengths
    others = plan.lengths[pack_of] - own
    counts = np.diff(plan.offsets)[pack_of] - 1
    return np.corrcoef(own[counts > 0], (others / counts.clip(1))[counts > 0])[0, 1]


def test_a_drawn_pack_mixes_lengths():
    lengths = log_normal_lengths(20_000)
    drawn = plan_best_fit(lengths, 8192, draw(0))
    assert abs(correlation_with_pack_mates(lengths, drawn)) < 0.1
    assert correlation_with_pack_mates(lengths, plan_best_fit(lengths, 8192)) > 0.8
    # neither the slots of a pack nor the packs are sorted
    slots = np.concatenate([np.arange(n) / n for n in np.diff(drawn.offsets)])
    assert abs(np.corrcoef(slots, drawn.pieces.lengths)[0, 1]) < 0.1
    assert abs(np.corrcoef(np.arange(len(drawn)), np.diff(drawn.offsets))[0, 1]) < 0.1


def test_best_fit_sorts_where_a_random_order_would_waste_room():
    # two of 4 leave a pack no use for its last 2 tokens, unless a 6 came first
    lengths = [6, 4] * 500
    assert len(plan_best_fit(lengths, 10)) == 500
    assert len(plan_best_fit(lengths, 10, draw(0))) <= 501


def test_drawn_packs_come_in_random_order():
    # only from longest to shortest do these fit 200 packs, full ones first
    lengths = [1000] * 100 + [501, 499] * 100
    drawn, longest_first = (plan_best_fit(lengths, 1000, rng) for rng in (draw(0), None))
    assert (np.diff(longest_first.offsets)[:100] == 1).all()
    assert 30 < (np.diff(drawn.offsets)[:100] == 1).sum() < 70


def test_packs_can_be_left_out():
    plan = plan_wrap([3, 4, 2], max_length=4)
    assert packs_of(plan.keep(np.array([True, False, True]))) == [
        [(0, 0, 3), (1, 0, 1)],
        [(2, 1, 1)],
    ]


def test_pieces_of_pieces_point_into_the_document():
    outer = Pieces(np.array([7, 9]), np.array([0, 4]), np.array([2, 5]))
    inner = cut_pieces(outer.lengths, max_length=3).of(outer)
    assert packs_of(PackPlan(inner, np.array([0, 3]))) == [[(7, 0, 2), (9, 4, 3), (9, 7, 2)]]


@pytest.mark.parametrize("planner", PLANNERS)
def test_documents_without_tokens_are_refused(planner):
    with pytest.raises(ValueError, match=r"lengths must be at least 1, got 0 at 2"):
        planner([3, 1, 0], 4)
    with pytest.raises(ValueError, match=r"lengths must not be empty, got \[\]"):
        planner([], 4)


def test_best_fit_refuses_a_document_longer_than_a_pack():
    with pytest.raises(ValueError, match=r"at most max_length=4 tokens, got 9 in document 1"):
        plan_best_fit([3, 9], 4)
