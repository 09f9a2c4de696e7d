"""Forward of the Mamba-2 mixers over packed documents.

Replaces that of ``Mamba2Mixer`` and ``BambaMixer`` of transformers 4.48, and that of mamba_ssm's
``Mamba2``. The projection *modules* are called, not their weights, so that a LoRA or a quantised
layer in their place acts.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtuner_mamba.model.dispatch.cached_rows import CachedRows, refuse_cache_with_packs
from xtuner_mamba.model.dispatch.mamba import Rows, convolve, mix_documents
from xtuner_mamba.ops import GatedNorm, ssd
from xtuner_mamba.ops.parts import split_parts


def mamba2_mixer_forward(
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
        return mix(self, self.in_proj(rows.mask(hidden_states)), rows=rows)
    return mix_documents(mix, self, hidden_states, attention_mask, recompute, checkpointed_by)


def mamba2_ssm_mixer_forward(
    self: nn.Module,
    u: Tensor,
    seqlen: int | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    inference_params=None,
    **options,
) -> Tensor:
    """Mix the tokens of every document on its own, in mamba_ssm's ``Mamba2``.

    As :func:`mamba2_mixer_forward`; generation is left to mamba_ssm.

    Raises:
        RuntimeError: Boundaries come as arguments, too.
    """
    for name, given in (("seqlen", seqlen), ("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)):
        if given is not None:
            raise RuntimeError(
                f"{name} of a dispatched Mamba2 must be None, got {given}; its documents are those "
                "of the published layout: PackedLayout.from_lengths(...).published()"
            )
    if inference_params is None:
        return mamba2_mixer_forward(self, u, **options)
    refuse_cache_with_packs()
    return type(self).forward(self, u, inference_params=inference_params)


class _Settings(NamedTuple):
    """What the families call by different names."""

    dim: int
    headdim: int
    ngroups: int
    dstate: int
    dt_limit: tuple[float, float]
    norm: GatedNorm | None


def _settings(self: nn.Module, family: str) -> _Settings:
    if family == "Mamba2":
        return _Settings(
            self.d_ssm,
            self.headdim,
            self.ngroups,
            self.d_state,
            self.dt_limit,
            # there may be a gate alone
            GatedNorm(self.norm.weight, self.norm.eps, self.norm_before_gate)
            if self.rmsnorm
            else None,
        )
    return _Settings(
        self.num_heads * self.head_dim,
        self.head_dim,
        self.n_groups,
        self.ssm_state_size,
        self.time_step_limit,
        GatedNorm(self.norm.weight, self.norm.variance_epsilon),
    )


def _mix(
    self: nn.Module,
    projected: Tensor,
    *,
    family: str,
    cu_seqlens: Tensor | None = None,
    rows: Rows | None = None,
) -> Tensor:
    settings = _settings(self, family)
    nheads = settings.dim // settings.headdim
    conv_dim = settings.dim + 2 * settings.ngroups * settings.dstate
    # mamba_ssm may leave some channels to a gate alone
    gated_dim = (projected.shape[-1] - settings.dim - conv_dim - nheads) // 2
    (gate, gated, z, xBC, dt), (_, _, dz_out, dconv_out, _) = split_parts(
        projected, [gated_dim, gated_dim, settings.dim, conv_dim, nheads]
    )
    xBC = convolve(self, xBC, cu_seqlens=cu_seqlens, rows=rows, dx_out=dconv_out)
    (x, B, C), dxBC_out = split_parts(
        xBC, [settings.dim, *2 * [settings.ngroups * settings.dstate]]
    )
    y = ssd(
        x.unflatten(-1, (nheads, settings.headdim)),
        dt,
        -torch.exp(self.A_log.to(torch.promote_types(x.dtype, torch.float32))),
        B.unflatten(-1, (settings.ngroups, settings.dstate)),
        C.unflatten(-1, (settings.ngroups, settings.dstate)),
        # one a head, or one a channel
        D=self.D if len(self.D) == nheads else self.D.view(nheads, settings.headdim),
        z=z.unflatten(-1, (nheads, settings.headdim)),
        norm=settings.norm,
        dt_bias=self.dt_bias,
        dt_softplus=True,
        dt_limit=tuple(settings.dt_limit),
        cu_seqlens=cu_seqlens,
        initial_states=None if rows is None else rows.initial_ssm_states(),
        return_final_states=rows is not None,
        dxBC_out=dxBC_out,
        dz_out=dz_out,
    )
    if rows is not None:
        y, final_states = y
        rows.keep_ssm_states(final_states)
    y = y.flatten(2)
    if gated_dim:
        y = torch.cat([F.silu(gate) * gated, y], dim=-1)
    return self.out_proj(y)
