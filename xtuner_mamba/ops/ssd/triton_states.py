"""Triton kernels that hand the states of documents from chunk to chunk, within each document alone.

A program walks the chunks of one document, for one head and a block of its state. Nothing is
multiplied with 0 at a boundary, and no two programs add to the same number.

Dimensions beside those of the op:
    chunks: of all documents, in their order
    size:   headdim * dstate
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtuner_mamba.ops.ssd.chunk_grid import ChunkGrid
from xtuner_mamba.ops.triton_support import cdiv

_BLOCK = 1024


def pass_states_fwd(
    added: Tensor,
    dA_cumsum: Tensor,
    grid: ChunkGrid,
    initial_states: Tensor | None,
    dtype: torch.dtype,
    *,
    return_final_states: bool,
) -> tuple[Tensor, Tensor | None]:
    """Add up what the chunks add to the state of each document.

    Args:
        added: What each chunk adds, float32, ``(1, chunks, nheads, headdim, dstate)``.
        dA_cumsum: Logarithms of the decays, summed from the start of a chunk, float32,
            ``(1, nheads, chunks, chunk_size)``.
        grid: Which chunks are whose.
        initial_states: State before each document, ``(num_seqs, nheads, headdim, dstate)``;
            ``None`` is zero.
        dtype: Of the first result.
        return_final_states: Whether they are wanted.

    Returns:
        State before each chunk, rounded once, shaped as ``added``; and after each document,
        float32, shaped as ``initial_states``.
    """
    states = torch.empty_like(added, dtype=dtype)
    final_states = None
    if return_final_states:
        final_states = added.new_empty(len(grid.doc_order), *added.shape[2:])
    if initial_states is not None:
        initial_states = initial_states.contiguous()
    size = added[0, 0, 0].numel()
    _pass_fwd_kernel[_programs(added, grid.doc_order)](
        added, dA_cumsum, grid.doc_order, grid.cu_chunks, initial_states, states, final_states,
        *dA_cumsum.shape[2:], size, BLOCK=_BLOCK,
    )  # fmt: skip
    return states, final_states


def pass_states_bwd(
    dstates: Tensor,
    states: Tensor,
    dA_cumsum: Tensor,
    grid: ChunkGrid,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hand gradients from the end of each document to its start.

    Args:
        dstates: Gradient of the states before the chunks, float32, shaped as ``states``.
        states: These states as :func:`pass_states_fwd` rounded them, as which mamba_ssm takes them
            for the decays inside a chunk, too.
        dA_cumsum: See there, as ``grid`` and ``initial_states``.
        grid: See there.
        initial_states: See there; says whether their gradient is wanted, and in which dtype.
        dfinal_states: Gradient of the states after the documents; ``None`` is zero.
        dtype: Of the first result.

    Returns:
        Gradients of what each chunk added, shaped as ``states``; of the last sum of each chunk in
        ``dA_cumsum``, ``(1, nheads, chunks)``; and of ``initial_states``.
    """
    programs = _programs(states, grid.doc_order)
    dadded = torch.empty_like(states, dtype=dtype)
    # a number for each program, to be summed in a fixed order
    ddecays = dstates.new_empty(*dA_cumsum.shape[:3], programs[0])
    if dfinal_states is not None:
        dfinal_states = dfinal_states.contiguous()
    dinitial_states = None
    if initial_states is not None:
        dinitial_states = initial_states.new_empty(initial_states.shape)
    size = states[0, 0, 0].numel()
    _pass_bwd_kernel[programs](
        dstates, states, dA_cumsum, grid.doc_order, grid.cu_chunks, dfinal_states, dadded, ddecays,
        dinitial_states, *dA_cumsum.shape[2:], size, BLOCK=_BLOCK,
    )  # fmt: skip
    return dadded, ddecays.sum(-1), dinitial_states


def _programs(states: Tensor, doc_order: Tensor) -> tuple[int, int, int]:
    # the last number changes slowest: documents are begun in their order, which leaves no long one
    # for the end, and they are no more than the chunks that ssd_mamba_ssm lets through
    return cdiv(states[0, 0, 0].numel(), _BLOCK), states.shape[2], len(doc_order)


# changes from step to step: a kernel for each of its divisors would be compiled in turn
@triton.jit(do_not_specialize=["num_chunks"])
def _pass_fwd_kernel(
    added, dA_cumsum, doc_order, cu_chunks, initial_states, states, final_states,
    num_chunks, chunk_size, size, BLOCK: tl.constexpr,
):  # fmt: skip
    i_seq = tl.load(doc_order + tl.program_id(2))
    i_head = tl.program_id(1).to(tl.int64)
    nheads = tl.num_programs(1)
    o_s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_s = o_s < size
    o_seq = (i_seq * nheads + i_head) * size + o_s
    if initial_states is not None:
        b_h = tl.load(initial_states + o_seq, mask=m_s, other=0.0).to(tl.float32)
    else:
        b_h = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.load(cu_chunks + i_seq).to(tl.int64)
    end = tl.load(cu_chunks + i_seq + 1).to(tl.int64)
    for i_chunk in range(first, end):
        o_state = (i_chunk * nheads + i_head) * size + o_s
        p_last = dA_cumsum + (i_head * num_chunks + i_chunk + 1) * chunk_size - 1
        b_added = tl.load(added + o_state, mask=m_s, other=0.0)
        tl.store(states + o_state, b_h, mask=m_s)
        b_h = tl.exp(tl.load(p_last)) * b_h + b_added
    if final_states is not None:
        tl.store(final_states + o_seq, b_h, mask=m_s)


@triton.jit(do_not_specialize=["num_chunks"])
def _pass_bwd_kernel(
    dstates, states, dA_cumsum, doc_order, cu_chunks, dfinal_states, dadded, ddecays,
    dinitial_states, num_chunks, chunk_size, size, BLOCK: tl.constexpr,
):  # fmt: skip
    i_seq = tl.load(doc_order + tl.program_id(2))
    i_head = tl.program_id(1).to(tl.int64)
    i_block = tl.program_id(0)
    nheads = tl.num_programs(1)
    o_s = i_block * BLOCK + tl.arange(0, BLOCK)
    m_s = o_s < size
    o_seq = (i_seq * nheads + i_head) * size + o_s
    if dfinal_states is not None:
        b_dh = tl.load(dfinal_states + o_seq, mask=m_s, other=0.0).to(tl.float32)
    else:
        b_dh = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.load(cu_chunks + i_seq).to(tl.int64)
    end = tl.load(cu_chunks + i_seq + 1).to(tl.int64)
    for i_back in range(first, end):
        i_chunk = first + end - 1 - i_back
        i_decay = i_head * num_chunks + i_chunk
        o_state = (i_chunk * nheads + i_head) * size + o_s
        tl.store(dadded + o_state, b_dh, mask=m_s)
        b_h = tl.load(states + o_state, mask=m_s, other=0.0).to(tl.float32)
        b_decay = tl.exp(tl.load(dA_cumsum + (i_decay + 1) * chunk_size - 1))
        p_ddecay = ddecays + i_decay * tl.num_programs(0) + i_block
        tl.store(p_ddecay, tl.sum(b_dh * b_h, 0) * b_decay)
        b_dh = b_decay * b_dh + tl.load(dstates + o_state, mask=m_s, other=0.0)
    if dinitial_states is not None:
        tl.store(dinitial_states + o_seq, b_dh, mask=m_s)
