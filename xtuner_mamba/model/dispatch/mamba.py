"""Forward of transformers' ``MambaMixer`` over packed documents.

Replaces ``MambaMixer.forward`` of transformers 4.48. The projection *modules* are called, not
their weights, so that a LoRA or a quantised layer in their place acts.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xtuner_mamba.layout import PackedLayout, current_layout
from xtuner_mamba.ops import backward_follows, causal_conv1d, selective_scan


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
    x, z = xz.chunk(2, dim=-1)
    x = _convolve(self, x, cu_seqlens=cu_seqlens)
    return self.out_proj(_scan(self, x, z, cu_seqlens=cu_seqlens))


def _continue_rows(
    self: nn.Module,
    hidden_states: Tensor,
    cache,
    cache_position: Tensor,
    attention_mask: Tensor | None,
) -> Tensor:
    if current_layout() is not None:
        raise RuntimeError(
            "use_cache must be False while a packed layout is published, got a cache; it holds "
            "one state a row, not one a document: set model.config.use_cache = False"
        )
    x, z = self.in_proj(hidden_states).chunk(2, dim=-1)
    keep = None if attention_mask is None else attention_mask[..., None].to(x.dtype)
    if keep is not None:
        x = x * keep
    conv_states = cache.conv_states[self.layer_idx]  # (batch, dim, width)
    ssm_states = cache.ssm_states[self.layer_idx]  # (batch, dim, dstate)
    # as transformers tells a prompt from a single token
    is_prompt = cache_position.shape[0] == self.conv_kernel_size
    if is_prompt:
        conv_states.zero_()
        ssm_states.zero_()
    # not cache.update_conv_state: 4.48 writes the tokens after a prompt shorter than the filter
    # to the wrong place
    recent = torch.cat([conv_states, x.transpose(1, 2).to(conv_states.dtype)], dim=-1)

    x = _convolve(self, x, initial_states=conv_states[..., 1:].to(x.dtype))
    if keep is not None:
        x = x * keep
    before = ssm_states.to(_state_dtype(x))
    y, after = _scan(self, x, z, initial_states=before, return_final_states=True)
    conv_states.copy_(recent[..., -self.conv_kernel_size :])
    ssm_states.copy_(after)
    return self.out_proj(y)


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


def _scan(self: nn.Module, x: Tensor, z: Tensor, **boundaries):
    """Input-dependent dt, B and C, then the recurrence and the gate."""
    sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
    dt, B, C = self.x_proj(x).split(sizes, dim=-1)
    dt, dt_bias = _project_without_bias(self.dt_proj, dt)
    A = -torch.exp(self.A_log.to(_state_dtype(x)))
    silu = self.activation in ("silu", "swish")
    result = selective_scan(
        x,
        dt,
        A,
        B,
        C,
        D=self.D,
        z=z if silu else None,
        dt_bias=dt_bias,
        dt_softplus=True,
        **boundaries,
    )
    if silu:
        return result
    gate = self.act(z)
    return result * gate if isinstance(result, Tensor) else result._replace(y=result.y * gate)


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
