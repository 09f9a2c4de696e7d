"""Selective scan (Mamba-1) over packed documents: contract, checks and choice of the kernel.

For every document on its own, with the state h zero (or given) before its first token t:

    dt'  = softplus(dt + dt_bias)            (softplus only if asked for)
    h[t] = exp(dt'[t] A) h[t-1] + dt'[t] B[t] x[t]
    y[t] = (C[t] . h[t] + D x[t]) silu(z[t])

Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
algorithm 2; argument names as in mamba_ssm.

Dimensions:
    batch:    rows
    seqlen:   tokens of a row, all its documents together
    num_seqs: documents
    dim:      channels
    dstate:   states of a channel
"""

import logging
from typing import Literal, NamedTuple, overload

import torch
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

_logger = logging.getLogger(__name__)
# conditions of the Gluon kernels that failed: each is told of once
_logged: set[str] = set()

Impl = Literal["gluon", "triton", "cpu", "reference"]


class ScanWithStates(NamedTuple):
    """Result of :func:`selective_scan` with ``return_final_states=True``."""

    y: Tensor
    """``(batch, seqlen, dim)``."""
    final_states: Tensor
    """State after the last token of each document, ``(num_seqs, dim, dstate)``."""


@overload
def selective_scan(*args, return_final_states: Literal[False] = False, **kwargs) -> Tensor: ...
@overload
def selective_scan(*args, return_final_states: Literal[True], **kwargs) -> ScanWithStates: ...
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    A_is_log: bool = False,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    out_proj_weight: Tensor | None = None,
    out_proj_bias: Tensor | None = None,
    dz_out: GradientPart | None = None,
    impl: Impl | None = None,
) -> Tensor | ScanWithStates:
    """Scan every document on its own, as if each were alone in the batch.

    The state is kept in float32 (float64 for float64 inputs) and the output rounded once.

    Args:
        x: Input of the recurrence, ``(batch, seqlen, dim)``.
        dt: Step sizes before bias and softplus, ``(batch, seqlen, dim)``.
        A: Decay rates, negative, float32 or float64, ``(dim, dstate)``.
        B: Input weights, ``(batch, seqlen, dstate)``.
        C: Output weights, ``(batch, seqlen, dstate)``.
        A_is_log: ``A`` holds log(-A), as models keep it.
        D: Skip weights, ``(dim,)``.
        z: Gate, ``(batch, seqlen, dim)``.
        dt_bias: Added to ``dt``, ``(dim,)``.
        dt_softplus: Apply softplus to ``dt + dt_bias``.
        cu_seqlens: Document boundaries of the one row, int32, ``(num_seqs + 1,)``. Without it
            every row is one document.
        initial_states: State before each document's first token, ``(num_seqs, dim, dstate)``.
        return_final_states: Also return the state after each document's last token.
        out_proj_weight: Weight of a linear layer that follows, in the dtype of ``x``,
            ``(out_dim, dim)``. A GPU does not keep its input for the backward, which makes it as
            it goes.
        out_proj_bias: Bias of that layer, ``(out_dim,)``.
        dz_out: Where the backward on a GPU writes the gradient of ``z``, one of the ``gradients``
            of :func:`~xtuner_mamba.ops.parts.split_parts`; elsewhere nothing is changed by it.
        impl: ``"gluon"`` is the fastest, for 16-bit inputs on a Hopper GPU, ``"triton"`` runs on
            any GPU, ``"cpu"`` on a CPU in compiled loops, ``"reference"`` is the definition,
            token by token. ``None`` takes the first that can do it, and logs once why that is not
            the fastest of a GPU; a named one is never switched.

    Returns:
        ``(batch, seqlen, dim)``, or of the layer that follows ``(batch, seqlen, out_dim)``, in the
        dtype of ``x``; with ``return_final_states`` a :class:`ScanWithStates` whose states are
        float32 (or float64). Differentiable in every tensor but ``cu_seqlens``.

    Raises:
        ValueError: A shape, dtype, device or boundary disagrees with the above, or ``impl`` is
            unknown.
    """
    cu_seqlens = _check_inputs(x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_states)
    _check_out_proj(x, out_proj_weight, out_proj_bias)
    rest = initial_states, cu_seqlens, dt_softplus
    with without_autocast(x.device.type):
        impl = impl or _choose_impl(x, dt, A, z)
        scan = _resolve(impl)
        if impl in ("gluon", "triton"):
            y, final_states = scan(
                x, dt, A, B, C, D, z, dt_bias, *rest, return_final_states=return_final_states,
                A_is_log=A_is_log, out_proj=(out_proj_weight, out_proj_bias), dz_out=dz_out,
            )  # fmt: skip
        else:
            A = -torch.exp(A) if A_is_log else A
            x_, dt_, B_, C_, z_ = (None if t is None else t.flatten(0, 1) for t in (x, dt, B, C, z))
            y, final_states = scan(
                x_, dt_, A, B_, C_, D, z_, dt_bias, *rest, return_final_states=return_final_states
            )
            if out_proj_weight is not None:
                y = F.linear(y, out_proj_weight, out_proj_bias)
            y = y.view(*x.shape[:2], -1)
    return ScanWithStates(y, final_states) if return_final_states else y


def _check_out_proj(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if weight is None:
        if bias is not None:
            raise ValueError(
                f"out_proj_bias must come with out_proj_weight, got shape {tuple(bias.shape)} alone"
            )
        return
    if weight.ndim != 2 or weight.shape[1] != x.shape[2]:
        raise ValueError(
            f"out_proj_weight must have shape (out_dim, dim={x.shape[2]}), got "
            f"{tuple(weight.shape)}"
        )
    check_shapes({"out_proj_bias": (bias, (len(weight),))})
    check_tensors(x, None, out_proj_weight=weight, out_proj_bias=bias)
    for name, tensor in {"out_proj_weight": weight, "out_proj_bias": bias}.items():
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(
                f"{name} must have the dtype of x, {x.dtype}, got {tensor.dtype}; take "
                f"{name}.to(x.dtype), as autocast does"
            )


def _choose_impl(x: Tensor, dt: Tensor, A: Tensor, z: Tensor | None) -> Impl:
    if x.device.type != "cuda":
        return "cpu"
    from xtuner_mamba.ops.selective_scan.gluon_support import why_not_gluon

    reason = why_not_gluon(x, dt, A, z)
    if reason is None:
        return "gluon"
    condition = reason.partition(", got ")[0]
    if condition not in _logged:
        _logged.add(condition)
        _logger.warning(
            "selective_scan runs on its Triton kernels, not the faster Gluon: %s", reason
        )
    return "triton"


def _resolve(impl: Impl):
    if impl == "gluon":
        from xtuner_mamba.ops.selective_scan.gluon import selective_scan_gluon

        return selective_scan_gluon
    if impl == "triton":
        from xtuner_mamba.ops.selective_scan.triton import selective_scan_triton

        return selective_scan_triton
    if impl == "cpu":
        from xtuner_mamba.ops.selective_scan.cpu import selective_scan_cpu

        return selective_scan_cpu
    if impl == "reference":
        from xtuner_mamba.ops.selective_scan.reference import selective_scan_reference

        return selective_scan_reference
    raise ValueError(f"impl must be None, 'gluon', 'triton', 'cpu' or 'reference', got {impl!r}")


def _check_inputs(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_states: Tensor | None,
) -> Tensor:
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(
            f"x must have shape (batch, seqlen, dim), none of them 0, got {tuple(x.shape)}"
        )
    if A.ndim != 2 or A.shape[0] != x.shape[2] or A.shape[1] < 1:
        raise ValueError(f"A must have shape (dim={x.shape[2]}, dstate >= 1), got {tuple(A.shape)}")
    batch, seqlen, dim = x.shape
    dstate = A.shape[1]
    expected = {
        "dt": (dt, (batch, seqlen, dim)),
        "B": (B, (batch, seqlen, dstate)),
        "C": (C, (batch, seqlen, dstate)),
        "D": (D, (dim,)),
        "z": (z, (batch, seqlen, dim)),
        "dt_bias": (dt_bias, (dim,)),
    }
    check_shapes(expected)
    others = {name: tensor for name, (tensor, _) in expected.items()}
    check_tensors(x, cu_seqlens, A=A, initial_states=initial_states, **others)
    check_decay_dtype(x, A)
    cu_seqlens = resolve_cu_seqlens("x", x, cu_seqlens)
    num_seqs = len(cu_seqlens) - 1
    if initial_states is not None and initial_states.shape != (num_seqs, dim, dstate):
        raise ValueError(
            f"initial_states must have shape {(num_seqs, dim, dstate)}, one state a document, "
            f"got {tuple(initial_states.shape)}"
        )
    return cu_seqlens
