"""What dispatch_packed replaces, takes back and refuses."""

import copy
import logging
from functools import partial

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from attention_families import FAMILIES as ATTENTION_FAMILIES
from family_proof import draw_tokens
from mixer_families import FAMILIES as MIXER_FAMILIES
from mixer_families import make_bamba, make_falcon_mamba, make_mamba2, make_zamba
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parametrize
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, MambaConfig, MambaForCausalLM

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.model.dispatch import is_dispatched, token_mixers

FAMILIES = MIXER_FAMILIES | ATTENTION_FAMILIES


@pytest.fixture
def model():
    config = MambaConfig(
        vocab_size=20, hidden_size=8, state_size=4, num_hidden_layers=3, use_cache=False
    )
    torch.manual_seed(0)
    return MambaForCausalLM(config)


@pytest.mark.parametrize("switch", ["fuse_norm", "recompute"])
@pytest.mark.parametrize("value", ["yes", 0])
def test_a_switch_that_is_no_bool_is_refused_and_nothing_is_dispatched(model, switch, value):
    with pytest.raises(ValueError, match=f"^{switch} must be None, True or False, got {value!r}; "):
        dispatch_packed(model, **{switch: value})
    assert not is_dispatched(model.backbone.layers[0].mixer)


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


def test_undone_twice_is_undone_once(model):
    dispatched = dispatch_packed(model)
    dispatched.undo()
    again = dispatch_packed(model)
    dispatched.undo()
    assert is_dispatched(model.backbone.layers[0].mixer)
    again.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_undo_loses_nothing_that_came_later(model):
    first = dispatch_packed(model)
    second = dispatch_packed(model, recompute=True)
    with pytest.raises(RuntimeError, match=r"of MambaMixer must .* mamba_mixer_forward .* second"):
        first.undo()
    second.undo()
    mixer = model.backbone.layers[-1].mixer
    ours = mixer.forward
    mixer.forward = wrapper = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(RuntimeError, match=r"forward of MambaMixer must .*<lambda>"):
        first.undo()
    assert mixer.forward is wrapper
    # nothing was taken back of what came before that layer
    assert is_dispatched(model.backbone.layers[0].mixer)


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


@pytest.mark.parametrize(
    "layer", [nn.LSTM(8, 8), nn.GRU(8, 8), nn.RNN(8, 8), nn.Conv1d(8, 8, 4)], ids=type
)
def test_recurrences_and_convolutions_are_refused_whatever_is_around_them(model, layer):
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

    model.extra = Memory()
    with pytest.raises(RuntimeError, match=rf"got none for \['{type(layer).__name__}'\]"):
        dispatch_packed(model)
    assert not is_dispatched(model.backbone.layers[0].mixer)
    assert dispatch_packed(model, also_covered=["Memory"]).counts == {"MambaMixer": 3}


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile], ids=["FSDP", "compile"])
def test_a_known_mixer_inside_another_layer_is_dispatched(model, wrap):
    for layer in model.backbone.layers:
        layer.mixer = wrap(layer.mixer)
    assert dispatch_packed(model).counts == {"MambaMixer": 3}


def test_a_copy_of_a_layer_copies_nothing_around_it(model):
    dispatch_packed(model)
    layer = copy.deepcopy(model.backbone.layers[1])
    whole = copy.deepcopy(model)
    for block, backbone in ((layer, model.backbone), (whole.backbone.layers[1], whole.backbone)):
        assert block.forward.keywords["place"] == (backbone, 1)
        assert block.mixer.forward.keywords["checkpointed_by"] == (backbone,)
        assert block.mixer.forward.args == (block.mixer,)


def test_a_convolution_over_one_token_mixes_none(model):
    model.extra = nn.Conv1d(8, 8, 1)
    assert dispatch_packed(model).counts == {"MambaMixer": 3}


def test_refusals_do_not_list_what_there_is(model):
    model.extra = nn.MultiheadAttention(8, 2)
    for refused in (model, nn.Linear(2, 2)):
        with pytest.raises(RuntimeError, match=r"docs/families\.md$") as error:
            dispatch_packed(refused)
        assert len(str(error.value)) < 400


def logits_on_packs(model, tokens, layout):
    with torch.no_grad(), layout.published():
        return model(tokens).logits


def parametrize_all(model):
    """Let PyTorch rename the class of every layer that is not its own."""
    for layer in list(model.modules()):
        if not type(layer).__module__.startswith("torch."):
            layer.register_buffer("of_each_layer", torch.zeros(1))
            names = [name for name, _ in layer.named_parameters(recurse=False)]
            for name in (*names, "of_each_layer"):
                parametrize.register_parametrization(layer, name, nn.Identity())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_class_that_is_renamed_computes_what_it_did(name):
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    tokens, layout = draw_tokens(model.config.vocab_size), PackedLayout.from_lengths([5, 17, 12])
    late = copy.deepcopy(model)
    counts = dispatch_packed(model).counts
    expected = logits_on_packs(model, tokens, layout)
    parametrize_all(model)
    assert all(
        type(mixer).__name__ == f"Parametrized{found}"
        for found, mixers in token_mixers(model).items()
        for mixer in mixers
    )
    assert torch.equal(logits_on_packs(model, tokens, layout), expected)
    assert dispatch_packed(model).counts == {}
    assert {found: len(layers) for found, layers in token_mixers(model).items()} == counts
    parametrize_all(late)
    assert dispatch_packed(late).counts == counts
    assert torch.equal(logits_on_packs(late, tokens, layout), expected)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("shards_first", [True, False])
@pytest.mark.parametrize("build", [make_falcon_mamba, make_zamba, make_bamba])
def test_a_model_may_be_sharded_before_or_after(build, shards_first):
    torch.manual_seed(0)
    model = build().eval()
    tokens, layout = draw_tokens(model.config.vocab_size), PackedLayout.from_lengths([5, 17, 12])
    plain = copy.deepcopy(model)
    dispatch_packed(plain)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        steps = [partial(dispatch_packed, model), partial(shard_mixers, model)]
        for step in reversed(steps) if shards_first else steps:
            step()
        assert any(isinstance(module, FSDPModule) for module in model.modules())
        actual = logits_on_packs(model, tokens, layout)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(actual, logits_on_packs(plain, tokens, layout))


def shard_mixers(model):
    mesh = init_device_mesh("cpu", (1,))
    for mixers in token_mixers(model).values():
        for mixer in mixers:
            fully_shard(mixer, mesh=mesh)


def test_peft_may_adapt_a_parameter_of_a_dispatched_mixer():
    torch.manual_seed(0)
    model = make_falcon_mamba().eval()
    tokens, layout = draw_tokens(model.config.vocab_size), PackedLayout.from_lengths([5, 17, 12])
    dispatch_packed(model)
    expected = logits_on_packs(model, tokens, layout)
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=["in_proj"], target_parameters=["A_log"])
    )
    # an adapter starts as 0
    torch.testing.assert_close(logits_on_packs(adapted, tokens, layout), expected)


def test_a_subclass_of_somebody_elses_is_not_taken_for_its_parent(model):
    mixer = model.backbone.layers[0].mixer
    mixer.__class__ = type("OtherMambaMixer", (type(mixer),), {"__module__": "somebodys"})
    with pytest.raises(RuntimeError, match=r"got none for \['OtherMambaMixer'\]"):
        dispatch_packed(model)


class Counting(ModelHook):
    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


def test_hooks_of_accelerate_go_on_running(model):
    tokens, layout = torch.tensor([[1, 2, 3, 4]]), PackedLayout.from_lengths([3, 1])
    plain = copy.deepcopy(model)
    dispatch_packed(plain)
    expected = logits_on_packs(plain, tokens, layout)
    # as a model in 4 bits gets them from transformers
    dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    hook, mixer = Counting(), model.backbone.layers[1].mixer
    add_hook_to_module(mixer, hook)
    hooked = mixer.forward
    dispatched = dispatch_packed(model)
    assert dispatched.counts == {"MambaMixer": 3}
    assert is_dispatched(mixer)
    assert torch.equal(logits_on_packs(model, tokens, layout), expected)
    assert hook.calls == 1
    assert dispatch_packed(model).counts == {}
    dispatched.undo()
    assert mixer.forward is hooked
    model(tokens)
    dispatch_packed(model)
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(logits_on_packs(model, tokens, layout), expected)


def test_offloaded_weights_are_refused(model):
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"MambaForCausalLM may be .* got backbone\.embeddings"):
        dispatch_packed(model)


@pytest.mark.parametrize(
    ("build", "groups"),
    [
        (partial(make_mamba2, n_groups=2), "Mamba2Mixer has n_groups=2"),
        (partial(make_bamba, mamba_n_groups=4), "BambaMixer has n_groups=4"),
        (make_mamba2, None),
        (make_bamba, None),
    ],
)
def test_says_where_transformers_computes_groups_otherwise(build, groups, caplog):
    with caplog.at_level(logging.WARNING, logger="xtuner_mamba"):
        dispatch_packed(build())
    said = [record.getMessage() for record in caplog.records if "n_groups" in record.getMessage()]
    assert len(said) == (groups is not None)
    assert all(groups in message for message in said)


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
