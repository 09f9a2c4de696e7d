"""Attention layers of transformers 4.48, and the decoders around them, over packed documents.

Projections, rotary embeddings and caches stay transformers' own code. Newer classes take their
attention function from ``ALL_ATTENTION_FUNCTIONS``, where ours has an entry; the two older ones
(Jamba, Qwen2-MoE) get a forward that calls it.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2_moe.modeling_qwen2_moe import apply_rotary_pos_emb

from xtuner_mamba.layout import current_layout
from xtuner_mamba.model.dispatch.cached_rows import refuse_cache_with_packs
from xtuner_mamba.model.dispatch.class_name import original_class
from xtuner_mamba.model.dispatch.mamba import layout_of
from xtuner_mamba.ops import attention

_IMPLEMENTATION = "xtuner_mamba"
# the last one is InternLM's
_MASKS = ("_update_causal_mask", "_update_mamba_mask", "_prepare_decoder_attention_mask")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    output_attentions: bool = False,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend within the documents of the published layout, as an attention function.

    Args:
        module: The attention layer.
        query: ``(batch, nheads, seqlen, headdim)``.
        key: ``(batch, nkvheads, seqlen, headdim)``.
        value: As ``key``.
        attention_mask: Must be ``None``.
        dropout: Must be 0.
        scaling: Of the scores.
        sliding_window: How many tokens each one sees, itself included.
        softcap: Bound of the scores.
        output_attentions: Must be ``False``.
        **kwargs: What transformers hands to every attention function.

    Returns:
        ``(batch, seqlen, nheads, headdim)``, and no attention weights.

    Raises:
        RuntimeError: No layout, or one of another batch; or what must not be is.
    """
    _refuse_dropout(module, dropout)
    if attention_mask is not None:
        _refuse_mask(attention_mask)
    if output_attentions:
        raise RuntimeError(
            "output_attentions must be False with packed documents, got True; no path forms the "
            "weights of a whole row: run the documents alone, before dispatch_packed"
        )
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    layout = layout_of(q)
    dtype = _computed_in(v)
    rows = (t.to(dtype).reshape(1, layout.total, *t.shape[2:]) for t in (q, k, v))
    y = attention(
        *rows,
        cu_seqlens=layout.cu_seqlens,
        scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return y.view(q.shape), None


ALL_ATTENTION_FUNCTIONS[_IMPLEMENTATION] = packed_attention


def attention_forward(
    self: nn.Module, hidden_states: Tensor, *, past_key_value=None, **kwargs: object
) -> tuple:
    """Run the class's own forward with :func:`packed_attention` in it; all of it with a cache."""
    if past_key_value is not None:
        refuse_cache_with_packs()
        return type(self).forward(self, hidden_states, past_key_value=past_key_value, **kwargs)
    with _implementation(self.config, _IMPLEMENTATION):
        return type(self).forward(self, hidden_states, **kwargs)


def older_attention_forward(
    self: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_value=None,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: object,
) -> tuple[Tensor, None, None]:
    """Do what the attention of Jamba and of Qwen2-MoE does, with :func:`packed_attention`."""
    if past_key_value is not None:
        refuse_cache_with_packs()
        kwargs |= dict(attention_mask=attention_mask, output_attentions=output_attentions)
        if position_embeddings is not None:
            kwargs["position_embeddings"] = position_embeddings
        return type(self).forward(self, hidden_states, past_key_value=past_key_value, **kwargs)
    q, k, v = (
        projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    if position_embeddings is not None:
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    # the mask of Qwen2-MoE has it in every layer, that of Jamba in none
    has_window = self.config.model_type == "qwen2_moe"
    y, _ = packed_attention(
        self,
        q,
        k,
        v,
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        sliding_window=self.config.sliding_window if has_window else None,
        output_attentions=output_attentions,
    )
    return self.o_proj(y.flatten(2)), None, None


def decoder_forward(
    self: nn.Module,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values=None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    **kwargs: object,
) -> tuple:
    """Run the class's own forward, with positions in documents and without a mask of the row.

    Positions are the layout's unless given. Without a layout only generation runs, as in
    transformers.

    Raises:
        RuntimeError: No layout, or one of another batch; or a layout and a cache or a mask.
    """
    tokens = input_ids if inputs_embeds is None else inputs_embeds
    inputs = dict(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)
    wants_cache = self.config.use_cache if use_cache is None else use_cache
    generates = not self.training and (wants_cache or past_key_values is not None)
    if current_layout() is None and generates:
        return type(self).forward(
            self,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **inputs,
        )
    layout = layout_of(tokens)
    if use_cache or past_key_values is not None:
        refuse_cache_with_packs()
    if attention_mask is not None:
        _refuse_mask(attention_mask)
    if position_ids is None:
        position_ids = layout.positions.view(tokens.shape[:2])
    with _without_masks(self):
        return type(self).forward(self, position_ids=position_ids, use_cache=False, **inputs)


def rotary_forward(self: nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the rotary embedding of every document by its own length, where lengths matter.

    Dynamic and long rope choose their frequencies by the longest position that they see, which
    may be of another document; and dynamic rope remembers it.
    """
    layout = current_layout()
    if layout is None or not ("dynamic" in self.rope_type or self.rope_type == "longrope"):
        return type(self).forward(self, x, position_ids)
    parts = []
    for positions in position_ids.reshape(1, -1).split(list(layout.lengths), dim=1):
        self.max_seq_len_cached = self.original_max_seq_len
        # transformers 4.48 leaves it where the model was built
        self.original_inv_freq = self.original_inv_freq.to(x.device)
        self.inv_freq = self.original_inv_freq
        parts.append(type(self).forward(self, x, positions))
    return tuple(torch.cat(part, dim=1).view(*position_ids.shape, -1) for part in zip(*parts))


def check_attention(layer: nn.Module) -> None:
    """Check that one of these forwards fits an attention layer, which was found by its name.

    Raises:
        RuntimeError: It is other code of the same name, or it drops weights.
    """
    own = original_class(layer)
    is_newer = "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(own.forward).__code__.co_names
    if not is_newer and not own.__module__.startswith("transformers.models."):
        raise RuntimeError(
            f"{own.__name__} must be that of transformers, or take its attention function from "
            f"ALL_ATTENTION_FUNCTIONS, got that of {own.__module__}; load the model without "
            "trust_remote_code, or train with use_varlen_attn=False"
        )
    _refuse_dropout(layer, layer.attention_dropout)


def _refuse_dropout(layer: nn.Module, dropout: float) -> None:
    if dropout:
        raise RuntimeError(
            f"attention_dropout of {type(layer).__name__} must be 0 with packed documents, got "
            f"{dropout}; load the model with attention_dropout=0.0"
        )


def _refuse_mask(attention_mask: Tensor) -> None:
    raise RuntimeError(
        "attention_mask must be None with packed documents, got one of shape "
        f"{tuple(attention_mask.shape)}; the layout alone says what belongs together"
    )


@contextmanager
def _without_masks(decoder: nn.Module) -> Iterator[None]:
    """Spare a decoder its masks for the time of its forward.

    That of attention is a square of the row, 2 GB for 32,768 tokens in bfloat16; for that of
    hybrids' mixers a GPU is waited for.
    """
    names = [name for name in _MASKS if hasattr(decoder, name)]
    for name in names:
        setattr(decoder, name, _no_mask)
    try:
        yield
    finally:
        for name in names:
            delattr(decoder, name)


def _no_mask(*args: object, **kwargs: object) -> None:
    return None


def _computed_in(value: Tensor) -> torch.dtype:
    """Dtype of the attention: rotary embeddings in float32 lift queries and keys above values."""
    device = value.device.type
    if torch.is_autocast_enabled(device) and value.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return value.dtype


@contextmanager
def _implementation(config: PretrainedConfig, name: str) -> Iterator[None]:
    # for the time of a layer: what transformers decides by it elsewhere stays as it was
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
