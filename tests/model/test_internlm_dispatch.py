"""Attention of InternLM and InternLM2 on packs, by stand-ins: their code comes from the Hub."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.testing import relative_rms

LENGTHS = [5, 1, 7]
DIM, HEADS, KEY_HEADS = 16, 4, 2
HEADDIM = DIM // HEADS


def angles(positions):
    frequencies = 10.0 ** -torch.arange(HEADDIM // 2).double()
    half = positions[..., None] * frequencies
    whole = torch.cat([half, half], dim=-1)
    return whole.cos(), whole.sin()


class TableRotary(nn.Module):
    max_position_embeddings = 8

    def forward(self, x, seq_len=None):
        return angles(torch.arange(seq_len))


class Rotary(nn.Module):
    max_position_embeddings = 8

    def forward(self, x, position_ids):
        return angles(position_ids)


class DynamicTableRotary(TableRotary):
    pass


class DynamicRotary(Rotary):
    pass


class InternLMAttention(nn.Module):
    head_dim = HEADDIM

    def __init__(self, rotary):
        super().__init__()
        self.config = SimpleNamespace()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM) for _ in range(4))
        self.rotary_emb = rotary

    def forward(self, x, attention_mask=None, position_ids=None, past_key_value=None, **kwargs):
        q, k, v = (
            torch.stack(projection(x).split(HEADDIM, dim=-1), dim=1)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        table = self.rotary_emb(v, seq_len=x.shape[1])
        q, k = apply_rotary_pos_emb(q, k, *(part[position_ids] for part in table))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.o_proj(y.transpose(1, 2).flatten(2)), None, past_key_value


class InternLM2Attention(nn.Module):
    """Laid out as the original: of each key head its two query heads, its key and its value."""

    num_key_value_heads, head_dim = KEY_HEADS, HEADDIM

    def __init__(self, rotary):
        super().__init__()
        self.config = SimpleNamespace(pretraining_tp=1)
        self.wqkv = nn.Linear(DIM, (HEADS + 2 * KEY_HEADS) * HEADDIM)
        self.wo = nn.Linear(DIM, DIM)
        self.rotary_emb = rotary

    def forward(self, x, attention_mask=None, position_ids=None, past_key_value=None, **kwargs):
        columns = self.wqkv(x).split(HEADDIM, dim=-1)
        q = torch.stack([columns[i] for i in (0, 1, 4, 5)], dim=1)
        k, v = (torch.stack([columns[i], columns[i + 4]], dim=1) for i in (2, 3))
        q, k = apply_rotary_pos_emb(q, k, *self.rotary_emb(v, position_ids))
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.wo(y.transpose(1, 2).flatten(2)), None, past_key_value


class InternLMModel(nn.Module):
    attention = InternLMAttention

    def __init__(self, rotary):
        super().__init__()
        self.config = SimpleNamespace(use_cache=False)
        self.layers = nn.ModuleList(self.attention(rotary) for _ in range(2))

    def _prepare_decoder_attention_mask(self, x):
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
    ):
        x = inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None]
        arguments = dict(position_ids=position_ids, past_key_value=past_key_values)
        mask = self._prepare_decoder_attention_mask(x)
        for layer in self.layers:
            x = x + layer(x, attention_mask=mask, use_cache=use_cache, **arguments)[0]
        return x


class InternLM2Model(InternLMModel):
    attention = InternLM2Attention

    def _update_causal_mask(self, x):
        return super()._prepare_decoder_attention_mask(x)

    def _prepare_decoder_attention_mask(self, x):
        return self._update_causal_mask(x)


FAMILIES = [(InternLMModel, TableRotary), (InternLM2Model, Rotary)]
both = pytest.mark.parametrize(("family", "rotary"), FAMILIES)


def build(family, rotary):
    torch.manual_seed(0)
    return family(rotary()).double()


def make_inputs(lengths=LENGTHS):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(1, sum(lengths), DIM, generator=draw, dtype=torch.float64)


def run_packed(model, x, lengths=LENGTHS):
    with PackedLayout.from_lengths(lengths).published():
        return model(inputs_embeds=x)


@both
def test_packed_equals_each_document_alone(family, rotary):
    packed, alone, x = build(family, rotary), build(family, rotary), make_inputs()
    assert dispatch_packed(packed).counts == {family.attention.__name__: 2}
    exact = torch.cat([alone(inputs_embeds=part) for part in x.split(LENGTHS, dim=1)], dim=1)
    assert relative_rms(run_packed(packed, x), exact) < 1e-12
    assert relative_rms(alone(inputs_embeds=x), exact) > 1e-2


@both
def test_a_cache_is_left_to_the_code_of_the_hub(family, rotary):
    packed, alone, x = build(family, rotary).eval(), build(family, rotary).eval(), make_inputs()
    dispatch_packed(packed)
    # a prompt, which has none yet, and what follows
    for cached in ({"use_cache": True}, {"past_key_values": "cache"}):
        theirs = alone(inputs_embeds=x, **cached)
        assert torch.equal(packed(inputs_embeds=x, **cached), theirs)
    with (
        PackedLayout.from_lengths(LENGTHS).published(),
        pytest.raises(RuntimeError, match="use_cache must be False"),
    ):
        packed.layers[0](x, past_key_value="cache")


@pytest.mark.parametrize(
    ("family", "rotary"), [(InternLMModel, DynamicTableRotary), (InternLM2Model, DynamicRotary)]
)
def test_documents_that_dynamic_rope_would_scale_are_refused(family, rotary):
    model = build(family, rotary)
    dispatch_packed(model)
    run_packed(model, make_inputs())
    with pytest.raises(RuntimeError, match=r"at most 8 tokens with the dynamic rope .* got 9; low"):
        run_packed(model, make_inputs([9]), [9])


def test_code_of_another_time_is_refused():
    with pytest.raises(RuntimeError, match=r"must take position_ids, got \['x', 'seq_len'\]; take"):
        dispatch_packed(build(InternLM2Model, TableRotary))
    with pytest.raises(RuntimeError, match=r"must take seq_len, got \['x', 'position_ids'\]; take"):
        dispatch_packed(build(InternLMModel, Rotary))


def test_split_projections_are_refused():
    model = build(*FAMILIES[1])
    model.layers[1].config.pretraining_tp = 2
    with pytest.raises(
        RuntimeError, match=r"pretraining_tp of InternLM2Attention must be 1, got 2"
    ):
        dispatch_packed(model)
