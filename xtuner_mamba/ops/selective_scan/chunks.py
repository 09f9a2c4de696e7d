"""Selective scan over packed documents: long ones in chunks, short ones in runs.

Documents are what the kernels run in parallel, so a row with one long document would leave most of
a GPU idle. Such a document is cut. A first pass runs every chunk from a state of zero; what a chunk
makes of the state before it is a product,

    h[after] = h[after, from zero] + exp(A sum_t dt[t]) h[before]

so that a short second pass, chunk by chunk, knows the state before each. After that a chunk is a
document with an initial state. The backward does the same from the end, with the gradient at the
state after each chunk. Cut tokens cost one more exponential in each direction.

Where documents are very short on average, starting on one costs more than its tokens do. Neighbours
are then merged into runs: a program that prefetches walks a run as if it were one document, and is
told by a bit for every token where to start afresh.
"""

from bisect import bisect_right
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtuner_mamba.layout import derived_from, offsets_on_host
from xtuner_mamba.ops.selective_scan.triton_tile import decay, next_state
from xtuner_mamba.ops.triton_math import silu, step_size
from xtuner_mamba.ops.triton_support import cdiv, next_power_of_2

# groups of 64 channels that an H200 takes forward at once, 12 in each of 132 multiprocessors
_PARALLEL = 1584
_MIN_CHUNK, _MAX_CHUNK = 128, 1024
# tokens that a document may have before two more launches pay
_MIN_CUT = 2048
# tokens of a document on average, below which they are merged, and those of a run
_MIN_MEAN, _MAX_RUN = 16, 128
# tokens that a number of `Runs.resets` has a bit for: those of the largest tile of a kernel
_LOOK_AHEAD = 16


class Schedule(NamedTuple):
    """What runs in parallel, and in which order it starts."""

    cu_seqlens: Tensor
    """Boundaries of documents, or of chunks, int32, ``(num_parts + 1,)``."""
    order: Tensor
    """Parts, the longest first, so that none starts when all others are done, ``(num_parts,)``."""
    chunks: "Chunks | None"
    """Which parts make up a document; ``None`` if each is one."""
    runs: "Runs"
    """What a program that prefetches walks from end to end."""
    is_uneven: bool
    """The longest run still goes on when a GPU is through with the tokens of all."""


class Chunks(NamedTuple):
    """Documents in chunks, the short ones in one."""

    cu_seqlens: Tensor
    """Boundaries of the chunks, int32, ``(num_chunks + 1,)``."""
    cu_chunks: Tensor
    """First chunk of each document, and the end, int32, ``(num_seqs + 1,)``."""
    seqs: Tensor
    """Document of each chunk, int32, ``(num_chunks,)``."""

    @property
    def last(self) -> Tensor:
        """Last chunk of each document, ``(num_seqs,)``."""
        return self.cu_chunks[1:] - 1


class Runs(NamedTuple):
    """Neighbouring parts, merged if parts are very short on average; else each by itself.

    Parts of ``[2, 1, 3, 4]`` tokens, in runs of at most 4::

        cu_seqlens = [0, 3, 6, 10]      order  = [2, 0, 1]
        cu_parts   = [0, 2, 3, 4]       resets = [4, 2, 1, 0, 0, 0, 0, 0, 0, 0]
    """

    cu_seqlens: Tensor
    """Boundaries of the runs, int32, ``(num_runs + 1,)``."""
    order: Tensor
    """Runs, the longest first, ``(num_runs,)``."""
    cu_parts: Tensor | None
    """First part of each run, and the end, int32, ``(num_runs + 1,)``; ``None`` if each is one."""
    resets: Tensor | None
    """Bit i of number t: t + i begins a part, but no run, int32, ``(total,)``, or ``None``."""


def schedule_documents(cu_seqlens: Tensor, dim: int) -> Schedule:
    """Cut documents that would still run when a GPU is through with all others, and sort.

    If they are very short on average, merge neighbours too. Done on the host, once for a tensor.

    Args:
        cu_seqlens: Boundaries that ``check_cu_seqlens`` has read, int32, ``(num_seqs + 1,)``.
        dim: Channels of a row.
    """
    known = derived_from(cu_seqlens)
    if ("schedule", dim) not in known:
        known["schedule", dim] = _schedule(cu_seqlens, dim)
    order, chunks, runs, is_uneven = known["schedule", dim]
    if chunks is not None:
        cu_seqlens = chunks.cu_seqlens
    runs = runs or Runs(cu_seqlens, order, None, None)
    return Schedule(cu_seqlens, order, chunks, runs, is_uneven)


def _schedule(cu_seqlens: Tensor, dim: int) -> tuple[Tensor, Chunks | None, Runs | None, bool]:
    def on_device(numbers: list[int] | Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(numbers, dtype=dtype).to(cu_seqlens.device, non_blocking=True)

    def longest_first(boundaries: Tensor) -> Tensor:
        order = boundaries.diff().argsort(descending=True, stable=True)
        return on_device(order, torch.int64)

    offsets = offsets_on_host(cu_seqlens)
    num_blocks = cdiv(dim, 64)
    longest, size = _limits(offsets[-1], num_blocks)
    cuts, cu_chunks, seqs = [0], [0], []
    for i_seq, (start, end) in enumerate(pairwise(offsets)):
        if end - start > longest:
            cuts += range(start + size, end, size)
        cuts.append(end)
        seqs += [i_seq] * (len(cuts) - 1 - cu_chunks[-1])
        cu_chunks.append(len(cuts) - 1)
    chunks = runs = None
    if len(cuts) > len(offsets):
        chunks = Chunks(on_device(cuts), on_device(cu_chunks), on_device(seqs))
    parts, cu_parts = torch.tensor(cuts), _merge(cuts)
    # each goes through as many tokens if all are busy to the end
    fair = offsets[-1] * num_blocks / _PARALLEL
    is_uneven = parts[cu_parts].diff().max().item() > fair
    if len(cu_parts) < len(cuts):
        merged = parts[cu_parts]
        resets = on_device(_resets(parts, merged))
        runs = Runs(on_device(merged), longest_first(merged), on_device(cu_parts), resets)
    return longest_first(parts), chunks, runs, is_uneven


def _limits(total: int, num_blocks: int) -> tuple[int, int]:
    """Return the tokens of a document that stays whole, and those of a chunk of one that does not.

    A cut saves nothing where the GPU is busy all the same, and costs an exponential. A GPU takes
    the chunks of a row that is one document in waves: 4 of the forward's in Gluon take as long as
    12 of the backward's and 3 of the kernel below. They are full, with not a chunk too many.
    """
    fair = total * num_blocks / _PARALLEL
    waves = 4 * max(1, ceil(fair / (4 * _MAX_CHUNK)))
    num_chunks = max(1, waves * _PARALLEL // num_blocks)
    size = max(ceil(total / num_chunks), _MIN_CHUNK)
    return max(int(2 * fair), 2 * size, _MIN_CUT), size


def _merge(cuts: list[int]) -> list[int]:
    """Return the first part of each run, and the end; a run is short, or one part."""
    num_parts = len(cuts) - 1
    if cuts[-1] >= _MIN_MEAN * num_parts:
        return list(range(num_parts + 1))
    cu_parts = [0]
    while cu_parts[-1] < num_parts:
        first = cu_parts[-1]
        cu_parts.append(max(bisect_right(cuts, cuts[first] + _MAX_RUN) - 1, first + 1))
    return cu_parts


def _resets(parts: Tensor, runs: Tensor) -> Tensor:
    """Return for every token a bit for each one ahead that begins a part, but no run."""
    is_reset = torch.zeros(parts[-1] + _LOOK_AHEAD, dtype=torch.int32)
    is_reset[parts] = 1
    is_reset[runs] = 0
    ahead = torch.arange(_LOOK_AHEAD, dtype=torch.int32)
    return (is_reset.unfold(0, _LOOK_AHEAD, 1)[:-1] << ahead).sum(1)


@triton.jit
def _chunk_kernel(
    x, dt, A, BC, z, dt_bias, cu_seqlens, cu_chunks, seqs, states, times,
    stride_x, stride_dt, stride_z, dim,
    REVERSE: tl.constexpr, SOFTPLUS: tl.constexpr, DSTATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Run the states, or in reverse what the backward carries, through a chunk from zero.

    Leaves out the last chunk of a document, in reverse the first, which no other waits for.
    """
    num_blocks = tl.cdiv(dim, BLOCK_D)
    i_chunk = tl.program_id(0) // num_blocks
    i_seq = tl.load(seqs + i_chunk)
    if REVERSE:
        is_needed = i_chunk > tl.load(cu_chunks + i_seq)
    else:
        is_needed = i_chunk + 1 < tl.load(cu_chunks + i_seq + 1)
    if is_needed:
        start = tl.load(cu_seqlens + i_chunk).to(tl.int64)
        num_tokens = (tl.load(cu_seqlens + i_chunk + 1) - start).to(tl.int32)
        o_n = tl.arange(0, BLOCK_N)
        o_d = tl.program_id(0) % num_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
        m_n, m_d = o_n < DSTATE, o_d < dim
        m_h = m_n[:, None] & m_d[None, :]
        # the hint hides that rows are aligned: wider accesses would part a channel's states
        o_h = tl.multiple_of(o_n[:, None] * dim + o_d[None, :], (1, VECTOR))
        b_A = tl.load(A + o_h, mask=m_h, other=0.0)
        b_bias = tl.zeros((BLOCK_D,), dtype=tl.float32)
        if dt_bias is not None:
            b_bias = tl.load(dt_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_h = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
        b_time = tl.zeros((BLOCK_D,), dtype=tl.float32)
        p_x, p_dt = x + start * stride_x + o_d, dt + start * stride_dt + o_d
        p_B = BC + start * 2 * DSTATE + o_n
        if z is not None:
            p_z = z + start * stride_z + o_d
        for i in tl.range(0, num_tokens, num_stages=NUM_STAGES):
            i_t = i
            if REVERSE:
                i_t = num_tokens - 1 - i
            b_x = tl.load(p_x + i_t * stride_x, mask=m_d, other=0.0).to(tl.float32)
            b_dt = tl.load(p_dt + i_t * stride_dt, mask=m_d, other=0.0).to(tl.float32)
            b_dt, _ = step_size(b_dt + b_bias, SOFTPLUS)
            if REVERSE:
                # x is dy, the gradient at the gated output
                if z is not None:
                    b_z = tl.load(p_z + i_t * stride_z, mask=m_d, other=0.0).to(tl.float32)
                    b_x *= silu(b_z)
                b_C = tl.load(p_B + i_t * 2 * DSTATE + DSTATE, mask=m_n, other=0.0)
                b_h = decay(b_A, b_dt) * (b_h + b_C[:, None] * b_x[None, :])
            else:
                b_B = tl.load(p_B + i_t * 2 * DSTATE, mask=m_n, other=0.0)
                b_h = next_state(b_h, b_A, b_dt, b_x, b_B)
            b_time += b_dt
        tl.store(states + i_chunk.to(tl.int64) * DSTATE * dim + o_h, b_h, mask=m_h)
        tl.store(times + i_chunk.to(tl.int64) * dim + o_d, b_time, mask=m_d)


@triton.jit
def _carry_kernel(
    states, times, A, ends, cu_chunks, carried, dim,
    REVERSE: tl.constexpr, DSTATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Carry a document's initial state, or in reverse its dfinal_states, from chunk to chunk."""
    num_blocks = tl.cdiv(dim, BLOCK_D)
    i_seq = (tl.program_id(0) // num_blocks).to(tl.int64)
    first = tl.load(cu_chunks + i_seq).to(tl.int64)
    num_chunks = (tl.load(cu_chunks + i_seq + 1) - first).to(tl.int32)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.program_id(0) % num_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < dim
    m_h = (o_n < DSTATE)[:, None] & m_d[None, :]
    o_h = o_n[:, None] * dim + o_d[None, :]
    b_A = tl.load(A + o_h, mask=m_h, other=0.0)
    b_h = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    if ends is not None:
        b_h = tl.load(ends + i_seq * DSTATE * dim + o_h, mask=m_h, other=0.0).to(tl.float32)
    # a document has up to a thousand chunks, whose states are on their way three steps ahead
    for i in tl.range(0, num_chunks, num_stages=4):
        i_chunk = first + i
        if REVERSE:
            i_chunk = first + num_chunks - 1 - i
        tl.store(carried + i_chunk * DSTATE * dim + o_h, b_h, mask=m_h)
        # nothing was computed for the last one
        m_i = i + 1 < num_chunks
        b_time = tl.load(times + i_chunk * dim + o_d, mask=m_d & m_i, other=0.0)
        b_end = tl.load(states + i_chunk * DSTATE * dim + o_h, mask=m_h & m_i, other=0.0)
        b_h = b_end + decay(b_A, b_time) * b_h


def states_before_chunks(
    x: Tensor, dt: Tensor, A: Tensor, BC: Tensor, dt_bias: Tensor | None,
    initial_states: Tensor | None, chunks: Chunks, dt_softplus: bool,
) -> Tensor:  # fmt: skip
    """Return the state before each chunk, ``(num_chunks, dstate, dim)``."""
    ends = _run_chunks(x, dt, A, BC, None, dt_bias, chunks, dt_softplus, reverse=False)
    return _carry(*ends, A, initial_states, chunks, reverse=False)


def adjoints_after_chunks(
    dy: Tensor, dt: Tensor, A: Tensor, BC: Tensor, z: Tensor | None, dt_bias: Tensor | None,
    dfinal_states: Tensor | None, chunks: Chunks, dt_softplus: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient at the state after each chunk, ``(num_chunks, dstate, dim)``."""
    ends = _run_chunks(dy, dt, A, BC, z, dt_bias, chunks, dt_softplus, reverse=True)
    return _carry(*ends, A, dfinal_states, chunks, reverse=True)


def _run_chunks(x, dt, A, BC, z, dt_bias, chunks, dt_softplus, *, reverse):
    (dstate, dim), num_chunks = A.shape, len(chunks.seqs)
    states, times = A.new_empty(num_chunks, dstate, dim), A.new_empty(num_chunks, dim)
    block_n = next_power_of_2(dstate)
    # as in the forward kernel, which says why
    shape = {"VECTOR": 1, "BLOCK_D": 128}
    if x.element_size() == 2 and block_n <= 16:
        shape = {"VECTOR": 2, "BLOCK_D": 256, "maxnreg": 128}
    _chunk_kernel[(cdiv(dim, shape["BLOCK_D"]) * num_chunks,)](
        x, dt, A, BC, z, dt_bias, chunks.cu_seqlens, chunks.cu_chunks, chunks.seqs, states, times,
        x.stride(0), dt.stride(0), 0 if z is None else z.stride(0), dim,
        REVERSE=reverse, SOFTPLUS=dt_softplus, DSTATE=dstate,
        BLOCK_N=block_n, NUM_STAGES=4, num_warps=4, **shape,
    )  # fmt: skip
    return states, times


def _carry(states, times, A, ends, chunks, *, reverse):
    dstate, dim = A.shape
    carried = torch.empty_like(states)
    block_d = 64
    _carry_kernel[(cdiv(dim, block_d) * (len(chunks.cu_chunks) - 1),)](
        states, times, A, ends, chunks.cu_chunks, carried, dim,
        REVERSE=reverse, DSTATE=dstate, BLOCK_N=next_power_of_2(dstate), BLOCK_D=block_d,
        num_warps=2,
    )  # fmt: skip
    return carried
