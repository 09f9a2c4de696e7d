"""Tiny random models of every family with attention alone, built offline from their configs.

``FAMILIES`` maps a name to a function without arguments that builds the model; whoever calls it
seeds PyTorch, perturbs the parameters and chooses the dtype.
"""

from collections.abc import Callable
from functools import partial

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 50
_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=None,
)
_EXPERTS = dict(num_experts_per_tok=2)


def make(model_type: str, implementation: str = "eager", **settings) -> PreTrainedModel:
    """Build a model of transformers from its defaults, made tiny."""
    config = AutoConfig.for_model(model_type, **{**_COMMON, **settings})
    # the models alone stand for transformers' own definition of attention
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "Llama": partial(make, "llama"),
    "Mistral": partial(make, "mistral", sliding_window=4),
    "Mixtral": partial(make, "mixtral", sliding_window=4, num_local_experts=4, **_EXPERTS),
    "Qwen2": partial(make, "qwen2"),
    "Qwen2-MoE": partial(
        make,
        "qwen2_moe",
        use_sliding_window=True,
        sliding_window=4,
        num_experts=4,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
        **_EXPERTS,
    ),
    "Gemma": partial(make, "gemma", head_dim=6),
    "Gemma2": partial(
        make,
        "gemma2",
        head_dim=6,
        sliding_window=4,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=4.0,
        cache_implementation=None,
    ),
    "Phi-3": partial(make, "phi3", sliding_window=4),
    "Phi": partial(make, "phi"),
    "Cohere": partial(make, "cohere", use_qk_norm=True),
    "Cohere2": partial(
        make,
        "cohere2",
        sliding_window=4,
        sliding_window_pattern=2,
        cache_implementation=None,
    ),
    "Starcoder2": partial(make, "starcoder2", sliding_window=4),
    "GLM-4": partial(make, "glm", head_dim=8),
    "Granite": partial(make, "granite"),
    "OLMo": partial(make, "olmo", clip_qkv=0.8),
    "OLMo-2": partial(make, "olmo2"),
}
