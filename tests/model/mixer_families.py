"""Tiny random models of every family with a state space mixer, built offline from their configs.

``FAMILIES`` maps a name to a function without arguments that builds the model; whoever calls it
seeds PyTorch, perturbs the parameters and chooses the dtype.
"""

from collections.abc import Callable

from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    ZambaConfig,
    ZambaForCausalLM,
)

VOCAB = 50
_COMMON = dict(vocab_size=VOCAB, hidden_size=16, use_cache=False, pad_token_id=None)
_PURE = dict(state_size=5, conv_kernel=4, num_hidden_layers=2)
_MAMBA_OF_HYBRID = dict(mamba_d_state=5, mamba_d_conv=4, mamba_expand=2)
_ATTENTION_OF_HYBRID = dict(intermediate_size=24, num_attention_heads=4, num_key_value_heads=2)
# the models alone stand for transformers' own definition of attention
_EAGER = dict(attn_implementation="eager")


def make_mamba(**settings: object) -> PreTrainedModel:
    """Two layers of Mamba-1."""
    return MambaForCausalLM(MambaConfig(**{**_COMMON, **_PURE, **settings}))


def make_falcon_mamba(**settings: object) -> PreTrainedModel:
    """Two layers of Mamba-1 whose dt, B and C are normed."""
    return FalconMambaForCausalLM(FalconMambaConfig(**{**_COMMON, **_PURE, **settings}))


def make_jamba(**settings: object) -> PreTrainedModel:
    """Mamba-1 with norms, attention in layer 1 of 4, experts in every second."""
    config = JambaConfig(
        **{**_COMMON, **settings},
        **_MAMBA_OF_HYBRID,
        **_ATTENTION_OF_HYBRID,
        **_EAGER,
        mamba_dt_rank=3,
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        use_mamba_kernels=False,
    )
    return JambaForCausalLM(config)


def make_zamba(**settings: object) -> PreTrainedModel:
    """Mamba-1 with two heads, and one attention layer that two of the six layers share."""
    config = ZambaConfig(
        **{**_COMMON, **settings},
        **_MAMBA_OF_HYBRID,
        **{**_ATTENTION_OF_HYBRID, "num_key_value_heads": 4},
        **_EAGER,
        mamba_dt_rank=3,
        n_mamba_heads=2,
        num_hidden_layers=6,
        attn_layer_period=3,
        attn_layer_offset=1,
        use_mamba_kernels=False,
    )
    return ZambaForCausalLM(config)


def make_mamba2(**settings: object) -> PreTrainedModel:
    """Two layers of Mamba-2, with limits that some of the step sizes exceed."""
    config = Mamba2Config(
        **{**_COMMON, "n_groups": 1, "time_step_limit": (0.1, 1.5), **settings},
        **_PURE,
        num_heads=4,
        head_dim=8,
        chunk_size=8,
    )
    return Mamba2ForCausalLM(config)


def make_bamba(**settings: object) -> PreTrainedModel:
    """Mamba-2, and attention with rotary positions in layer 1 of 3."""
    config = BambaConfig(
        **{**_COMMON, **settings},
        **_MAMBA_OF_HYBRID,
        **_ATTENTION_OF_HYBRID,
        **_EAGER,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_chunk_size=8,
        num_hidden_layers=3,
        attn_layer_indices=[1],
    )
    return BambaForCausalLM(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "Mamba": make_mamba,
    "Falcon-Mamba": make_falcon_mamba,
    "Jamba": make_jamba,
    "Zamba": make_zamba,
    "Mamba-2": make_mamba2,
    "Bamba": make_bamba,
}
