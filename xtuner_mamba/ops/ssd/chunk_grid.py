"""Documents cut into chunks, none of which holds tokens of two documents."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from xtuner_mamba.layout import offsets_on_host


@dataclass(frozen=True)
class ChunkGrid:
    """Where the tokens of packed documents stand when every document starts a chunk.

    For lengths ``[3, 1]`` and ``chunk_size=2``, with ``-`` for a gap::

        tokens = a b c d
        chunks = [a b] [c -] [d -]
        slots  = [0, 1, 2, 4]
        owners = [0, 0, 1]
        seq_idx = [0, 0, 0, 0, 1, 1]
    """

    slots: Tensor
    """Place of each token among those of all chunks, int64, ``(total,)``."""
    owners: tuple[int, ...]
    """Document of each chunk, on the host."""
    seq_idx: Tensor
    """Document of each place, gaps too, int32, ``(chunks * chunk_size,)``."""
    chunk_size: int

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, chunk_size: int) -> "ChunkGrid":
        """Cut the documents between these offsets, which were checked before."""
        offsets = offsets_on_host(cu_seqlens)
        owners = [
            i_seq
            for i_seq, (start, end) in enumerate(pairwise(offsets))
            for _ in range(start, end, chunk_size)
        ]
        lengths = cu_seqlens.diff().long()
        room = (lengths + chunk_size - 1) // chunk_size * chunk_size
        shifts = room.cumsum(0) - room - cu_seqlens[:-1]
        docs = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        # output_size spares a GPU the wait for the sum of the lengths
        slots = shifts.repeat_interleave(lengths, output_size=offsets[-1])
        slots += torch.arange(offsets[-1], device=slots.device)
        seq_idx = docs.repeat_interleave(room, output_size=len(owners) * chunk_size)
        return cls(slots, tuple(owners), seq_idx, chunk_size)

    def scatter(self, tokens: Tensor) -> Tensor:
        """Lay tokens into chunks, ``(total, ...)`` to ``(chunks, chunk_size, ...)``; gaps are 0."""
        chunks = tokens.new_zeros(len(self.owners) * self.chunk_size, *tokens.shape[1:])
        chunks.index_copy_(0, self.slots, tokens)
        return chunks.unflatten(0, (len(self.owners), self.chunk_size))

    def gather(self, chunks: Tensor) -> Tensor:
        """Take the tokens out again, ``(chunks, chunk_size, ...)`` to ``(total, ...)``."""
        return chunks.flatten(0, 1).index_select(0, self.slots)


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
