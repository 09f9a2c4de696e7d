"""What dispatch_packed replaces, takes back and refuses."""

import copy

import pytest
import torch
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, MambaConfig, MambaForCausalLM

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.model.dispatch import token_mixers


@pytest.fixture
def model():
    config = MambaConfig(
        vocab_size=20, hidden_size=8, state_size=4, num_hidden_layers=3, use_cache=False
    )
    torch.manual_seed(0)
    return MambaForCausalLM(config)


def test_counts_what_it_replaced_and_undoes_it(model):
    other = copy.deepcopy(model)
    dispatched = dispatch_packed(model)
    assert dispatched.counts == {"MambaMixer": 3}
    with pytest.raises(RuntimeError, match="got none"):
        model(torch.tensor([[1, 2]]))
    # instances were patched, not the class
    other(torch.tensor([[1, 2]]))
    dispatched.undo()
    torch.testing.assert_close(
        model(torch.tensor([[1, 2]])).logits, other(torch.tensor([[1, 2]])).logits
    )


def test_a_second_dispatch_replaces_nothing_and_undo_still_finds_the_original(model):
    first = dispatch_packed(model)
    second = dispatch_packed(model)
    assert second.counts == {}
    second.undo()
    first.undo()
    assert "forward" not in model.backbone.layers[0].mixer.__dict__


def test_undo_gives_back_a_forward_that_somebody_else_had_put_there(model):
    mixer = model.backbone.layers[0].mixer

    def somebodys(*args, **kwargs):
        return None

    mixer.forward = somebodys
    dispatch_packed(model).undo()
    assert mixer.forward is somebodys


def test_a_copy_of_a_dispatched_model_uses_its_own_weights(model):
    dispatch_packed(model)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.zero_()
    with PackedLayout.from_lengths([3]).published():
        assert clone(torch.tensor([[1, 2, 3]])).logits.abs().max() == 0
        assert model(torch.tensor([[1, 2, 3]])).logits.abs().max() > 0


def test_a_dispatched_model_survives_pickling(model, tmp_path):
    dispatch_packed(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    with PackedLayout.from_lengths([2, 1]).published():
        input_ids = torch.tensor([[1, 2, 3]])
        assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)
    with pytest.raises(RuntimeError, match="got none"):
        loaded(input_ids)


def test_attention_without_a_varlen_path_is_refused_by_name():
    config = GPTNeoXConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    with pytest.raises(
        RuntimeError, match=r"GPTNeoXForCausalLM .* none for \['GPTNeoX\w*Attention'"
    ):
        dispatch_packed(GPTNeoXForCausalLM(config))


def test_a_hybrid_is_refused_unless_its_other_half_is_covered(model):
    class ToyAttention(nn.Module):
        pass

    model.extra = ToyAttention()
    with pytest.raises(RuntimeError, match=r"got none for \['ToyAttention'\]"):
        dispatch_packed(model)
    assert dispatch_packed(model, also_covered=["ToyAttention"]).counts == {"MambaMixer": 3}


def test_a_model_that_mixes_no_tokens_is_refused_with_what_was_seen():
    with pytest.raises(RuntimeError, match=r"Sequential must have .* \['Linear', 'Sequential'\]"):
        dispatch_packed(nn.Sequential(nn.Linear(2, 2)))


def test_token_mixers_finds_layers_by_class(model):
    assert {name: len(found) for name, found in token_mixers(model).items()} == {"MambaMixer": 3}


def test_a_layout_of_another_batch_is_refused(model):
    dispatch_packed(model)
    with (
        PackedLayout.from_lengths([2, 3]).published(),
        pytest.raises(RuntimeError, match=r"1 x 4 tokens, got 2 documents with 5 tokens"),
    ):
        model(torch.tensor([[1, 2, 3, 4]]))
    with (
        PackedLayout.from_lengths([2, 6]).published(),
        pytest.raises(RuntimeError, match=r"none at \[4\] of 2 rows x 4 tokens"),
    ):
        model(torch.ones(2, 4, dtype=torch.long))


def test_an_attention_mask_is_refused_with_packs(model):
    dispatch_packed(model)
    with (
        PackedLayout.from_lengths([2]).published(),
        pytest.raises(RuntimeError, match=r"attention_mask must be None .* \(1, 2\)"),
    ):
        model(torch.tensor([[1, 2]]), attention_mask=torch.ones(1, 2))


def test_a_cache_is_refused_with_packs(model):
    dispatch_packed(model)
    model.eval()
    with (
        PackedLayout.from_lengths([2]).published(),
        pytest.raises(RuntimeError, match="use_cache must be False"),
    ):
        model(torch.tensor([[1, 2]]), use_cache=True)


def test_a_layout_on_another_device_is_refused(model):
    dispatch_packed(model)
    layout = PackedLayout.from_lengths([2])
    with (
        layout.to("meta").published(),
        pytest.raises(RuntimeError, match=r"must be on cpu, got meta; publish layout.to\('cpu'\)"),
    ):
        model(torch.tensor([[1, 2]]))
