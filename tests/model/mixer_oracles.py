"""A Mamba-2 mixer on one document, written from the paper: a token and a head at a time."""

import torch
from torch import Tensor, nn


def mamba2_token_by_token(mixer: nn.Module, hidden_states: Tensor, **_: object) -> Tensor:
    """Mix the tokens of a document, ``(1, seqlen, hidden)``, of transformers or mamba_ssm."""
    weight = dict(mixer.named_parameters())
    dstate = _first(mixer, "d_state", "ssm_state_size")
    headdim = _first(mixer, "headdim", "head_dim")
    ngroups = _first(mixer, "ngroups", "n_groups")
    low, high = _first(mixer, "dt_limit", "time_step_limit")
    nheads, conv_dim = len(weight["A_log"]), len(weight["conv1d.weight"])
    dim = nheads * headdim
    gated_dim = (len(weight["in_proj.weight"]) - dim - conv_dim - nheads) // 2
    D = weight["D"].view(nheads, -1)

    taps = weight["conv1d.weight"][:, 0].T
    window = torch.zeros_like(taps)
    states = [taps.new_zeros(headdim, dstate)] * nheads
    out = []
    for token in hidden_states[0]:
        gate, gated, z, new, dt = (weight["in_proj.weight"] @ token).split(
            [gated_dim, gated_dim, dim, conv_dim, nheads]
        )
        window = torch.cat([window[1:], new[None]])
        xBC = _silu((window * taps).sum(0) + weight["conv1d.bias"])
        x, B, C = xBC.split([dim, ngroups * dstate, ngroups * dstate])
        x, B, C = x.view(nheads, headdim), B.view(ngroups, dstate), C.view(ngroups, dstate)
        step = torch.log1p(torch.exp(dt + weight["dt_bias"])).clamp(low, high)
        y = []
        for head in range(nheads):
            # neighbours share a group
            group = head // (nheads // ngroups)
            decay = torch.exp(-step[head] * torch.exp(weight["A_log"][head]))
            states[head] = decay * states[head] + step[head] * torch.outer(x[head], B[group])
            y.append(states[head] @ C[group] + D[head] * x[head])
        y = _gate_and_norm(mixer, torch.cat(y), z, weight.get("norm.weight"), dim // ngroups)
        out.append(weight["out_proj.weight"] @ torch.cat([_silu(gate) * gated, y]))
    return torch.stack(out)[None]


def _gate_and_norm(
    mixer: nn.Module, y: Tensor, z: Tensor, weight: Tensor | None, group_size: int
) -> Tensor:
    if weight is None:
        return y * _silu(z)
    eps = _first(mixer.norm, "eps", "variance_epsilon")
    norms_first = getattr(mixer.norm, "norm_before_gate", False)
    # a norm of mamba_ssm knows it, one of transformers does not
    group_size = getattr(mixer.norm, "group_size", group_size)
    if not norms_first:
        y = y * _silu(z)
    parts = [part / torch.sqrt((part**2).mean() + eps) for part in y.split(group_size)]
    y = torch.cat(parts) * weight
    return y * _silu(z) if norms_first else y


def _silu(t: Tensor) -> Tensor:
    return t * torch.sigmoid(t)


def _first(owner: nn.Module, *names: str) -> object:
    return next(getattr(owner, name) for name in names if hasattr(owner, name))
