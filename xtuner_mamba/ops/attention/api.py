"""Causal softmax attention over packed documents: contract, checks and choice of the kernel.

For every document on its own, query head h and its key head h // group:

    s[i, j] = scale q[i] . k[j]                    (softcap tanh(s / softcap), if there is one)
    y[i]    = sum_j softmax_j(s[i, j]) v[j]        over j in (i - sliding_window, i]

Dimensions:
    batch:     rows
    seqlen:    tokens of a row, all its documents together
    num_seqs:  documents
    nheads:    query heads
    nkvheads:  key and value heads, each shared by group = nheads / nkvheads query heads
    headdim:   channels of a head
"""

import logging
import math
from collections.abc import Callable
from numbers import Integral
from typing import Literal

from torch import Tensor

from xtuner_mamba.ops.attention.kernels import why_not_flash, why_not_varlen
from xtuner_mamba.ops.autocast import without_autocast
from xtuner_mamba.ops.checks import check_boundaries, resolve_cu_seqlens

_logger = logging.getLogger(__name__)
# conditions of the kernels that failed: each is told of once
_logged: set[str] = set()

Impl = Literal["varlen", "flash", "blocked", "reference"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    impl: Impl | None = None,
) -> Tensor:
    """Let every token attend to the tokens of its own document up to itself.

    The exact paths compute in float32 (float64 for float64 inputs) and round once; the kernels
    round the probabilities to the inputs' 16 bits, as flash attention does. All of them give the
    same bits twice.

    Args:
        q: Queries, ``(batch, seqlen, nheads, headdim)``.
        k: Keys, ``(batch, seqlen, nkvheads, headdim)``.
        v: Values, ``(batch, seqlen, nkvheads, headdim)``.
        cu_seqlens: Document boundaries of the one row, int32, ``(num_seqs + 1,)``. Without it
            every row is one document.
        scale: Of the scores; ``None`` stands for ``headdim ** -0.5``.
        sliding_window: How many tokens each one sees, itself included.
        softcap: Bound of the scores.
        impl: ``"varlen"`` is PyTorch's flash attention, ``"flash"`` that of flash-attn, both for
            16-bit inputs on a GPU; ``"blocked"`` runs anywhere, in memory that grows with the
            longest document; ``"reference"`` is the definition. ``None`` takes the first of these
            that can do it, and logs once why that is no kernel on a GPU; a named one is never
            switched.

    Returns:
        ``(batch, seqlen, nheads, headdim)`` in the dtype of ``q``, differentiable in ``q``, ``k``
        and ``v``.

    Raises:
        ValueError: A shape, dtype, device, boundary or number disagrees with the above, or the
            named ``impl`` is unknown or cannot do it.
    """
    cu_seqlens = _check_inputs(q, k, v, cu_seqlens, scale, sliding_window, softcap)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    impl = impl or _choose_impl(q, softcap)
    rows = (t.flatten(0, 1) for t in (q, k, v))
    with without_autocast(q.device.type):
        y = _resolve(impl, q, softcap)(*rows, cu_seqlens, scale, sliding_window, softcap)
    return y.view(q.shape)


def _choose_impl(q: Tensor, softcap: float | None) -> Impl:
    if q.device.type != "cuda":
        return "blocked"
    reasons = {"varlen": why_not_varlen(q, softcap), "flash": why_not_flash(q, softcap)}
    for impl, reason in reasons.items():
        if reason is None:
            return impl
    conditions = " and ".join(reason.partition(", got ")[0] for reason in reasons.values())
    if conditions not in _logged:
        _logged.add(conditions)
        _logger.warning(
            "attention runs on exact but slow matrix products, not on a kernel: %s; %s",
            *reasons.values(),
        )
    return "blocked"


def _resolve(impl: Impl, q: Tensor, softcap: float | None) -> Callable[..., Tensor]:
    if impl == "varlen":
        _refuse(impl, why_not_varlen(q, softcap))
        from xtuner_mamba.ops.attention.varlen import attention_varlen

        return attention_varlen
    if impl == "flash":
        _refuse(impl, why_not_flash(q, softcap))
        from xtuner_mamba.ops.attention.flash import attention_flash

        return attention_flash
    if impl == "blocked":
        from xtuner_mamba.ops.attention.blocked import attention_blocked

        return attention_blocked
    if impl == "reference":
        from xtuner_mamba.ops.attention.reference import attention_reference

        return attention_reference
    raise ValueError(
        f"impl must be None, 'varlen', 'flash', 'blocked' or 'reference', got {impl!r}"
    )


def _refuse(impl: Impl, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"{reason}, which impl={impl!r} needs; take impl='blocked' or None")


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    scale: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(
            "q must have shape (batch, seqlen, nheads, headdim), none of them 0, got "
            f"{tuple(q.shape)}"
        )
    batch, seqlen, nheads, headdim = q.shape
    for name, tensor in (("k", k), ("v", v)):
        if tensor.ndim != 4 or tensor.shape[:2] != q.shape[:2] or tensor.shape[3] != headdim:
            raise ValueError(
                f"{name} must have shape (batch={batch}, seqlen={seqlen}, nkvheads, "
                f"headdim={headdim}), got {tuple(tensor.shape)}"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} must be like q, {q.dtype} on {q.device}, got {tensor.dtype} on "
                f"{tensor.device}; take {name}.to(q)"
            )
    if not q.is_floating_point():
        raise ValueError(f"q must have a floating-point dtype, got {q.dtype}")
    if k.shape != v.shape or k.shape[2] == 0 or nheads % k.shape[2]:
        raise ValueError(
            f"k and v must have the same nkvheads, a divisor of nheads={nheads}, got "
            f"{k.shape[2]} and {v.shape[2]}"
        )
    if sliding_window is not None and not (
        isinstance(sliding_window, Integral) and sliding_window >= 1
    ):
        raise ValueError(
            "sliding_window must be an integer of at least 1, a token itself, got "
            f"{sliding_window!r}; None stands for no window"
        )
    for name, number, stands_for in (
        ("scale", scale, "headdim ** -0.5"),
        ("softcap", softcap, "no cap"),
    ):
        if number is not None and not 0 < number < math.inf:
            raise ValueError(
                f"{name} must be positive and finite, got {number}; None stands for {stands_for}"
            )
    check_boundaries("q", q, cu_seqlens)
    return resolve_cu_seqlens("q", q, cu_seqlens)
