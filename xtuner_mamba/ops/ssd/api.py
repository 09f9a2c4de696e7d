"""State space duality (Mamba-2) over packed documents: contract, checks and choice of the kernel.

For every document and head on its own, with the state h zero (or given) before its first token t:

    dt'  = clamp(softplus(dt + dt_bias))          (softplus and clamp only if asked for)
    h[t] = exp(dt'[t] A) h[t-1] + dt'[t] x[t] B[t]^T
    y[t] = (h[t] C[t] + D x[t]) silu(z[t])        (and normed, if asked for, see GatedNorm)

Source: Dao and Gu, "Transformers are SSMs", 2024, section 6; argument names as in mamba_ssm's
``mamba_chunk_scan_combined``.

Dimensions:
    batch:    rows
    seqlen:   tokens of a row, all its documents together
    num_seqs: documents
    nheads:   heads, each with one decay rate
    headdim:  channels of a head
    ngroups:  groups of nheads / ngroups heads that share B and C
    dstate:   states of a channel
"""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple, overload

import torch.nn.functional as F
from torch import Tensor

from xtuner_mamba.ops.autocast import without_autocast
from xtuner_mamba.ops.checks import (
    check_decay_dtype,
    check_shapes,
    check_tensors,
    resolve_cu_seqlens,
)
from xtuner_mamba.ops.parts import GradientPart
from xtuner_mamba.ops.ssd.gated_norm import GatedNorm

_logger = logging.getLogger(__name__)

Impl = Literal["mamba_ssm", "reference"]


class SsdWithStates(NamedTuple):
    """Result of :func:`ssd` with ``return_final_states=True``."""

    y: Tensor
    """``(batch, seqlen, nheads, headdim)``."""
    final_states: Tensor
    """State after the last token of each document, ``(num_seqs, nheads, headdim, dstate)``."""


@overload
def ssd(*args, return_final_states: Literal[False] = False, **kwargs) -> Tensor: ...
@overload
def ssd(*args, return_final_states: Literal[True], **kwargs) -> SsdWithStates: ...
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    norm: GatedNorm | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    dxBC_out: Sequence[GradientPart] | None = None,
    dz_out: GradientPart | None = None,
    chunk_size: int | None = None,
    impl: Impl | None = None,
) -> Tensor | SsdWithStates:
    """Mix every document on its own, as if each were alone in the batch.

    Step sizes and states are kept in float32 (float64 for float64 inputs) and the output is
    rounded once.

    Args:
        x: Input of the recurrence, ``(batch, seqlen, nheads, headdim)``.
        dt: Step sizes before bias, softplus and clamp, ``(batch, seqlen, nheads)``.
        A: Decay rates, negative, float32 or float64, ``(nheads,)``.
        B: Input weights, ``(batch, seqlen, ngroups, dstate)``.
        C: Output weights, ``(batch, seqlen, ngroups, dstate)``.
        D: Skip weights, ``(nheads,)`` or ``(nheads, headdim)``.
        z: Gate, ``(batch, seqlen, nheads, headdim)``.
        norm: RMS norm after or before the gate; the channels of the heads that share B and C have
            a mean square of their own. ``"mamba_ssm"`` also rounds what is gated and normed.
        dt_bias: Added to ``dt``, ``(nheads,)``.
        dt_softplus: Apply softplus to ``dt + dt_bias``.
        dt_limit: Smallest and largest step size.
        cu_seqlens: Document boundaries of the one row, int32, ``(num_seqs + 1,)``. Without it
            every row is one document.
        initial_states: State before each document's first token,
            ``(num_seqs, nheads, headdim, dstate)``.
        return_final_states: Also return the state after each document's last token.
        dxBC_out: Where the backward of ``"mamba_ssm"`` writes the gradients of ``x``, ``B`` and
            ``C``, the ``gradients`` of :func:`~xtuner_mamba.ops.parts.split_parts`; elsewhere
            nothing is changed by it.
        dz_out: The same of ``z``.
        chunk_size: Tokens of a document that are multiplied at once. Without influence on the
            result but for rounding; ``None`` leaves it to the implementation.
        impl: ``"mamba_ssm"`` are that package's Triton kernels, for 16-bit inputs on a GPU;
            ``"reference"`` runs anywhere in plain PyTorch. ``None`` takes the first where it can
            do it, and logs once why not on a GPU; a named one is never switched.

    Returns:
        ``(batch, seqlen, nheads, headdim)`` in the dtype of ``x``; with ``return_final_states`` a
        :class:`SsdWithStates` whose states are float32 (or float64). Differentiable in every
        tensor but ``cu_seqlens``.

    Raises:
        ValueError: A shape, dtype, device, limit or boundary disagrees with the above, or
            ``impl`` is unknown.
        RuntimeError: ``impl="mamba_ssm"`` cannot do it, or was chosen and would have to count more
            chunks than its kernels can.
    """
    cu_seqlens = _check_inputs(x, dt, A, B, C, D, z, norm, dt_bias, cu_seqlens, initial_states)
    low, high = dt_limit
    if not 0 <= low <= high:
        raise ValueError(f"dt_limit must be a range of positive step sizes, got {dt_limit}")
    if chunk_size is not None and (chunk_size < 1 or chunk_size & (chunk_size - 1)):
        raise ValueError(f"chunk_size must be a power of 2, got {chunk_size}")
    with without_autocast(x.device.type):
        dt = dt.flatten(0, 1).to(A.dtype)
        if dt_bias is not None:
            dt = dt + dt_bias.to(A.dtype)
        if dt_softplus:
            # PyTorch's threshold of 20 would cost float64 its last digits
            dt = F.softplus(dt, threshold=40)
        if dt_limit != (0.0, float("inf")):
            dt = dt.clamp(low, high)
        x_, B_, C_, z_ = (None if t is None else t.flatten(0, 1) for t in (x, B, C, z))
        op = _resolve(impl or _choose_impl(x))
        y, final_states = op(
            x_, dt, A, B_, C_, D, z_, norm, initial_states, cu_seqlens, chunk_size,
            return_final_states=return_final_states, dxBC_out=dxBC_out, dz_out=dz_out,
        )  # fmt: skip
    y = y.view(x.shape)
    return SsdWithStates(y, final_states) if return_final_states else y


def _choose_impl(x: Tensor) -> Impl:
    if not x.is_cuda:
        return "reference"
    from xtuner_mamba.ops.ssd.mamba_ssm import why_not_mamba_ssm

    reason = why_not_mamba_ssm(x)
    if reason is None:
        return "mamba_ssm"
    _warn_once(reason)
    return "reference"


@cache
def _warn_once(reason: str) -> None:
    _logger.warning("ssd runs in plain PyTorch, not on mamba_ssm's faster kernels: %s", reason)


def _resolve(impl: Impl):
    if impl == "mamba_ssm":
        from xtuner_mamba.ops.ssd.mamba_ssm import ssd_mamba_ssm

        return ssd_mamba_ssm
    if impl == "reference":
        from xtuner_mamba.ops.ssd.reference import ssd_reference

        return ssd_reference
    raise ValueError(f"impl must be None, 'mamba_ssm' or 'reference', got {impl!r}")


def _check_inputs(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    norm: GatedNorm | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_states: Tensor | None,
) -> Tensor:
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(
            "x must have shape (batch, seqlen, nheads, headdim), none of them 0, got "
            f"{tuple(x.shape)}"
        )
    batch, seqlen, nheads, headdim = x.shape
    if B.ndim != 4 or B.shape[:2] != x.shape[:2] or 0 in B.shape or nheads % B.shape[2]:
        raise ValueError(
            f"B must have shape ({batch}, {seqlen}, ngroups, dstate), ngroups a divisor of the "
            f"{nheads} heads, got {tuple(B.shape)}"
        )
    expected = {
        "dt": (dt, (batch, seqlen, nheads)),
        "A": (A, (nheads,)),
        "C": (C, tuple(B.shape)),
        "z": (z, (batch, seqlen, nheads, headdim)),
        "dt_bias": (dt_bias, (nheads,)),
        "norm.weight": (None if norm is None else norm.weight, (nheads * headdim,)),
    }
    check_shapes(expected)
    if norm is not None and z is None:
        raise ValueError(f"z must be given with norm, got None beside {norm.eps=}; pass the gate")
    if D is not None and D.shape not in ((nheads,), (nheads, headdim)):
        raise ValueError(
            f"D must have shape {(nheads,)} or {(nheads, headdim)}, got {tuple(D.shape)}"
        )
    others = {name: tensor for name, (tensor, _) in expected.items()}
    check_tensors(x, cu_seqlens, B=B, D=D, initial_states=initial_states, **others)
    check_decay_dtype(x, A)
    cu_seqlens = resolve_cu_seqlens("x", x, cu_seqlens)
    num_seqs = len(cu_seqlens) - 1
    states = (num_seqs, nheads, headdim, B.shape[3])
    if initial_states is not None and initial_states.shape != states:
        raise ValueError(
            f"initial_states must have shape {states}, one state a document, got "
            f"{tuple(initial_states.shape)}"
        )
    return cu_seqlens
