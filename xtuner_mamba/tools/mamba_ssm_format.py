"""What mamba_ssm's ``MambaLMHeadModel`` and transformers call the same things.

Weights have the same shapes and layout in both, and but for one the same names.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Mamba2Config, MambaConfig, PretrainedConfig

_HEAD, _EMBEDDINGS = "lm_head.weight", "backbone.embeddings.weight"
_RENAMED = {"backbone.embedding.weight": _EMBEDDINGS}

# of a mixer: mamba_ssm's name, transformers' name, mamba_ssm's default
_MIXER_FIELDS = {
    "Mamba1": (
        ("d_state", "state_size", 16),
        ("d_conv", "conv_kernel", 4),
        ("expand", "expand", 2),
        ("dt_rank", "time_step_rank", "auto"),
        ("bias", "use_bias", False),
        ("conv_bias", "use_conv_bias", True),
    ),
    "Mamba2": (
        ("d_state", "state_size", 128),
        ("d_conv", "conv_kernel", 4),
        ("expand", "expand", 2),
        ("headdim", "head_dim", 64),
        ("chunk_size", "chunk_size", 256),
        ("dt_limit", "time_step_limit", (0.0, math.inf)),
        ("bias", "use_bias", False),
        ("conv_bias", "use_conv_bias", True),
    ),
}
# what begins a training, or chooses a kernel
_PASSED_OVER = {
    *("dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range", "conv_init"),
    *("use_fast_path", "use_mem_eff_path", "layer"),
}
# what transformers has one of only, by the place in mamba_ssm's config
_MUST_BE = {
    "rms_norm": (True, True),
    "d_intermediate": (0, 0),
    "attn_layer_idx": ([], []),
    "bidirectional": (False, False),
}
_MIXER_MUST_BE = {
    "ngroups": (1, 1),
    "rmsnorm": (True, True),
    "norm_before_gate": (False, False),
    "D_has_hdim": (False, False),
    "d_ssm": (None, None),
}


def is_mamba_ssm(config: Mapping[str, Any]) -> bool:
    """Tell whose ``config.json`` this is.

    Raises:
        ValueError: It is nobody's.
    """
    if "d_model" in config and "n_layer" in config:
        return True
    if config.get("model_type") in ("mamba", "mamba2"):
        return False
    raise ValueError(
        "config.json must be mamba_ssm's, with d_model and n_layer, or transformers', with the "
        f"model_type mamba or mamba2, got {config.get('model_type')!r} and {sorted(config)}"
    )


def config_from_mamba_ssm(config: Mapping[str, Any]) -> PretrainedConfig:
    """Write mamba_ssm's ``config.json`` as transformers'.

    Raises:
        ValueError: transformers has no such model.
    """
    mixer = dict(config.get("ssm_cfg") or {})
    layer = mixer.get("layer", "Mamba1")
    if layer not in _MIXER_FIELDS:
        raise ValueError(f"ssm_cfg.layer must be Mamba1 or Mamba2, got {layer!r}")
    _check(config, _MUST_BE, "")
    _check(mixer, _MIXER_MUST_BE if layer == "Mamba2" else {}, "ssm_cfg.")
    fields = {
        theirs: _without_list(mixer.pop(ours, default))
        for ours, theirs, default in _MIXER_FIELDS[layer]
    }
    unknown = set(mixer) - _PASSED_OVER - (set(_MIXER_MUST_BE) if layer == "Mamba2" else set())
    if unknown:
        raise ValueError(
            f"ssm_cfg must hold what transformers knows of a {layer}, got {sorted(unknown)}"
        )
    # what is left out has mamba_ssm's own default
    vocab_size = config.get("vocab_size", 50277)
    multiple = config.get("pad_vocab_size_multiple", 8)
    fields |= dict(
        hidden_size=config["d_model"],
        num_hidden_layers=config["n_layer"],
        # rounded up, since the weights are
        vocab_size=-(-vocab_size // multiple) * multiple,
        residual_in_fp32=config.get("residual_in_fp32", True),
        tie_word_embeddings=config.get("tie_embeddings", True),
        # GPT-NeoX's tokenizer has one special token
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    )
    if layer == "Mamba1":
        return MambaConfig(**fields, architectures=["MambaForCausalLM"])
    num_heads = fields["expand"] * fields["hidden_size"] // fields["head_dim"]
    return Mamba2Config(
        **fields, num_heads=num_heads, n_groups=1, architectures=["Mamba2ForCausalLM"]
    )


def config_to_mamba_ssm(config: PretrainedConfig) -> dict[str, Any]:
    """Write transformers' config as mamba_ssm's ``config.json``.

    Raises:
        ValueError: mamba_ssm has no such model.
    """
    layer = {"mamba": "Mamba1", "mamba2": "Mamba2"}[config.model_type]
    must_be = {"hidden_act": ("silu", "swish"), "layer_norm_epsilon": (1e-5,), "n_groups": (1,)}
    for name, values in must_be.items():
        if getattr(config, name, values[0]) not in values:
            raise ValueError(
                f"{name} must be {values[0]} in mamba_ssm's {layer}, got {getattr(config, name)}"
            )
    mixer = {"layer": layer}
    for ours, theirs, default in _MIXER_FIELDS[layer]:
        value = _without_list(getattr(config, theirs))
        if value != default:
            mixer[ours] = value
    written = {
        "d_model": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        # older mamba_ssm takes no layer
        "ssm_cfg": mixer if layer == "Mamba2" else {k: mixer[k] for k in mixer if k != "layer"},
        "rms_norm": True,
        "residual_in_fp32": config.residual_in_fp32,
        "fused_add_norm": True,
        # the vocabulary is rounded up already
        "pad_vocab_size_multiple": 1,
    }
    return written if config.tie_word_embeddings else written | {"tie_embeddings": False}


def weights_from_mamba_ssm(weights: Mapping[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """Name mamba_ssm's weights as transformers does; of tied ones only the embeddings are kept.

    Raises:
        ValueError: Head and embeddings are to be the same, and are not.
    """
    renamed = {_RENAMED.get(name, name): weight for name, weight in weights.items()}
    if tied and _HEAD in renamed:
        head = renamed.pop(_HEAD)
        if not torch.equal(head, renamed[_EMBEDDINGS]):
            raise ValueError(
                f"{_HEAD} must be the embeddings' weight where they are tied, got another; set "
                "tie_embeddings to false in config.json"
            )
    return renamed


def weights_to_mamba_ssm(weights: Mapping[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """Name transformers' weights as mamba_ssm does, which keeps tied ones under both names."""
    weights = dict(weights)
    if tied:
        weights[_HEAD] = weights[_EMBEDDINGS]
    back = {theirs: ours for ours, theirs in _RENAMED.items()}
    return {back.get(name, name): weight for name, weight in weights.items()}


def _without_list(value: Any) -> Any:
    # a pair in Python, which JSON has not
    return tuple(value) if isinstance(value, list) else value


def _check(config: Mapping[str, Any], must_be: dict, where: str) -> None:
    for name, (default, wanted) in must_be.items():
        value = config.get(name, default)
        # null, false, 0 and an empty list all say that there is none
        if (value or None) != (wanted or None):
            raise ValueError(
                f"{where}{name} must be {wanted} for transformers to have the model, got {value}"
            )
