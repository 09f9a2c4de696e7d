"""Forward of the Mamba-1 mixers over packed documents.

Replaces that of ``MambaMixer``, ``FalconMambaMixer``, ``JambaMambaMixer`` and ``ZambaMambaMixer``
of transformers 4.48, and that of mamba_ssm's ``Mamba``. The projection *modules* are called, not
their weights, so that a LoRA or a quantised layer in their place acts.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xtuner_mamba.layout import PackedLayout, current_layout
from xtuner_mamba.ops import (
    ScanWithStates,
    backward_follows,
    causal_conv1d,
    rms_norm,
    selective_scan,
)


def mamba_mixer_forward(
    self: nn.Module,
    hidden_states: Tensor,
    cache_params=None,
    cache_position: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    recompute: bool | None = False,
    checkpointed_by: Sequence[nn.Module] = (),
) -> Tensor:
    """Mix the tokens of every document on its own, ``(batch, seqlen, hidden)`` in and out.

    Without a cache the published layout says where documents start; with one (generation) every
    row is a document that the cache continues. ``recompute`` and ``checkpointed_by`` are bound by
    ``dispatch_packed``.

    Raises:
        RuntimeError: No layout, one of another batch, or both a layout and a cache.
    """
    if cache_params is not None:
        return _continue_rows(self, hidden_states, cache_params, cache_position, attention_mask)
    layout = layout_of(hidden_states)
    if attention_mask is not None:
        raise RuntimeError(
            "attention_mask must be None with packed documents, got one of shape "
            f"{tuple(attention_mask.shape)}; the layout alone says what belongs together"
        )
    packed = hidden_states.reshape(1, layout.total, -1)
    xz = self.in_proj(packed)
    # bound and not an argument, which a checkpoint would hand over as a tensor nobody has checked
    mix = partial(_mix_documents, self, cu_seqlens=layout.cu_seqlens)
    if _recomputes(self, xz, recompute, checkpointed_by):
        y = checkpoint(
            mix, xz, use_reentrant=False, context_fn=lambda: (nullcontext(), backward_follows())
        )
    else:
        y = mix(xz)
    return y.reshape(hidden_states.shape)


def mamba_ssm_mixer_forward(
    self: nn.Module, hidden_states: Tensor, inference_params=None, **options
) -> Tensor:
    """Mix the tokens of every document on its own, in mamba_ssm's ``Mamba``.

    As :func:`mamba_mixer_forward`; generation is left to mamba_ssm.
    """
    if inference_params is None:
        return mamba_mixer_forward(self, hidden_states, **options)
    refuse_cache_with_packs()
    return type(self).forward(self, hidden_states, inference_params)


def refuse_cache_with_packs() -> None:
    """Check that no layout is published.

    Raises:
        RuntimeError: There is one.
    """
    if current_layout() is not None:
        raise RuntimeError(
            "use_cache must be False while a packed layout is published, got a cache; it holds "
            "one state a row, not one a document: set model.config.use_cache = False"
        )


def is_partitioned(parameter: Tensor) -> bool:
    """Tell whether DeepSpeed's ZeRO-3 owns a parameter, whole only while its module runs."""
    return hasattr(parameter, "ds_id")


def layout_of(hidden_states: Tensor) -> PackedLayout:
    """Return the published boundaries of this batch.

    Args:
        hidden_states: ``(batch, seqlen, hidden)``.

    Raises:
        RuntimeError: There are none, or they belong to another batch or device.
    """
    batch, seqlen = hidden_states.shape[:2]
    layout = current_layout()
    if layout is None:
        raise RuntimeError(
            f"a packed layout must be published before {batch} x {seqlen} tokens reach a "
            "dispatched mixer, got none; add dict(type=PackedLayoutHook) to custom_hooks, or in "
            "a script run forward and backward inside `with layout.published():`"
        )
    layout.check_covers(batch, seqlen)
    if layout.cu_seqlens.device != hidden_states.device:
        raise RuntimeError(
            f"the packed layout must be on {hidden_states.device}, got "
            f"{layout.cu_seqlens.device}; publish layout.to({str(hidden_states.device)!r})"
        )
    return layout


def _recomputes(
    self: nn.Module, xz: Tensor, recompute: bool | None, checkpointed_by: Sequence[nn.Module]
) -> bool:
    """Whether the backward runs :func:`_mix_documents` again, instead of keeping what it made."""
    if recompute is None:
        recompute = xz.is_cuda
    return (
        recompute
        and torch.is_grad_enabled()
        # ZeRO-3 would find modules running in the backward that it has not gathered
        and not is_partitioned(self.A_log)
        # once is enough
        and not any(model.gradient_checkpointing and model.training for model in checkpointed_by)
    )


def _mix_documents(self: nn.Module, xz: Tensor, *, cu_seqlens: Tensor) -> Tensor:
    """All that follows ``in_proj``; recomputed, it stops where ``out_proj`` has its input."""
    x, z = _split(self, xz)
    x = _convolve(self, x, cu_seqlens=cu_seqlens)
    return self.out_proj(_scan(self, x, z, cu_seqlens=cu_seqlens))


def _continue_rows(
    self: nn.Module,
    hidden_states: Tensor,
    cache,
    cache_position: Tensor | None,
    attention_mask: Tensor | None,
) -> Tensor:
    refuse_cache_with_packs()
    x, z = _split(self, self.in_proj(hidden_states))
    keep = None
    if attention_mask is not None:
        # Zamba's is of the whole row, whatever the cache holds of it
        keep = attention_mask[:, -x.shape[1] :, None].to(x.dtype)
        x = x * keep
    conv_states = cache.conv_states[self.layer_idx]  # (batch, dim, width)
    ssm_states = cache.ssm_states[self.layer_idx]  # (batch, dim, dstate), or by heads
    width = conv_states.shape[-1]
    if _is_prompt(cache, cache_position, width):
        conv_states.zero_()
        ssm_states.zero_()
    # not cache.update_conv_state: 4.48 writes the tokens after a prompt shorter than the filter
    # to the wrong place
    recent = torch.cat([conv_states, x.transpose(1, 2).to(conv_states.dtype)], dim=-1)

    x = _convolve(self, x, initial_states=conv_states[..., 1:].to(x.dtype))
    if keep is not None:
        x = x * keep
    before = ssm_states.to(_state_dtype(x)).flatten(1, -2)
    y, after = _scan(self, x, z, initial_states=before, return_final_states=True)
    conv_states.copy_(recent[..., -width:])
    ssm_states.copy_(after.view_as(ssm_states))
    return self.out_proj(y)


def _is_prompt(cache, cache_position: Tensor | None, width: int) -> bool:
    """Tell a prompt from what continues it, as transformers does."""
    if hasattr(cache, "has_previous_state"):  # of a hybrid
        return not cache.has_previous_state
    return cache_position.shape[0] == width


def _convolve(self: nn.Module, x: Tensor, **boundaries) -> Tensor:
    """Conv and activation, ``(batch, seqlen, dim)`` in and out."""
    silu = self.activation in ("silu", "swish")
    y = causal_conv1d(
        x,
        self.conv1d.weight.squeeze(1),
        self.conv1d.bias,
        activation="silu" if silu else None,
        **boundaries,
    )
    return y if silu else self.act(y)


def _scan(
    self: nn.Module, x: Tensor, z: Tensor, *, initial_states: Tensor | None = None, **boundaries
):
    """Input-dependent dt, B and C, then the recurrence and the gate, head by head."""
    silu = self.activation in ("silu", "swish")
    heads = _heads(self, x)
    parts = (t.chunk(len(heads), dim=-1) for t in (x, z))
    states = len(heads) * [None]
    if initial_states is not None:
        states = initial_states.chunk(len(heads), dim=1)
    results = []
    for head, x_head, z_head, states_head in zip(heads, *parts, states):
        result = selective_scan(
            x_head,
            head.dt,
            -torch.exp(head.A_log.to(_state_dtype(x))),
            head.B,
            head.C,
            D=head.D,
            z=z_head if silu else None,
            dt_bias=head.dt_bias,
            dt_softplus=True,
            initial_states=states_head,
            **boundaries,
        )
        results.append(result)
    result = results[0] if len(results) == 1 else _join(results)
    if silu:
        return result
    gate = self.act(z)
    return result * gate if isinstance(result, Tensor) else result._replace(y=result.y * gate)


def _join(results: list) -> Tensor | ScanWithStates:
    """Lay the channels of all heads side by side."""
    if isinstance(results[0], Tensor):
        return torch.cat(results, dim=-1)
    ys, final_states = zip(*results)
    return ScanWithStates(torch.cat(ys, dim=-1), torch.cat(final_states, dim=1))


# -- where the families differ --------------------------------------------------------------------


class _Head(NamedTuple):
    """What the scan of a head's channels takes besides x and z, under the scan's names."""

    dt: Tensor
    B: Tensor
    C: Tensor
    dt_bias: Tensor | None
    A_log: Tensor
    D: Tensor


def _split(self: nn.Module, xz: Tensor) -> tuple[Tensor, Tensor]:
    """Split what ``in_proj`` made into the scan's input and its gate."""
    if type(self).__name__ == "ZambaMambaMixer":
        # channel by channel, the one next to the other
        return xz.unflatten(-1, (-1, 2)).unbind(-1)
    return xz.chunk(2, dim=-1)


def _heads(self: nn.Module, x: Tensor) -> list[_Head]:
    dstate = self.A_log.shape[-1]
    if type(self).__name__ == "ZambaMambaMixer":
        heads = []
        weights = self.x_proj_weight, self.dt_proj_weight, self.dt_proj_bias, self.A_log, self.D
        for x_head, x_proj, dt_proj, dt_bias, A_log, D in zip(
            x.chunk(self.n_mamba_heads, dim=-1), *weights
        ):
            dt, B, C = _split_selection(F.linear(x_head, x_proj), dstate)
            heads.append(_Head(F.linear(dt, dt_proj), B, C, dt_bias, A_log, D))
        return heads
    dt, B, C = _norm_selection(self, *_split_selection(self.x_proj(x), dstate))
    dt, dt_bias = _project_without_bias(self.dt_proj, dt)
    return [_Head(dt, B, C, dt_bias, self.A_log, self.D)]


def _split_selection(selection: Tensor, dstate: int) -> tuple[Tensor, Tensor, Tensor]:
    return selection.split([selection.shape[-1] - 2 * dstate, dstate, dstate], dim=-1)


def _norm_selection(
    self: nn.Module, dt: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm what depends on the input, where a family does."""
    if type(self).__name__ == "FalconMambaMixer":
        # without a weight to learn
        weighted = ((t, t.new_ones(t.shape[-1]), self.rms_eps) for t in (dt, B, C))
    elif type(self).__name__ == "JambaMambaMixer":
        norms = self.dt_layernorm, self.b_layernorm, self.c_layernorm
        weighted = ((t, norm.weight, norm.variance_epsilon) for t, norm in zip((dt, B, C), norms))
    else:
        return dt, B, C
    return tuple(rms_norm(t, weight, eps=eps).y for t, weight, eps in weighted)


def _project_without_bias(projection: nn.Module, dt: Tensor) -> tuple[Tensor, Tensor | None]:
    """Project dt, and leave its bias to the scan, which adds it before any rounding.

    Near its usual -5, bfloat16 rounds ``dt + bias`` by 0.01, a whole per cent of the step size.
    A layer that stands in for the projection (LoRA, 4 bit) is called as it is, bias and all.
    """
    if type(projection) is nn.Linear:
        return F.linear(dt, projection.weight), projection.bias
    return projection(dt), None


def _state_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
