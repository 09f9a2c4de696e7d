"""Decide which documents share a pack: token counts in, packs out.

A plan knows lengths only, never tokens, and holds three integers a piece, so that planning a
million documents takes seconds and megabytes.

Names:
    document: what the user gave, a row of the tokenized dataset
    piece:    a run of tokens of one document, usually all of them
    pack:     pieces laid end to end, at most ``max_length`` tokens
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# packs that a random order may cost above the fewest found: on log-normal lengths it costs 0.2 %
_SPARE = 0.003
# how much a document's length decides when it is placed, from not at all to entirely; tried in turn
_SORTEDNESS = (0.0, 0.5, 4.0, 1e9)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of tokens: piece ``i`` is ``lengths[i]`` tokens of a document, from ``starts[i]`` on.

    Index it like an array, by position, slice or mask. Each field is int64, ``(num_pieces,)``.
    """

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def whole(cls, documents: np.ndarray, lengths: np.ndarray) -> "Pieces":
        """Make each document one piece."""
        return cls(documents, np.zeros_like(documents), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: slice | np.ndarray) -> "Pieces":
        return Pieces(self.documents[index], self.starts[index], self.lengths[index])

    def of(self, pieces: "Pieces") -> "Pieces":
        """Resolve pieces whose documents are positions in ``pieces``."""
        outer = pieces[self.documents]
        return Pieces(outer.documents, outer.starts + self.starts, self.lengths)


@dataclass(frozen=True, eq=False)
class PackPlan:
    """Pieces in the order of their packs.

    Lengths ``[3, 1, 2]``, cut every 4 tokens, make two packs::

        pieces.documents = [0, 1,  2]
        pieces.starts    = [0, 0,  0]
        pieces.lengths   = [3, 1,  2]
        offsets          = [0,     2,  3]      pack p holds pieces offsets[p] : offsets[p + 1]
    """

    pieces: Pieces
    offsets: np.ndarray
    """Int64, ``(num_packs + 1,)``."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> Pieces:
        return self.pieces[self.offsets[pack] : self.offsets[pack + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each pack, int64, ``(num_packs,)``."""
        return np.diff(np.concatenate([[0], self.pieces.lengths.cumsum()])[self.offsets])

    def keep(self, kept: np.ndarray) -> "PackPlan":
        """Leave the other packs out.

        Args:
            kept: Bool, ``(num_packs,)``.
        """
        num_pieces = np.diff(self.offsets)
        return PackPlan(self.pieces[np.repeat(kept, num_pieces)], _offsets(num_pieces[kept]))


def cut_pieces(lengths: Sequence[int], max_length: int) -> Pieces:
    """Cut documents that are longer than a pack, every ``max_length`` tokens.

    >>> pieces = cut_pieces([3, 9], max_length=4)
    >>> pieces.documents.tolist(), pieces.starts.tolist(), pieces.lengths.tolist()
    ([0, 1, 1, 1], [0, 0, 4, 8], [3, 4, 4, 1])
    """
    lengths = _check_lengths(lengths)
    num_pieces = -(-lengths // max_length)
    documents = np.repeat(np.arange(len(lengths)), num_pieces)
    first = np.cumsum(num_pieces) - num_pieces
    starts = (np.arange(len(documents)) - first[documents]) * max_length
    return Pieces(documents, starts, np.minimum(lengths[documents] - starts, max_length))


def plan_wrap(
    lengths: Sequence[int], max_length: int, rng: np.random.Generator | None = None
) -> PackPlan:
    """Lay the documents end to end and cut every ``max_length`` tokens.

    Every pack is full but the last. A document that is cut goes on in the next pack.

    >>> plan = plan_wrap([3, 4, 2], max_length=5)
    >>> [plan[pack].documents.tolist() for pack in range(len(plan))]
    [[0, 1], [1, 2]]
    >>> [plan[pack].lengths.tolist() for pack in range(len(plan))]
    [[3, 2], [2, 2]]

    Args:
        lengths: Tokens of each document.
        max_length: Tokens of a pack.
        rng: Shuffles the documents first; without it they stay in order.

    Raises:
        ValueError: There is no document, or one without tokens.
    """
    lengths = _check_lengths(lengths)
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    ends = np.cumsum(lengths[order])
    edges = np.arange(0, ends[-1], max_length)
    cuts = np.union1d(ends, edges)
    place = np.searchsorted(ends, cuts[:-1], side="right")
    documents = order[place]
    starts = cuts[:-1] - (ends[place] - lengths[documents])
    offsets = np.append(np.searchsorted(cuts, edges), len(documents))
    return PackPlan(Pieces(documents, starts, np.diff(cuts)), offsets)


def plan_best_fit(
    lengths: Sequence[int], max_length: int, rng: np.random.Generator | None = None
) -> PackPlan:
    """Put each document whole into the pack that it leaves the least room in.

    Taking the longest first needs the fewest packs, but puts long documents with long ones. With
    ``rng`` they are taken in random order where that costs 0.3 % more packs at most, in a more
    sorted one where not, and from longest to shortest at worst. The count of packs depends on
    the lengths alone, so every draw has as many.

    >>> plan = plan_best_fit([4, 3, 2, 1], max_length=5)
    >>> [plan[pack].documents.tolist() for pack in range(len(plan))]
    [[0, 3], [1, 2]]

    Args:
        lengths: Tokens of each document.
        max_length: Tokens of a pack.
        rng: Draws the packs, their order and the order inside each. Without it the packs are
            those of the longest-first order, documents in the order given.

    Raises:
        ValueError: There is no document, one without tokens, or one longer than a pack.
    """
    lengths = _check_lengths(lengths)
    longest = int(lengths.argmax())
    if lengths[longest] > max_length:
        raise ValueError(
            f"documents must have at most max_length={max_length} tokens, got {lengths[longest]} "
            f"in document {longest}; cut them with cut_pieces, or use plan_wrap"
        )
    pack_of, fewest = _best_fit(lengths, np.argsort(-lengths, kind="stable"), max_length)
    if rng is None:
        return _gather(pack_of, lengths, order=np.argsort(pack_of, kind="stable"))

    num_packs = min(int(fewest * (1 + _SPARE)), len(lengths))
    for sortedness in _SORTEDNESS:
        lateness = rng.random(len(lengths)) - sortedness * np.log2(lengths)
        pack_of, used = _best_fit(lengths, np.argsort(lateness), max_length)
        if used <= num_packs:
            break
    _halve_packs(pack_of, used, num_packs)
    pack_of = rng.permutation(num_packs)[pack_of]
    return _gather(pack_of, lengths, order=np.lexsort((rng.random(len(lengths)), pack_of)))


def _best_fit(lengths: np.ndarray, order: np.ndarray, max_length: int) -> tuple[np.ndarray, int]:
    """Return the pack of each document, int64, ``(num_documents,)``, and the count of packs."""
    shortest = int(lengths.min())
    rooms: list[int] = []
    packs_with_room: list[list[int]] = [[] for _ in range(max_length + 1)]
    placed: list[int] = []
    num_packs = 0
    for length in lengths[order].tolist():
        tightest = bisect_left(rooms, length)
        if tightest == len(rooms):
            pack, room = num_packs, max_length
            num_packs += 1
        else:
            room = rooms[tightest]
            pack = packs_with_room[room].pop()
            if not packs_with_room[room]:
                del rooms[tightest]
        placed.append(pack)
        room -= length
        if room >= shortest:
            if not packs_with_room[room]:
                insort(rooms, room)
            packs_with_room[room].append(pack)
    pack_of = np.empty(len(order), dtype=np.int64)
    pack_of[order] = placed
    return pack_of, num_packs


def _halve_packs(pack_of: np.ndarray, num_packs: int, wanted: int) -> None:
    """Cut the packs of most documents in two, in place, until there are ``wanted``."""
    while num_packs < wanted:
        counts = np.bincount(pack_of)
        members = np.argsort(pack_of, kind="stable")
        ends = counts.cumsum()
        for pack in np.argsort(-counts, kind="stable")[: wanted - num_packs]:
            if counts[pack] > 1:
                pack_of[members[ends[pack] - counts[pack] // 2 : ends[pack]]] = num_packs
                num_packs += 1


def _gather(pack_of: np.ndarray, lengths: np.ndarray, order: np.ndarray) -> PackPlan:
    return PackPlan(Pieces.whole(order, lengths[order]), _offsets(np.bincount(pack_of)))


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], counts.cumsum()])


def _check_lengths(lengths: Sequence[int]) -> np.ndarray:
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths):
        raise ValueError("lengths must not be empty, got []; is the dataset empty?")
    if lengths.min() < 1:
        raise ValueError(
            f"lengths must be at least 1, got {lengths.min()} at {lengths.argmin()}; "
            "leave documents without tokens out before planning"
        )
    return lengths
