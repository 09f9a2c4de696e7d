"""Selective scan over packed documents in plain PyTorch: all documents advance together.

One operation a time step does the work of that step for a group of documents, so boundaries are
parallel work and not a cost. Everything that does not depend on the step before (decays, inputs,
outputs, most of the gradients) is done once for a block of steps, small enough to stay in cache.
Inside a block the state is ``(tokens, dstate, dim)``: the long dimension last, for vector units.
"""

import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# in cells, the (token, channel, state) triples: the buffers of a block fit the last cache level,
# and a time step of that many documents hides the cost of a call
_BLOCK_CELLS = 2**20
_STEP_CELLS = 2**17

_scratch = threading.local()


def selective_scan_cpu(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor, dt_softplus: bool,
    *, return_final_states: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See :func:`xtuner_mamba.ops.selective_scan`; the rows are laid end to end."""
    _map_constants_of_softplus(A.dtype)
    schedule = _schedule(
        tuple(cu_seqlens.tolist()),
        block_tokens=max(1, _BLOCK_CELLS // A.numel()),
        step_docs=max(1, _STEP_CELLS // A.numel()),
    )
    return SelectiveScanFunction.apply(
        x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, schedule, return_final_states
    )


class SelectiveScanFunction(torch.autograd.Function):
    """Saves the inputs and the state before each block; states inside a block are recomputed."""

    @staticmethod
    def forward(ctx, *args):
        *inputs, dt_softplus, schedule, return_final_states = args
        y, final_states, block_states = _scan_fwd(
            *inputs, dt_softplus, schedule, return_final_states
        )
        ctx.save_for_backward(*inputs, *block_states)
        ctx.num_inputs = len(inputs)
        ctx.options = dt_softplus, schedule
        return y, final_states

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal_states):
        # read once: activation checkpointing lets a tensor be unpacked a single time
        saved = ctx.saved_tensors
        inputs, block_states = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
        grads = _scan_bwd(dy, dfinal_states, *inputs, *ctx.options, block_states)
        return *grads, None, None, None


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive time steps of documents that all last through them."""

    steps: int
    docs: Tensor
    """Documents, longest first, int64."""
    num_left: int
    """How many of them, the first ones, go on in the next block."""
    tokens: Tensor
    """Where their tokens stand, document after document, int64, ``(num_docs * steps,)``."""
    is_first: bool
    """Whether the documents start here."""


@lru_cache(maxsize=4)
def _schedule(offsets: tuple[int, ...], *, block_tokens: int, step_docs: int) -> list[_Block]:
    """Cut the work into blocks: group after group of documents, each in order of time.

    Documents of 4, 1 and 3 tokens make three blocks: a step of documents 0, 2, 1 (tokens 0, 5, 4),
    two steps of 0, 2 (tokens 1, 2 and 6, 7), and one of 0 (token 3).
    """
    starts = torch.tensor(offsets[:-1])
    lengths, docs = torch.tensor(offsets).diff().sort(descending=True, stable=True)
    starts, lengths = starts[docs], lengths.tolist()
    blocks, begin = [], 0
    while begin < len(docs):
        # documents so short that more of them fit one block need no more steps for it
        group = max(step_docs, block_tokens // lengths[begin])
        active, done = min(group, len(docs) - begin), 0
        end = begin + active
        while active:
            steps = min(max(1, block_tokens // active), lengths[begin + active - 1] - done)
            times = torch.arange(done, done + steps)
            here = slice(begin, begin + active)
            tokens = (starts[here, None] + times).flatten()
            is_first, done = done == 0, done + steps
            while active and lengths[begin + active - 1] == done:
                active -= 1
            blocks.append(_Block(steps, docs[here], active, tokens, is_first))
        begin = end
    return blocks


def _scan_fwd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, dt_softplus: bool,
    schedule: list[_Block], return_final_states: bool,
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:  # fmt: skip
    dtype = A.dtype
    y = x.new_empty(x.shape)
    num_seqs = sum(len(block.docs) - block.num_left for block in schedule)
    final_states = A.new_empty(num_seqs, *A.shape) if return_final_states else None
    block_states = []
    log2_decay, buffers = _log2_decay(A), _buffers(2, A, schedule)
    for block in schedule:
        if block.is_first:
            state = _first_states(initial_states, A, block)
        block_states.append(None if block.is_first else state)
        x_b, dt_b, B_b, C_b, z_b = (_gather(t, block, dtype) for t in (x, dt, B, C, z))
        dt_b = _step_sizes(dt_b, dt_bias, dt_softplus)
        _, h = _recur(x_b, dt_b, log2_decay, B_b, state, block, buffers)
        y_b = torch.bmm(C_b[:, None], h.flatten(0, 1))[:, 0]
        if D is not None:
            y_b.addcmul_(D.to(dtype), x_b)
        if z is not None:
            y_b.mul_(F.silu(z_b))
        _scatter(y, block, y_b)
        if return_final_states:
            final_states[block.docs[block.num_left :]] = h[block.num_left :, -1].mT
        # the buffer is written again
        state = h[: block.num_left, -1].clone()
    return y, final_states, block_states


# as the forward: a backward inside autocast would round the matrix products on the state
@torch.autocast("cpu", enabled=False)
def _scan_bwd(
    dy: Tensor, dfinal_states: Tensor | None,
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, dt_softplus: bool,
    schedule: list[_Block], block_states: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dtype = A.dtype
    dx, ddt, dB, dC, dz, dinitial_states = (
        None if t is None else t.new_empty(t.shape) for t in (x, dt, B, C, z, initial_states)
    )
    dA_t, dD, ddt_bias = torch.zeros_like(A.mT), A.new_zeros(len(A)), A.new_zeros(len(A))
    A_t, log2_decay, buffers = A.mT.contiguous(), _log2_decay(A), _buffers(3, A, schedule)
    dnext = A.new_empty(0, *A_t.shape)
    for block, state in zip(reversed(schedule), reversed(block_states)):
        if block.is_first:
            state = _first_states(initial_states, A, block)
        x_b, dt_b, B_b, C_b, z_b, dy_b = (_gather(t, block, dtype) for t in (x, dt, B, C, z, dy))
        dt_b = _step_sizes(dt_b, dt_bias, dt_softplus)
        a, h = _recur(x_b, dt_b, log2_decay, B_b, state, block, buffers)
        token_h = h.flatten(0, 1)

        # y = (C h + D x) silu(z)
        if z is not None:
            y_b = torch.bmm(C_b[:, None], token_h)[:, 0]
            if D is not None:
                y_b.addcmul_(D.to(dtype), x_b)
            gate = z_b.sigmoid()
            _scatter(dz, block, dy_b * y_b * gate * (1 + z_b * (1 - gate)))
            dy_b.mul_(z_b.mul_(gate))
        _scatter(dC, block, torch.bmm(dy_b[:, None], token_h.mT)[:, 0])

        dafter = torch.cat([dnext[: block.num_left], _final_grads(dfinal_states, A, block)])
        dh = _recur_back(dy_b, C_b, a, dafter, buffers)
        token_dh = dh.flatten(0, 1)

        # h = a h_before + u B with u = dt x and a = exp(dt A)
        du = torch.bmm(B_b[:, None], token_dh)[:, 0]
        _scatter(dB, block, torch.bmm((dt_b * x_b)[:, None], token_dh.mT)[:, 0])
        dh_before = a.mul_(dh)
        dnext = dh_before[:, 0].clone()
        if block.is_first and initial_states is not None:
            dinitial_states[block.docs] = dnext.mT.to(dinitial_states.dtype)
        dlog_a = dh_before
        dlog_a[:, 0].mul_(state)
        dlog_a[:, 1:].mul_(h[:, :-1])
        token_dlog_a = dlog_a.flatten(0, 1)
        ddt_b = torch.mul(token_dlog_a, A_t, out=token_dh).sum(1).addcmul_(du, x_b)
        dA_t += token_dlog_a.mul_(dt_b[:, None]).sum(0)

        dx_b = du.mul_(dt_b)
        if D is not None:
            dx_b.addcmul_(D.to(dtype), dy_b)
            dD += dy_b.mul_(x_b).sum(0)
        _scatter(dx, block, dx_b)
        if dt_softplus:
            # the sigmoid of what softplus was given
            ddt_b.mul_(torch.expm1(-dt_b).neg_())
        ddt_bias += ddt_b.sum(0)
        _scatter(ddt, block, ddt_b)
    dD = None if D is None else dD.to(D.dtype)
    ddt_bias = None if dt_bias is None else ddt_bias.to(dt_bias.dtype)
    return dx, ddt, dA_t.mT, dB, dC, dD, dz, ddt_bias, dinitial_states


def _recur(
    x: Tensor, dt: Tensor, log2_decay: Tensor, B: Tensor, state: Tensor, block: _Block,
    buffers: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill two buffers with decays and states, ``(num_docs, steps, dstate, dim)``."""
    shape = len(block.docs), block.steps, *log2_decay.shape
    a, h = (buffer[: math.prod(shape)].view(shape) for buffer in buffers[:2])
    torch.mul(dt[:, None], log2_decay, out=a.flatten(0, 1)).exp2_()
    torch.mul((dt * x)[:, None], B[:, :, None], out=h.flatten(0, 1))
    for step_a, step_h in zip(a.unbind(1), h.unbind(1)):
        state = step_h.addcmul_(step_a, state)
    return a, h


def _recur_back(dy: Tensor, C: Tensor, a: Tensor, dafter: Tensor, buffers: Tensor) -> Tensor:
    """Fill the third buffer with the gradients of the states, given those after the block."""
    dh = buffers[2][: a.numel()].view_as(a)
    torch.mul(dy[:, None], C[:, :, None], out=dh.flatten(0, 1))
    dh[:, -1] += dafter
    steps = list(zip(a.unbind(1), dh.unbind(1)))
    for (next_a, next_dh), (_, step_dh) in pairwise(reversed(steps)):
        step_dh.addcmul_(next_a, next_dh)
    return dh


def _first_states(initial_states: Tensor | None, A: Tensor, block: _Block) -> Tensor:
    if initial_states is None:
        return A.new_zeros(len(block.docs), *A.mT.shape)
    return initial_states[block.docs].mT.to(A.dtype)


def _final_grads(dfinal_states: Tensor | None, A: Tensor, block: _Block) -> Tensor:
    ended = block.docs[block.num_left :]
    return (
        A.new_zeros(len(ended), *A.mT.shape) if dfinal_states is None else dfinal_states[ended].mT
    )


def _log2_decay(A: Tensor) -> Tensor:
    # exp2 is several times faster than exp
    return (A.mT.double() * math.log2(math.e)).to(A.dtype).contiguous()


def _buffers(count: int, A: Tensor, schedule: list[_Block]) -> Tensor:
    """Return memory for blocks, ``(count, cells)``, that the thread keeps from call to call.

    Fresh pages for every call would cost half as much again as the scan.
    """
    size = count * A.numel() * max(len(block.tokens) for block in schedule)
    kept = getattr(_scratch, "memory", None)
    if kept is None or kept.numel() < size or (kept.dtype, kept.device) != (A.dtype, A.device):
        # training could not write into memory of an evaluation in inference mode
        with torch.inference_mode(False):
            kept = _scratch.memory = A.new_empty(size)
    return kept[:size].view(count, -1)


def _gather(t: Tensor | None, block: _Block, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else t.index_select(0, block.tokens).to(dtype)


def _scatter(t: Tensor, block: _Block, rows: Tensor) -> None:
    t.index_copy_(0, block.tokens, rows.to(t.dtype))


def _step_sizes(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Tensor:
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    # PyTorch's threshold of 20 would cost float64 its last digits
    return F.softplus(dt, threshold=40) if dt_softplus else dt


def _map_constants_of_softplus(dtype: torch.dtype) -> None:
    """Make softplus six times faster for the life of the process.

    Its AVX-512 code loads a constant under a mask that only log1p(-0.0) sets. Masked loads never
    fault, so until then the page of the constant stays unmapped and each load takes a slow path.
    """
    torch.full((64,), -0.0, dtype=dtype).log1p()
