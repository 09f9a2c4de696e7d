"""Causal depthwise conv1d over packed documents: contract, checks and choice of the kernel.

    y[t, d] = act(bias[d] + sum_k weight[d, k] x[t - (width - 1) + k, d])

where a tap that would read before the document's first token reads its initial state, or zero.

Source: the conv of Gu and Dao, "Mamba", 2023, section 3.4; names as in causal_conv1d.

Dimensions:
    batch:    rows
    seqlen:   tokens of a row, all its documents together
    num_seqs: documents
    dim:      channels
    width:    taps of the filter
"""

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from xtuner_mamba.ops.autocast import without_autocast
from xtuner_mamba.ops.checks import check_tensors, resolve_cu_seqlens
from xtuner_mamba.ops.parts import GradientPart

Impl = Literal["triton", "cpu", "reference"]


class ConvWithStates(NamedTuple):
    """Result of :func:`causal_conv1d` with ``return_final_states=True``."""

    y: Tensor
    """``(batch, seqlen, dim)``."""
    final_states: Tensor
    """Last ``width - 1`` inputs of each document, oldest first, ``(num_seqs, dim, width - 1)``."""


class ForkedConv(NamedTuple):
    """Result of :func:`causal_conv1d` with ``fork=True``."""

    y: Tensor
    """``(batch, seqlen, dim)``."""
    y_fork: Tensor
    """The same in the same memory, for a second reader."""
    final_states: Tensor | None
    """As in :class:`ConvWithStates`, with ``return_final_states``."""


@overload
def causal_conv1d(*args, return_final_states: Literal[False] = False, **kwargs) -> Tensor: ...
@overload
def causal_conv1d(*args, return_final_states: Literal[True], **kwargs) -> ConvWithStates: ...
@overload
def causal_conv1d(*args, fork: Literal[True], **kwargs) -> ForkedConv: ...
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    activation: Literal["silu"] | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    fork: bool = False,
    dx_out: GradientPart | None = None,
    impl: Impl | None = None,
) -> Tensor | ConvWithStates | ForkedConv:
    """Convolve every document on its own, as if each were alone in the batch.

    Products are summed in float32 (float64 for float64 inputs) and rounded once.

    Args:
        x: Activations, ``(batch, seqlen, dim)``.
        weight: Filter taps, oldest token first, ``(dim, width)``.
        bias: Per-channel offset, ``(dim,)``.
        cu_seqlens: Document boundaries of the one row, int32, ``(num_seqs + 1,)``. Without it
            every row is one document.
        activation: Applied to the result.
        initial_states: Inputs before each document's first token, oldest first,
            ``(num_seqs, dim, width - 1)``.
        return_final_states: Also return each document's last ``width - 1`` inputs, those of a
            shorter document led by its initial state (or zeros).
        fork: Return the result twice, for two readers. On a GPU the backward adds the gradients of
            both as it reads them, unrounded, and spares the pass in which autograd would.
        dx_out: Where the backward on a GPU writes the gradient of ``x``, one of the ``gradients``
            of :func:`~xtuner_mamba.ops.parts.split_parts`; elsewhere nothing is changed by it.
        impl: ``"triton"`` runs on a GPU, ``"cpu"`` on a CPU in compiled loops, ``"reference"`` in
            plain PyTorch, anywhere. ``None`` takes the first on a GPU and the second elsewhere;
            a named one is never switched.

    Returns:
        ``(batch, seqlen, dim)`` in the dtype of ``x``; with ``return_final_states`` a
        :class:`ConvWithStates`, with ``fork`` a :class:`ForkedConv`, all in that dtype.
        Differentiable in every tensor but ``cu_seqlens``.

    Raises:
        ValueError: A shape or a boundary disagrees with the above, or ``activation`` or
            ``impl`` is unknown.
    """
    cu_seqlens = _check_inputs(x, weight, bias, cu_seqlens, initial_states)
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be None or 'silu', got {activation!r}")
    with without_autocast(x.device.type):
        y, y_fork, final_states = _resolve(impl, x.device)(
            x, weight, bias, initial_states, cu_seqlens, activation,
            return_final_states=return_final_states, dx_out=dx_out,
        )  # fmt: skip
    if fork:
        return ForkedConv(y, y_fork, final_states)
    return ConvWithStates(y, final_states) if return_final_states else y


def _resolve(impl: Impl | None, device: torch.device):
    if impl is None:
        impl = "triton" if device.type == "cuda" else "cpu"
    if impl == "triton":
        from xtuner_mamba.ops.causal_conv1d.triton import causal_conv1d_triton

        return causal_conv1d_triton
    if impl == "cpu":
        from xtuner_mamba.ops.causal_conv1d.cpu import causal_conv1d_cpu

        return causal_conv1d_cpu
    if impl == "reference":
        from xtuner_mamba.ops.causal_conv1d.reference import causal_conv1d_reference

        return causal_conv1d_reference
    raise ValueError(f"impl must be None, 'triton', 'cpu' or 'reference', got {impl!r}")


def _check_inputs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_states: Tensor | None,
) -> Tensor:
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(
            f"x must have shape (batch, seqlen, dim), none of them 0, got {tuple(x.shape)}"
        )
    check_tensors(x, cu_seqlens, weight=weight, bias=bias, initial_states=initial_states)
    dim = x.shape[2]
    if weight.ndim != 2 or weight.shape[0] != dim or weight.shape[1] < 1:
        raise ValueError(
            f"weight must have shape (dim={dim}, width >= 1), got {tuple(weight.shape)}; "
            "take conv.weight.squeeze(1) of an nn.Conv1d"
        )
    if bias is not None and bias.shape != (dim,):
        raise ValueError(f"bias must have shape {(dim,)}, got {tuple(bias.shape)}")
    cu_seqlens = resolve_cu_seqlens("x", x, cu_seqlens)
    num_seqs = len(cu_seqlens) - 1
    expected = (num_seqs, dim, weight.shape[1] - 1)
    if initial_states is not None and initial_states.shape != expected:
        raise ValueError(
            f"initial_states must have shape {expected}, the width - 1 inputs before each "
            f"document, got {tuple(initial_states.shape)}"
        )
    return cu_seqlens
