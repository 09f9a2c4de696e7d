"""LoRA on a dispatched Mamba: every target acts and learns, packed as alone, merged as adapted."""

import re
from pathlib import Path

import pytest
import torch
from mixer_families import FAMILIES
from mmengine import ConfigDict
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import PackedSupervisedFinetune, dispatch_packed
from xtuner_mamba.model.lora import calls_out_proj, default_targets
from xtuner_mamba.model.loss import packed_token_loss
from xtuner_mamba.testing import relative_rms

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# kernels take no float64; transformers rounds norms, residuals and logits to float32 anyway
DTYPE, TOLERANCE = (torch.float32, 1e-4) if GPU else (torch.float64, 1e-6)
VOCAB = 20
LENGTHS = [5, 1, 9, 2]
PROJECTIONS = ["dt_proj", "in_proj", "out_proj", "x_proj"]


def make_model(dtype=DTYPE, **overrides) -> MambaForCausalLM:
    settings = dict(vocab_size=VOCAB, hidden_size=8, state_size=4, num_hidden_layers=2)
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(**{**settings, "use_cache": False, **overrides}))
    with torch.no_grad():
        # away from values that are the same in every layer, or that rounding leaves alone
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "D")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name.endswith(("embeddings.weight", "x_proj.weight")):
                parameter.mul_(10)
    return model.to(DEVICE, dtype)


def adapt(model: MambaForCausalLM, targets: list[str]) -> nn.Module:
    """Wrap it with adapters that are not zero."""
    model = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    draw = torch.Generator().manual_seed(1)
    for parameter in adapters(model).values():
        value = torch.randn(parameter.shape, generator=draw)
        parameter.data.copy_(0.3 * value)
    return model


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def make_tokens() -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randint(0, VOCAB, (1, sum(LENGTHS)), generator=draw).to(DEVICE)


def packed_logits(model, input_ids):
    with PackedLayout.from_lengths(LENGTHS).to(DEVICE).published(), torch.no_grad():
        return model(input_ids).logits


def with_weights_changed(model: nn.Module, targets: list[str]) -> MambaForCausalLM:
    """The same model as transformers alone would run it: the adapters' products added by hand."""
    plain = make_model(tie_word_embeddings="embeddings" not in targets)
    weights = plain.state_dict()
    trained = adapters(model)
    scaling = LoraConfig(r=2).lora_alpha / 2
    changed = 0
    for name in weights:
        path = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{path}.lora_A.default.weight" in trained:
            A, B = (trained[f"{path}.lora_{i}.default.weight"] for i in "AB")
            weights[name] += scaling * (B @ A).detach()
            changed += 1
        elif f"{path}.lora_embedding_A.default" in trained:
            A, B = (trained[f"{path}.lora_embedding_{i}.default"] for i in "AB")
            weights["lm_head.weight"] = weights[name].clone()
            weights[name] += scaling * (B @ A).T.detach()
            changed += 1
    assert changed == len(trained) / 2
    plain.load_state_dict(weights)
    return plain


@pytest.mark.parametrize("target", [*PROJECTIONS, "embeddings"])
def test_every_target_acts_and_learns_as_on_each_document_alone(target):
    base = make_model()
    dispatch_packed(base)
    model = adapt(base, [target])
    input_ids = make_tokens()
    logits = packed_logits(model, input_ids)
    layout = PackedLayout.from_lengths(LENGTHS).to(DEVICE)
    with layout.published():
        packed_token_loss(model(input_ids).logits, input_ids, layout).backward()
    gradients = {name: p.grad.clone() for name, p in adapters(model).items()}
    assert len(gradients) == (2 if target == "embeddings" else 4)

    plain = with_weights_changed(model, [target])
    alone = torch.cat([plain(part).logits for part in input_ids.split(LENGTHS, dim=1)], dim=1)
    assert relative_rms(logits, alone) < TOLERANCE
    with model.disable_adapter():
        assert relative_rms(packed_logits(model, input_ids), logits) > 1e-3, "it does nothing"

    model.zero_grad()
    targets = sum(length - 1 for length in LENGTHS)
    for part, length in zip(input_ids.split(LENGTHS, dim=1), LENGTHS):
        layout = PackedLayout.from_lengths([length]).to(DEVICE)
        with layout.published():
            loss = packed_token_loss(model(part).logits, part, layout)
            (loss * (length - 1) / targets).backward()
    for name, parameter in adapters(model).items():
        assert gradients[name].abs().max() > 0, f"{name} has no gradient to compare"
        assert relative_rms(gradients[name], parameter.grad) < TOLERANCE, name


def test_merged_model_computes_what_the_adapters_did():
    base = make_model(torch.float32)
    dispatch_packed(base)
    model = adapt(base, [*PROJECTIONS, "embeddings"])
    input_ids = make_tokens()
    logits = packed_logits(model, input_ids)
    with pytest.warns(UserWarning, match="no longer tied after merging"):
        merged = model.merge_and_unload()
    assert merged.config.tie_word_embeddings is False
    assert not torch.equal(merged.lm_head.weight, merged.get_input_embeddings().weight)
    assert relative_rms(packed_logits(merged, input_ids), logits) < 1e-4


def test_head_stays_tied_where_the_embeddings_have_no_adapter():
    base = make_model(torch.float32)
    dispatch_packed(base)
    merged = adapt(base, ["in_proj"]).merge_and_unload()
    assert merged.lm_head.weight is merged.get_input_embeddings().weight


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_learns_through_all_its_linear_layers(family):
    torch.manual_seed(0)
    base = FAMILIES[family]().to(DEVICE)
    dispatch_packed(base)
    targets = default_targets(base)
    assert {"in_proj", "out_proj"} <= set(targets)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=targets))
    layout = PackedLayout.from_lengths(LENGTHS).to(DEVICE)
    input_ids = make_tokens()
    with layout.published():
        packed_token_loss(model(input_ids).logits, input_ids, layout).backward()
    gradients = {name: p.grad for name, p in adapters(model).items() if ".lora_B." in name}
    # an expert that no token was sent to has none
    learns = {n for n, g in gradients.items() if g is not None and g.abs().max() > 0}
    asleep = {name for name in gradients if name not in learns and ".experts." not in name}
    assert learns
    assert not asleep


def test_frozen_layers_leave_the_others_their_gradients():
    gradients = []
    for frozen in (False, True):
        model = make_model(torch.float32)
        dispatch_packed(model, recompute=True)
        model.backbone.layers[0].requires_grad_(not frozen)
        layout = PackedLayout.from_lengths(LENGTHS).to(DEVICE)
        input_ids = make_tokens()
        with layout.published():
            packed_token_loss(model(input_ids).logits, input_ids, layout).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    whole, rest = gradients
    assert set(whole) - set(rest) == {name for name in whole if ".layers.0." in name}
    assert all(torch.equal(gradient, whole[name]) for name, gradient in rest.items())


def test_peft_refuses_what_nobody_calls():
    model = make_model(torch.float32)
    with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba"):
        adapt(model, ["out_proj"])
    dispatched = dispatch_packed(model)
    # its weight is read past the module, by our forward too
    with pytest.raises(ValueError, match="'conv1d' is incompatible with Mamba"):
        adapt(model, ["conv1d"])
    dispatched.undo()
    with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba"):
        adapt(model, ["out_proj"])


def test_out_proj_is_called_only_by_mixers_of_ours():
    model = make_model(torch.float32)
    dispatch_packed(model)
    assert calls_out_proj(model)
    del model.backbone.layers[1].mixer.forward
    assert not calls_out_proj(model)
    assert not calls_out_proj(nn.Linear(2, 2))
    llama = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    assert not calls_out_proj(LlamaForCausalLM(llama))


def test_script_of_the_page_trains():
    page = Path(__file__).parents[2] / "docs" / "training.md"
    script = re.search(r"```python\n(import torch\n.*?)```", page.read_text(), re.DOTALL)[1]
    names = {}
    exec(compile(script, page.name, "exec"), names)
    gradients = {name: p.grad for name, p in adapters(names["model"]).items() if "lora_B" in name}
    assert len(gradients) == 8
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("mamba")
    make_model(torch.float32).cpu().save_pretrained(path)
    return path


def build(checkpoint, builder=AutoModelForCausalLM.from_pretrained, lora=None, **options):
    model_options = {key: options.pop(key) for key in ("use_varlen_attn",) if key in options}
    llm = dict(type=builder, pretrained_model_name_or_path=str(checkpoint), **options)
    lora = dict(type=LoraConfig, r=2, task_type="CAUSAL_LM", **(lora or {}))
    return PackedSupervisedFinetune(ConfigDict(llm), lora=ConfigDict(lora), **model_options)


def test_every_projection_is_adapted_unless_told_otherwise(checkpoint):
    def adapted(model):
        return {name.split(".lora_")[0].rpartition(".")[2] for name in model.state_dict()}

    assert adapted(build(checkpoint)) == set(PROJECTIONS)
    assert adapted(build(checkpoint, lora=dict(target_modules=["x_proj"]))) == {"x_proj"}
    # nothing is dispatched there, and PEFT refuses out_proj
    plain = build(checkpoint, use_varlen_attn=False)
    assert adapted(plain) == set(PROJECTIONS) - {"out_proj"}


def test_frozen_weights_stay_in_bfloat16_and_the_dynamics_unrounded(checkpoint):
    exact = dict(MambaForCausalLM.from_pretrained(checkpoint).named_parameters())
    model = build(checkpoint, torch_dtype=torch.bfloat16).to(DEVICE)
    for name, parameter in model.llm.named_parameters():
        original = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if "lora_" in name:
            assert (parameter.dtype, parameter.requires_grad) == (torch.float32, True), name
        elif name.endswith((".A_log", ".D")):
            assert torch.equal(parameter.cpu(), exact[original]), name
            assert not torch.equal(exact[original], exact[original].bfloat16().float())
        else:
            assert (parameter.dtype, parameter.requires_grad) == (torch.bfloat16, False), name
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss = _train_step(model)
    assert loss.item() == pytest.approx(_train_step(build(checkpoint).to(DEVICE)).item(), rel=0.02)
    for name, parameter in model.named_parameters():
        # with B at zero, A has nothing to learn yet
        learns = "lora_B" in name
        assert (parameter.grad is not None and parameter.grad.abs().max() > 0) == learns, name


def _train_step(model):
    input_ids = make_tokens()
    with PackedLayout.from_lengths(LENGTHS).to(DEVICE).published():
        loss = model({"input_ids": input_ids, "labels": input_ids})["loss"]
        loss.backward()
    return loss


def test_what_is_not_quantised_is_loaded_unrounded(checkpoint):
    asked = {}

    def load(pretrained_model_name_or_path, **kwargs):
        asked.update(kwargs)
        return MambaForCausalLM.from_pretrained(pretrained_model_name_or_path)

    quantisation = dict(type=BitsAndBytesConfig, load_in_4bit=True)
    build(checkpoint, load, torch_dtype=torch.float16, quantization_config=quantisation)
    assert asked["quantization_config"].load_in_4bit
    assert asked["torch_dtype"] == torch.float32


@pytest.mark.skipif(not GPU, reason="bitsandbytes quantises on a GPU only")
@pytest.mark.filterwarnings("ignore:inner dimension .* is not aligned for fast kernel")
def test_4_bit_layers_are_called_and_their_adapters_learn(checkpoint):
    quantisation = dict(
        type=BitsAndBytesConfig,
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    exact = dict(MambaForCausalLM.from_pretrained(checkpoint).named_parameters())
    model = build(checkpoint, quantization_config=quantisation)
    mixer = model.llm.get_base_model().backbone.layers[1].mixer
    for name in PROJECTIONS:
        assert type(getattr(mixer, name).base_layer).__name__ == "Linear4bit", name
    for name in ("A_log", "D"):
        parameter = getattr(mixer, name)
        assert torch.equal(parameter.cpu(), exact[f"backbone.layers.1.mixer.{name}"])
    with torch.autocast("cuda", torch.bfloat16):
        loss = _train_step(model)
    assert loss.item() == pytest.approx(_train_step(build(checkpoint).to(DEVICE)).item(), rel=0.1)
    for name, parameter in adapters(model).items():
        if "lora_B" in name:
            assert parameter.grad.abs().max() > 0, name
