"""PackedSupervisedFinetune: what it adds to XTuner's model, and what it leaves alone."""

from collections import Counter

import pytest
import torch
from mmengine import ConfigDict
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM
from xtuner.model import SupervisedFinetune

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import PackedSupervisedFinetune
from xtuner_mamba.model.dispatch import mamba, mamba_lm
from xtuner_mamba.testing import relative_rms


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=20, hidden_size=8, state_size=4, num_hidden_layers=2)
    model = MambaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", ".D")):
                parameter.add_(torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("mamba")
    model.save_pretrained(path)
    return path


def llm_cfg(checkpoint, **kwargs):
    return ConfigDict(
        type=AutoModelForCausalLM.from_pretrained,
        pretrained_model_name_or_path=str(checkpoint),
        **kwargs,
    )


@pytest.mark.parametrize("dtype", ["torch.bfloat16", torch.float16])
def test_dynamics_stay_unrounded_in_a_low_precision_model(checkpoint, dtype):
    model = PackedSupervisedFinetune(llm_cfg(checkpoint, torch_dtype=dtype))
    exact = dict(MambaForCausalLM.from_pretrained(checkpoint).named_parameters())
    low = torch.bfloat16 if dtype == "torch.bfloat16" else dtype
    for name, parameter in model.llm.named_parameters():
        if name.endswith(("A_log", ".D")):
            assert parameter.dtype == torch.float32, name
            assert torch.equal(parameter, exact[name]), name
            assert not torch.equal(parameter, exact[name].to(low).float()), "nothing to lose here"
        else:
            assert parameter.dtype == low, name


def test_a_low_precision_model_trains_and_generates(checkpoint):
    model = PackedSupervisedFinetune(llm_cfg(checkpoint, torch_dtype=torch.bfloat16))
    input_ids = torch.randint(0, 20, (1, 6))
    with PackedLayout.from_lengths([4, 2]).published():
        loss = model({"input_ids": input_ids, "labels": input_ids})["loss"]
        loss.backward()
    assert model.llm.backbone.layers[0].mixer.A_log.grad.abs().max() > 0
    model.eval()
    model.llm.config.use_cache = True
    out = model.llm.generate(
        input_ids, max_new_tokens=3, attention_mask=torch.ones_like(input_ids), pad_token_id=0
    )
    assert out.shape[1] > 6


def test_float64_is_kept(checkpoint):
    model = PackedSupervisedFinetune(llm_cfg(checkpoint, torch_dtype=torch.float64))
    assert {p.dtype for p in model.llm.parameters()} == {torch.float64}


def test_autocast_dtype_rounds_the_forward_only(checkpoint):
    input_ids = torch.randint(0, 20, (1, 6))
    losses = {}
    for dtype in (None, "bfloat16"):
        model = PackedSupervisedFinetune(llm_cfg(checkpoint), autocast_dtype=dtype)
        assert {p.dtype for p in model.llm.parameters()} == {torch.float32}
        with PackedLayout.from_lengths([4, 2]).published():
            losses[dtype] = model({"input_ids": input_ids, "labels": input_ids})["loss"].item()
    assert losses[None] != losses["bfloat16"]
    assert losses[None] == pytest.approx(losses["bfloat16"], rel=0.05)


def test_an_unknown_autocast_dtype_is_refused(checkpoint):
    with pytest.raises(ValueError, match="got 'int8'"):
        PackedSupervisedFinetune(llm_cfg(checkpoint), autocast_dtype="int8")


def test_training_without_a_layout_is_refused(checkpoint):
    model = PackedSupervisedFinetune(llm_cfg(checkpoint), use_activation_checkpointing=False)
    input_ids = torch.randint(0, 20, (1, 6))
    with pytest.raises(RuntimeError, match="before 1 x 6 tokens"):
        model({"input_ids": input_ids, "labels": input_ids})


def test_without_varlen_it_is_xtuners_own_model(checkpoint):
    ours = PackedSupervisedFinetune(llm_cfg(checkpoint), use_varlen_attn=False)
    stock = SupervisedFinetune(llm_cfg(checkpoint))
    input_ids = torch.randint(0, 20, (2, 6))
    data = {"input_ids": input_ids, "labels": input_ids}
    assert torch.equal(ours(dict(data))["loss"], stock(dict(data))["loss"])
    assert "forward" not in ours.llm.backbone.layers[0].mixer.__dict__


@pytest.mark.parametrize("switch", ["fuse_norm", "fuse_loss", "recompute"])
def test_a_switch_that_is_no_bool_is_refused_before_anything_is_built(switch):
    with pytest.raises(ValueError, match=f"^{switch} must be None, True or False, got 'yes'; "):
        PackedSupervisedFinetune(None, **{switch: "yes"})


@pytest.fixture
def ops(monkeypatch):
    """Count the fused ops, and the mixers that recompute."""
    calls = Counter()

    def count(module, name):
        op = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: calls.update([name]) or op(*a, **k))

    count(mamba_lm, "rms_norm")
    count(mamba_lm, "linear_cross_entropy")
    count(mamba, "checkpoint")
    return calls


@pytest.mark.parametrize("checkpointing", [True, False])
def test_options_reach_the_model_and_change_nothing_else(checkpoint, ops, checkpointing):
    input_ids = torch.randint(0, 20, (1, 6))
    gradients = {}
    for wanted in (False, True):
        model = PackedSupervisedFinetune(
            llm_cfg(checkpoint),
            use_activation_checkpointing=checkpointing,
            **dict.fromkeys(("fuse_norm", "fuse_loss", "recompute"), wanted),
        ).train()
        ops.clear()
        with PackedLayout.from_lengths([4, 2]).published():
            model({"input_ids": input_ids, "labels": input_ids})["loss"].backward()
        gradients[wanted] = {name: p.grad for name, p in model.named_parameters()}
        # two blocks, twice if they are checkpointed, and the last norm
        norms = 5 if checkpointing else 3
        expected = dict(rms_norm=norms, linear_cross_entropy=1, checkpoint=2 * (not checkpointing))
        assert +ops == Counter(expected if wanted else {})
    for name, gradient in gradients[False].items():
        assert relative_rms(gradients[True][name], gradient) < 1e-5, name


def test_predictions_keep_their_logits(checkpoint):
    model = PackedSupervisedFinetune(llm_cfg(checkpoint), fuse_loss=True).eval()
    input_ids = torch.randint(0, 20, (1, 6))
    with PackedLayout.from_lengths([4, 2]).published(), torch.no_grad():
        (result,) = model({"input_ids": input_ids, "labels": input_ids}, mode="predict")
    assert result["logits"].shape == (6, 20)
