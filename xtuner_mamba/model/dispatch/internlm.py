"""Attention of InternLM and InternLM2 over packed documents.

Their code comes from the Hub, with the weights. Every layer has a rotary embedding of its own, and
the first InternLM's has a table of all positions.
"""

import inspect

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from xtuner_mamba.layout import current_layout
from xtuner_mamba.model.dispatch.attention import packed_attention
from xtuner_mamba.model.dispatch.cached_rows import refuse_cache_with_packs
from xtuner_mamba.model.dispatch.class_name import class_name
from xtuner_mamba.model.dispatch.mamba import layout_of


def internlm_attention_forward(
    self: nn.Module,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: object,
) -> tuple[Tensor, None, None]:
    """Do what the attention of InternLM does, with :func:`packed_attention`; all with a cache.

    Raises:
        RuntimeError: A document is longer than the positions that the rotary embedding has without
            scaling, which it would do for all documents from then on.
    """
    arguments = dict(attention_mask=attention_mask, position_ids=position_ids)
    if _caches(**kwargs):
        arguments["output_attentions"] = output_attentions
        return type(self).forward(self, hidden_states, **arguments, **kwargs)
    q, k, v = (
        projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    _refuse_scaling(self.rotary_emb)
    table = self.rotary_emb(v, seq_len=layout_of(hidden_states).max_seqlen)
    q, k = apply_rotary_pos_emb(q, k, *(part[position_ids] for part in table))
    y, _ = packed_attention(self, q, k, v, attention_mask, output_attentions=output_attentions)
    return self.o_proj(y.flatten(2)), None, None


def internlm2_attention_forward(
    self: nn.Module,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: object,
) -> tuple[Tensor, None, None]:
    """Do what the attention of InternLM2 does; see :func:`internlm_attention_forward`."""
    arguments = dict(attention_mask=attention_mask, position_ids=position_ids)
    if _caches(**kwargs):
        arguments["output_attentions"] = output_attentions
        return type(self).forward(self, hidden_states, **arguments, **kwargs)
    # of each key head its query heads, then the key and the value
    heads = self.wqkv(hidden_states).unflatten(-1, (self.num_key_value_heads, -1, self.head_dim))
    q = heads[..., :-2, :].flatten(2, 3).transpose(1, 2)
    k, v = (heads[..., i, :].transpose(1, 2) for i in (-2, -1))
    _refuse_scaling(self.rotary_emb)
    q, k = apply_rotary_pos_emb(q, k, *self.rotary_emb(v, position_ids))
    y, _ = packed_attention(self, q, k, v, attention_mask, output_attentions=output_attentions)
    return self.wo(y.flatten(2)), None, None


def check_attention(layer: nn.Module) -> None:
    """Check that a layer's code is what these forwards stand for.

    Raises:
        RuntimeError: It is of another time, or split for tensor parallelism.
    """
    name = class_name(layer)
    wanted = "position_ids" if name.startswith("InternLM2") else "seq_len"
    arguments = list(inspect.signature(layer.rotary_emb.forward).parameters)
    if wanted not in arguments:
        raise RuntimeError(
            f"the rotary embedding of {name} must take {wanted}, got {arguments}; take the "
            "model's current code from the Hub"
        )
    ways = getattr(layer.config, "pretraining_tp", 1)
    if ways > 1:
        raise RuntimeError(
            f"pretraining_tp of {name} must be 1, got {ways}; set it in the model's config"
        )


def _caches(past_key_value=None, use_cache: bool = False, **kwargs: object) -> bool:
    if past_key_value is None and not use_cache:
        return False
    refuse_cache_with_packs()
    return True


def _refuse_scaling(rotary: nn.Module) -> None:
    layout = current_layout()
    if layout is None or "Dynamic" not in type(rotary).__name__:
        return
    if layout.max_seqlen > rotary.max_position_embeddings:
        raise RuntimeError(
            f"documents must have at most {rotary.max_position_embeddings} tokens with the dynamic "
            f"rope of InternLM, got {layout.max_seqlen}; lower max_length, or load the model with "
            "another rope"
        )
