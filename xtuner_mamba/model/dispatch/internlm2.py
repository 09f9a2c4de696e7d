"""Attention of InternLM2 over packed documents; its code comes from the Hub, with the weights."""

import inspect

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from xtuner_mamba.layout import current_layout
from xtuner_mamba.model.dispatch.attention import packed_attention
from xtuner_mamba.model.dispatch.cached_rows import refuse_cache_with_packs


def internlm2_attention_forward(
    self: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_value=None,
    output_attentions: bool = False,
    **kwargs: object,
) -> tuple[Tensor, None, None]:
    """Do what the attention of InternLM2 does, with :func:`packed_attention`.

    Raises:
        RuntimeError: A document is longer than the positions that the rotary embedding has without
            scaling, which it would do for all documents from then on.
    """
    if past_key_value is not None:
        refuse_cache_with_packs()
        return type(self).forward(
            self,
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            output_attentions=output_attentions,
            **kwargs,
        )
    _refuse_scaling(self.rotary_emb)
    # of each key head its query heads, then the key and the value
    heads = self.wqkv(hidden_states).unflatten(-1, (self.num_key_value_heads, -1, self.head_dim))
    q = heads[..., :-2, :].flatten(2, 3).transpose(1, 2)
    k, v = (heads[..., i, :].transpose(1, 2) for i in (-2, -1))
    q, k = apply_rotary_pos_emb(q, k, *self.rotary_emb(v, position_ids))
    y, _ = packed_attention(self, q, k, v, attention_mask, output_attentions=output_attentions)
    return self.wo(y.flatten(2)), None, None


def check_attention(layer: nn.Module) -> None:
    """Check that the code of a layer is of 2024 or later, and not split for tensor parallelism.

    Raises:
        RuntimeError: It is not.
    """
    arguments = list(inspect.signature(layer.rotary_emb.forward).parameters)
    if "position_ids" not in arguments:
        raise RuntimeError(
            f"the rotary embedding of {type(layer).__name__} must take position_ids, got "
            f"{arguments}; take the model's current code from the Hub"
        )
    if layer.config.pretraining_tp > 1:
        raise RuntimeError(
            f"pretraining_tp of {type(layer).__name__} must be 1, got "
            f"{layer.config.pretraining_tp}; set it in the model's config"
        )


def _refuse_scaling(rotary: nn.Module) -> None:
    layout = current_layout()
    if layout is None or "Dynamic" not in type(rotary).__name__:
        return
    if layout.max_seqlen > rotary.max_position_embeddings:
        raise RuntimeError(
            f"documents must have at most {rotary.max_position_embeddings} tokens with the dynamic "
            f"rope of InternLM2, got {layout.max_seqlen}; lower max_length, or set "
            "model.config.rope_scaling"
        )
