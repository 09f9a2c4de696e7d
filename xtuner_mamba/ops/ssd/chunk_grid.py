"""Documents cut into chunks, none of which holds tokens of two documents."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtuner_mamba.layout import derived_from, offsets_on_host


@dataclass(frozen=True)
class ChunkGrid:
    """Where the tokens of packed documents stand when every document starts a chunk.

    For lengths ``[3, 1, 5]`` and ``chunk_size=2``, with ``-`` for a gap::

        tokens      = a b c d e f g h i
        chunks      = [a b] [c -] [d -] [e f] [g h] [i -]
        slots       = [0, 1, 2, 4, 6, 7, 8, 9, 10]
        sources     = [0, 1, 2, -1, 3, -1, 4, 5, 6, 7, 8, -1]
        cu_chunks   = [0, 2, 3, 6]
        doc_order   = [2, 0, 1]             the longest first
        chunk_order = [3, 0, 2,  4, 1,  5]  every document's first, every document's second, ...
        turns       = (3, 2, 1)             how many have a first, a second, ...
    """

    slots: Tensor
    """Place of each token among those of all chunks, int64, ``(total,)``."""
    sources: Tensor
    """Token in each place, -1 for a gap, int64, ``(chunks * chunk_size,)``."""
    cu_chunks: Tensor
    """First chunk of each document, and the end, int32, ``(num_seqs + 1,)``."""
    doc_order: Tensor
    """Documents by their count of chunks, int64, ``(num_seqs,)``."""
    chunk_order: Tensor
    """Chunks by their place in the document, then as in ``doc_order``, int64, ``(chunks,)``."""
    turns: tuple[int, ...]
    chunk_size: int

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, chunk_size: int) -> "ChunkGrid":
        """Cut the documents between these offsets, which were checked before."""
        known = derived_from(cu_seqlens)
        key = "chunk_grid", chunk_size
        if key not in known:
            known[key] = cls._from_cu_seqlens(cu_seqlens, chunk_size)
        return known[key]

    @classmethod
    def _from_cu_seqlens(cls, cu_seqlens: Tensor, chunk_size: int) -> "ChunkGrid":
        def on_device(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers).to(cu_seqlens.device, non_blocking=True)

        offsets = offsets_on_host(cu_seqlens)
        counts = [-(-(end - start) // chunk_size) for start, end in pairwise(offsets)]
        firsts = [0, *accumulate(counts)]
        docs = sorted(range(len(counts)), key=lambda doc: -counts[doc])
        order = [
            [firsts[doc] + turn for doc in docs if counts[doc] > turn]
            for turn in range(max(counts))
        ]
        cu_chunks = on_device(firsts)
        shifts = cu_chunks[:-1] * chunk_size - cu_seqlens[:-1]
        # output_size spares a GPU the wait for the sum of the lengths
        slots = shifts.repeat_interleave(cu_seqlens.diff(), output_size=offsets[-1])
        tokens = torch.arange(offsets[-1], device=slots.device)
        slots += tokens
        sources = slots.new_full((firsts[-1] * chunk_size,), -1).index_copy_(0, slots, tokens)
        return cls(
            slots=slots,
            sources=sources,
            cu_chunks=cu_chunks.int(),
            doc_order=on_device(docs),
            chunk_order=on_device([chunk for turn in order for chunk in turn]),
            turns=tuple(map(len, order)),
            chunk_size=chunk_size,
        )

    def scatter(self, tokens: Tensor) -> Tensor:
        """Lay tokens into chunks, ``(total, ...)`` to ``(chunks, chunk_size, ...)``; gaps are 0."""
        shape = len(self.chunk_order), self.chunk_size
        chunks = tokens.new_zeros(shape[0] * shape[1], *tokens.shape[1:])
        return chunks.index_copy_(0, self.slots, tokens).unflatten(0, shape)

    def gather(self, chunks: Tensor) -> Tensor:
        """Take the tokens out again, ``(chunks, chunk_size, ...)`` to ``(total, ...)``."""
        return _Gather.apply(chunks, self)

    def pass_states(
        self, decays: Tensor, added: Tensor, initial_states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Hand the states of each document from chunk to chunk, all documents side by side.

        Args:
            decays: What is left of a state after a chunk, ``(chunks, ...)``.
            added: What a chunk adds to it, ``(chunks, ...)``.
            initial_states: State before each document, ``(num_seqs, ...)``; ``None`` is zero.

        Returns:
            State before each chunk, ``(chunks, ...)``, and after each document,
            ``(num_seqs, ...)``.
        """
        if initial_states is not None:
            initial_states = initial_states.to(added.dtype)
        return _PassStates.apply(decays, added, initial_states, self)


class _Gather(torch.autograd.Function):
    """Every token is in one place, so its gradient is copied, where autograd would add to zeros."""

    @staticmethod
    def forward(ctx, chunks: Tensor, grid: ChunkGrid) -> Tensor:
        ctx.grid = grid
        return chunks.flatten(0, 1).index_select(0, grid.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx, dtokens: Tensor) -> tuple[Tensor, None]:
        return ctx.grid.scatter(dtokens), None


class _PassStates(torch.autograd.Function):
    """Keeps the states before the chunks alone, and moves each state once in a direction."""

    @staticmethod
    def forward(
        ctx, decays: Tensor, added: Tensor, initial_states: Tensor | None, grid: ChunkGrid
    ) -> tuple[Tensor, Tensor]:
        if initial_states is None:
            h = added.new_zeros(len(grid.doc_order), *added.shape[1:])
        else:
            h = initial_states.index_select(0, grid.doc_order)
        before = torch.empty_like(added)
        for chunks in grid.chunk_order.split(grid.turns):
            h_left = h[: len(chunks)]
            before.index_copy_(0, chunks, h_left)
            decay, new = (t.index_select(0, chunks) for t in (decays, added))
            torch.addcmul(new, decay, h_left, out=h_left)
        ctx.grid, ctx.has_initial_states = grid, initial_states is not None
        ctx.save_for_backward(decays, before)
        return before, h.index_select(0, grid.doc_order.argsort())

    @staticmethod
    @once_differentiable
    def backward(ctx, dbefore: Tensor, dafter: Tensor) -> tuple[Tensor | None, ...]:
        grid, (decays, before) = ctx.grid, ctx.saved_tensors
        dh = dafter.index_select(0, grid.doc_order)
        ddecays, dadded = torch.empty_like(decays), torch.empty_like(before)
        for chunks in reversed(grid.chunk_order.split(grid.turns)):
            dh_left = dh[: len(chunks)]
            dadded.index_copy_(0, chunks, dh_left)
            decay, h, dh_before = (t.index_select(0, chunks) for t in (decays, before, dbefore))
            ddecays.index_copy_(0, chunks, (dh_left * h).sum_to_size(decay.shape))
            torch.addcmul(dh_before, decay, dh_left, out=dh_left)
        if not ctx.has_initial_states:
            return ddecays, dadded, None, None
        return ddecays, dadded, dh.index_select(0, grid.doc_order.argsort()), None


def chunk_size_for(cu_seqlens: Tensor, smallest: int, largest: int) -> int:
    """Choose a power of 2 that leaves few gaps: at most a quarter of the mean length.

    Args:
        cu_seqlens: Offsets that were checked before.
        smallest: Bound of the choice, a power of 2, as is ``largest``.
        largest: See there.
    """
    offsets = offsets_on_host(cu_seqlens)
    quarter = offsets[-1] // (4 * (len(offsets) - 1))
    return min(max(1 << quarter.bit_length() - 1 if quarter else 1, smallest), largest)
