"""Forward of the Mamba-1 mixers over packed documents.

Replaces that of ``MambaMixer``, ``FalconMambaMixer``, ``JambaMambaMixer`` and ``ZambaMambaMixer``
of transformers 4.48, and that of mamba_ssm's ``Mamba``. The projection *modules* are called, not
their weights, so that a LoRA or a quantised layer in their place acts.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xtuner_mamba.layout import PackedLayout, current_layout
from xtuner_mamba.model.dispatch.cached_rows import CachedRows, refuse_cache_with_packs
from xtuner_mamba.model.dispatch.continued_rows import ContinuedRows
from xtuner_mamba.model.dispatch.kept_outputs import Kept, keep_outputs, project_once, take_outputs
from xtuner_mamba.ops import backward_follows, causal_conv1d, rms_norm, selective_scan
from xtuner_mamba.ops.parts import GradientPart, split_parts

Rows = CachedRows | ContinuedRows
"""Where states come from and go to, if not every sequence begins and ends here."""
# channels that in_proj makes: a narrower mixer keeps little, and waits for the host as it is
_MIN_RECOMPUTED = 4096


def mamba_mixer_forward(
    self: nn.Module,
    hidden_states: Tensor,
    cache_params=None,
    cache_position: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    family: str,
    recompute: bool | None = False,
    checkpointed_by: Sequence[nn.Module] = (),
) -> Tensor:
    """Mix the tokens of every document on its own, ``(batch, seqlen, hidden)`` in and out.

    Without a cache the published layout says where documents start; with one (generation) every
    row is a document that the cache continues. ``family``, the class that the mixer was built
    from, ``recompute`` and ``checkpointed_by`` are bound by ``dispatch_packed``.

    Raises:
        RuntimeError: No layout, one of another batch, or both a layout and a cache.
    """
    mix = partial(_mix, family=family)
    if cache_params is not None:
        rows = CachedRows(self, cache_params, cache_position, attention_mask)
        return mix(self, self.in_proj(hidden_states), rows=rows)
    return mix_documents(mix, self, hidden_states, attention_mask, recompute, checkpointed_by)


def mamba_ssm_mixer_forward(
    self: nn.Module, hidden_states: Tensor, inference_params=None, **options
) -> Tensor:
    """Mix the tokens of every document on its own, in mamba_ssm's ``Mamba``.

    As :func:`mamba_mixer_forward`; generation is left to mamba_ssm.
    """
    if inference_params is None:
        return mamba_mixer_forward(self, hidden_states, **options)
    refuse_cache_with_packs()
    return type(self).forward(self, hidden_states, inference_params=inference_params)


# -- what Mamba-1 and Mamba-2 share ---------------------------------------------------------------


def mix_documents(
    mix: Callable[..., Tensor],
    self: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    recompute: bool | None,
    checkpointed_by: Sequence[nn.Module],
) -> Tensor:
    """Run a mixer on the documents of the published layout.

    Args:
        mix: Everything after ``in_proj``; takes the mixer, what ``in_proj`` made,
            ``(1, total, projected)``, ``cu_seqlens`` and ``rows``.
        self: The mixer.
        hidden_states: ``(batch, seqlen, hidden)``.
        attention_mask: Must be ``None``.
        recompute: As in ``dispatch_packed``.
        checkpointed_by: Models whose own checkpointing makes ``recompute`` needless.

    Raises:
        RuntimeError: No layout, or one of another batch, or there is a mask.
    """
    layout = layout_of(hidden_states)
    if attention_mask is not None:
        raise RuntimeError(
            "attention_mask must be None with packed documents, got one of shape "
            f"{tuple(attention_mask.shape)}; the layout alone says what belongs together"
        )
    shape = hidden_states.shape
    if shape[0] != 1:
        hidden_states = hidden_states.reshape(1, layout.total, -1)
    projected = self.in_proj(hidden_states)
    # bound and not an argument, which a checkpoint would hand over as a tensor nobody has checked
    rows = None if layout.carried is None else ContinuedRows(self, layout)
    mix = partial(mix, self, cu_seqlens=layout.cu_seqlens, rows=rows)
    if _recomputes(self, projected, recompute, checkpointed_by):
        # recomputed, it stops where out_proj has its input
        y = checkpoint(
            mix,
            projected,
            use_reentrant=False,
            context_fn=_contexts_of_two_runs,
            # the second run keeps more
            determinism_check="none",
            # a device's generators take the host longer than a kernel
            preserve_rng_state=_may_draw(self),
        )
    else:
        y = mix(projected)
    return y if shape[0] == 1 else y.reshape(shape)


def _contexts_of_two_runs() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Let the first run keep what is small, and the second take it."""
    outputs = []
    return keep_outputs(outputs), _SecondRun(outputs)


class _SecondRun(AbstractContextManager):
    """May be entered again: a graph that is retained is recomputed for each backward."""

    def __init__(self, outputs: list[Kept]) -> None:
        self._outputs = outputs

    def __enter__(self) -> None:
        self._entered = ExitStack()
        self._entered.enter_context(take_outputs(self._outputs))
        self._entered.enter_context(backward_follows())

    def __exit__(self, *error) -> None:
        self._entered.__exit__(*error)


def convolve(
    self: nn.Module,
    x: Tensor,
    *,
    cu_seqlens: Tensor | None,
    rows: Rows | None,
    dx_out: GradientPart | None,
) -> Tensor:
    """Conv and activation, ``(batch, seqlen, dim)`` in and out."""
    return _convolve_for_two(self, x, cu_seqlens=cu_seqlens, rows=rows, dx_out=dx_out)[0]


def _convolve_for_two(
    self: nn.Module,
    x: Tensor,
    *,
    cu_seqlens: Tensor | None,
    rows: Rows | None,
    dx_out: GradientPart | None,
) -> tuple[Tensor, Tensor]:
    """As :func:`convolve`, the result once for each of two readers."""
    silu = self.activation in ("silu", "swish")
    if rows is not None:
        x = rows.mask(x)
    y, y_fork, final_states = causal_conv1d(
        x,
        self.conv1d.weight.squeeze(1),
        self.conv1d.bias,
        cu_seqlens=cu_seqlens,
        activation="silu" if silu else None,
        initial_states=None if rows is None else rows.initial_conv_states(x),
        return_final_states=rows is not None,
        fork=True,
        dx_out=dx_out,
    )
    if not silu:
        y = y_fork = self.act(y)
    if rows is not None:
        rows.keep_conv_states(x, final_states)
        y, y_fork = rows.mask(y), rows.mask(y_fork)
    return y, y_fork


def is_partitioned(parameter: Tensor) -> bool:
    """Tell whether DeepSpeed's ZeRO-3 owns a parameter, whole only while its module runs."""
    return hasattr(parameter, "ds_id")


def has_hooks(module: nn.Module) -> bool:
    """Tell whether somebody wants to know when a module runs, which must then be called."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


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
    self: nn.Module, projected: Tensor, recompute: bool | None, checkpointed_by: Sequence[nn.Module]
) -> bool:
    """Whether the backward runs ``mix`` again, instead of keeping what it made."""
    if recompute is None:
        recompute = projected.is_cuda and projected.shape[-1] >= _MIN_RECOMPUTED
    return (
        recompute
        and torch.is_grad_enabled()
        # ZeRO-3 would find modules running in the backward that it has not gathered
        and not is_partitioned(self.A_log)
        # once is enough
        and not any(model.gradient_checkpointing and model.training for model in checkpointed_by)
    )


def _is_plain(layer: nn.Module) -> bool:
    """Tell whether a projection is nothing but a product with its weight."""
    return type(layer) is nn.Linear and "forward" not in layer.__dict__ and not has_hooks(layer)


def _may_draw(self: nn.Module) -> bool:
    """Tell whether a layer in ``mix`` may draw random numbers, as the dropout of a LoRA does."""
    layers = (getattr(self, name, None) for name in ("x_proj", "dt_proj", "out_proj"))
    return not all(layer is None or _is_plain(layer) for layer in layers)


# -- Mamba-1 --------------------------------------------------------------------------------------


class _Head(NamedTuple):
    """What the scan of a head's channels takes besides x and z, under the scan's names."""

    dt: Tensor
    B: Tensor
    C: Tensor
    dt_bias: Tensor | None
    A_log: Tensor
    D: Tensor


def _mix(
    self: nn.Module,
    xz: Tensor,
    *,
    family: str,
    cu_seqlens: Tensor | None = None,
    rows: Rows | None = None,
) -> Tensor:
    if family == "ZambaMambaMixer":
        # channel by channel, the one next to the other
        x, z = xz.unflatten(-1, (-1, 2)).unbind(-1)
        dx_out = dz_out = None
    else:
        (x, z), (dx_out, dz_out) = split_parts(xz, 2 * [xz.shape[-1] // 2])
    x, x_fork = _convolve_for_two(self, x, cu_seqlens=cu_seqlens, rows=rows, dx_out=dx_out)
    if family == "ZambaMambaMixer":
        heads = _zamba_heads(self, x_fork)
    else:
        heads = [_head(self, x_fork, family)]
    # of several heads, or gated after the scan, the output is not yet out_proj's input
    is_last = len(heads) == 1 and self.activation in ("silu", "swish")
    weights = _weights_of(self.out_proj, x) if is_last else None
    if weights is None:
        y = _scan(self, heads, x, z, cu_seqlens=cu_seqlens, rows=rows, dz_out=dz_out)
        return self.out_proj(y)
    return _scan(
        self, heads, x, z, cu_seqlens=cu_seqlens, rows=rows, dz_out=dz_out,
        out_proj_weight=weights[0], out_proj_bias=weights[1],
    )  # fmt: skip


def _weights_of(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Return what a linear layer multiplies x with and adds, if nothing else must happen.

    A layer that stands in for a projection (LoRA, 4 bit) or has hooks is called as it is, and
    ZeRO-3 gathers the weight for that alone.
    """
    if not _is_plain(layer):
        return None
    # read once: a module looks for its parameters in Python
    weight, bias = layer.weight, layer.bias
    if is_partitioned(weight):
        return None
    device = x.device.type
    if torch.is_autocast_enabled(device):
        if torch.get_autocast_dtype(device) != x.dtype:
            return None
        weight = weight.to(x.dtype)
    elif weight.dtype != x.dtype:
        return None
    return weight, None if bias is None else bias.to(x.dtype)


def _scan(
    self: nn.Module,
    heads: list[_Head],
    x: Tensor,
    z: Tensor,
    *,
    cu_seqlens: Tensor | None,
    rows: Rows | None,
    dz_out: GradientPart | None,
    **out_proj: Tensor | None,
) -> Tensor:
    """Run the recurrence and the gate, head by head.

    ``dz_out`` is for a single head, as are the weights of ``out_proj``, which then follows.
    """
    silu = self.activation in ("silu", "swish")
    state_dtype = torch.promote_types(x.dtype, torch.float32)
    # to autograd a single chunk is a part, too, whose gradient it would copy
    x_heads, z_heads = ([t] if len(heads) == 1 else t.chunk(len(heads), dim=-1) for t in (x, z))
    states = None if rows is None else rows.initial_ssm_states()
    if states is None:
        states = len(heads) * [None]
    else:
        states = states.to(state_dtype).flatten(1, -2).chunk(len(heads), dim=1)
    ys, final_states = [], []
    for head, x_head, z_head, initial_states in zip(heads, x_heads, z_heads, states):
        result = selective_scan(
            x_head,
            head.dt,
            head.A_log.to(state_dtype),
            head.B,
            head.C,
            A_is_log=True,
            D=head.D,
            z=z_head if silu else None,
            dt_bias=head.dt_bias,
            dt_softplus=True,
            cu_seqlens=cu_seqlens,
            initial_states=initial_states,
            return_final_states=rows is not None,
            dz_out=dz_out,
            **out_proj,
        )
        if rows is not None:
            result, after = result
            final_states.append(after)
        ys.append(result)
    if rows is not None:
        rows.keep_ssm_states(torch.cat(final_states, dim=1))
    # one head's need no copy
    y = ys[0] if len(ys) == 1 else torch.cat(ys, dim=-1)
    return y if silu else y * self.act(z)


def _zamba_heads(self: nn.Module, x: Tensor) -> list[_Head]:
    heads = []
    weights = self.x_proj_weight, self.dt_proj_weight, self.dt_proj_bias, self.A_log, self.D
    for x_head, x_proj, dt_proj, dt_bias, A_log, D in zip(
        x.chunk(self.n_mamba_heads, dim=-1), *weights
    ):
        dt, B, C = _split_selection(F.linear(x_head, x_proj), A_log.shape[-1])
        heads.append(_Head(F.linear(dt, dt_proj), B, C, dt_bias, A_log, D))
    return heads


def _head(self: nn.Module, x: Tensor, family: str) -> _Head:
    weights = _weights_of(self.x_proj, x)
    weight = None if weights is None or weights[1] is not None else weights[0]
    selected = project_once(self.x_proj, x, weight)
    selection = _split_selection(selected, self.A_log.shape[-1])
    dt, B, C = _norm_selection(self, family, *selection)
    dt, dt_bias = _project_without_bias(self.dt_proj, dt)
    return _Head(dt, B, C, dt_bias, self.A_log, self.D)


def _split_selection(selection: Tensor, dstate: int) -> tuple[Tensor, Tensor, Tensor]:
    return selection.split([selection.shape[-1] - 2 * dstate, dstate, dstate], dim=-1)


def _norm_selection(
    self: nn.Module, family: str, dt: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm what depends on the input, where a family does."""
    if family == "FalconMambaMixer":
        # without a weight to learn
        weighted = ((t, t.new_ones(t.shape[-1]), self.rms_eps) for t in (dt, B, C))
    elif family == "JambaMambaMixer":
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
