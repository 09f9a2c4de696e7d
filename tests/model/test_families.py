"""Every family on packs against the same model on each document alone: one table for all."""

import copy
import dataclasses
import inspect
import re
from functools import partial

import pytest
import torch
from attention_families import FAMILIES as ATTENTION_FAMILIES
from family_proof import (
    LENGTHS,
    ROUNDING,
    InFloat64,
    dispatched,
    draw_tokens,
    make,
    prove,
    run_alone,
    run_packed,
)
from mixer_families import FAMILIES as MIXER_FAMILIES
from mixer_families import VOCAB, make_bamba, make_mamba2
from mixer_oracles import mamba2_token_by_token
from peft import LoraConfig, get_peft_model
from transformers.models.bamba import modeling_bamba
from transformers.models.falcon_mamba import modeling_falcon_mamba
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2

from xtuner_mamba.carry import CarriedRows
from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.model.dispatch import mamba_lm, token_mixers
from xtuner_mamba.model.lora import default_targets
from xtuner_mamba.model.loss import packed_loss
from xtuner_mamba.testing import relative_rms

FAMILIES = MIXER_FAMILIES | ATTENTION_FAMILIES
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUT = PackedLayout.from_lengths(LENGTHS)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_alone_and_documents_are_isolated(name):
    proof = prove(FAMILIES[name])
    assert proof.logits_error < 1e-12
    assert proof.gradient_error < 1e-12
    assert proof.leak > 1e-3, "these documents would not show a leak"
    assert set(proof.layers) == set(token_mixers(FAMILIES[name]()))
    # which experts get how many rows depends on all documents, and rounds a product's last bits
    assert proof.changed <= (ROUNDING if proof.has_experts else 0)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "peft"])
@pytest.mark.parametrize("name", FAMILIES)
def test_own_loss_stays_within_documents(name, wrapped):
    """Loss of ``labels`` by the model itself, in two rows: documents alone are the oracle."""
    lengths = [5, 1, 2, 4, 4]
    model = FAMILIES[name]().double().eval()
    if wrapped:
        model = get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", target_modules=default_targets(model))
        )
    tokens = torch.randint(model.config.vocab_size, (1, sum(lengths)))
    labels = tokens.clone()
    labels[0, 3] = -100
    with torch.no_grad():
        total = sum(
            torch.nn.functional.cross_entropy(
                model(part).logits[0, :-1], part_labels[0, 1:], reduction="sum"
            )
            for part, part_labels in zip(tokens.split(lengths, 1), labels.split(lengths, 1))
        )
        dispatch_packed(model)
        with PackedLayout.from_lengths(lengths).published():
            loss = model(tokens.view(2, 8), labels=labels.view(2, 8)).loss
    # 16 tokens, 5 documents' first ones, one that is masked
    torch.testing.assert_close(loss, total / 10, rtol=1e-6, atol=0, check_dtype=False)


@pytest.mark.parametrize("name", ["Mamba", "Llama"])
def test_labels_that_no_shift_within_the_batch_fits(name):
    model = FAMILIES[name]()
    dispatch_packed(model)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    carried = CarriedRows(
        last=torch.tensor([0]), continues=torch.tensor([False]), next_labels=torch.tensor([1])
    )
    layout = dataclasses.replace(PackedLayout.from_lengths([4]), carried=carried)
    with layout.published(), pytest.raises(RuntimeError, match=r"carried documents, got \(1, 4\)"):
        model(tokens, labels=tokens)
    with (
        PackedLayout.from_lengths([3]).published(),
        pytest.raises(RuntimeError, match="got 1 documents with 3 tokens"),
    ):
        model(tokens, labels=tokens)


def test_generation_finds_the_arguments_of_a_dispatched_model():
    model = FAMILIES["Llama"]()
    expected = inspect.signature(model.forward)
    dispatched = dispatch_packed(model)
    assert model.forward.func is mamba_lm.causal_lm_forward
    assert inspect.signature(model.forward) == expected
    dispatched.undo()
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    "build",
    [partial(make_mamba2, n_groups=2), partial(make_bamba, mamba_n_groups=2)],
    ids=["Mamba-2", "Bamba"],
)
def test_groups_of_heads(build):
    """Against a recurrence, of which transformers' own PyTorch differs.

    It gives the heads of a group away in turn, and norms all groups as one.
    """
    alone = make(build, torch.float64)
    packed, _ = dispatched(alone)
    tokens = draw_tokens(alone.config.vocab_size)
    with InFloat64():
        theirs, _ = run_alone(alone, tokens)
        for mixers in token_mixers(alone).values():
            for mixer in mixers:
                if hasattr(mixer, "A_log"):
                    mixer.forward = mamba2_token_by_token.__get__(mixer)
        expected, gradients = run_alone(alone, tokens)
        logits, actual = run_packed(packed, tokens, LAYOUT)
    assert relative_rms(logits, expected) < 1e-12
    assert actual.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative_rms(actual[name], gradient) < 1e-12, name
    assert relative_rms(theirs, expected) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MIXER_FAMILIES)
def test_errs_like_eager_documents_alone(monkeypatch, name, dtype):
    """Each error is a mean over draws and layers: which of two right results errs more is luck."""
    for module in (modeling_bamba, modeling_falcon_mamba, modeling_mamba, modeling_mamba2):
        # the kernels that a GPU may have are not eager PyTorch
        monkeypatch.setattr(module, "is_fast_path_available", False)
    tokens, layout = draw_tokens(VOCAB).to(DEVICE), LAYOUT.to(DEVICE)
    build = MIXER_FAMILIES[name]
    if name == "Mamba-2":
        # beside a limit, rounding decides whether a step has a gradient
        build = partial(build, time_step_limit=(0.0, float("inf")))
    errors = {}
    for seed in range(3):
        eager = make(build, dtype, seed).to(DEVICE)
        packed, _ = dispatched(eager)
        # the values of the low-precision model, in float64
        oracle = copy.deepcopy(eager).double()
        with InFloat64():
            exact = flat(run_alone(oracle, tokens))
        alone, actual = flat(run_alone(eager, tokens)), flat(run_packed(packed, tokens, layout))
        for parameter, value in exact.items():
            pair = relative_rms(actual[parameter], value), relative_rms(alone[parameter], value)
            errors.setdefault(re.sub(r"layers\.\d", "layers", parameter), []).append(pair)
    for parameter, pairs in errors.items():
        ours, theirs = (sum(error) / len(pairs) for error in zip(*pairs))
        # one correct rounding errs by eps / 4; a GPU's exponentials by 2 units in the last place
        factor = 4 if DEVICE.type == "cuda" and dtype == torch.float32 else 3
        allowed = factor * max(theirs, torch.finfo(dtype).eps / 4)
        assert ours <= allowed, f"{parameter}: {ours:.2e}, eager {theirs:.2e}"


def flat(results):
    logits, gradients = results
    return {"logits": logits} | gradients


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", MIXER_FAMILIES)
def test_activation_checkpointing_changes_no_bit(name, use_reentrant):
    plain, _ = dispatched(make(MIXER_FAMILIES[name], torch.float32).train())
    checkpointed = copy.deepcopy(plain)
    checkpointed.enable_input_require_grads()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    tokens = draw_tokens(plain.config.vocab_size)
    _, expected = run_packed(plain, tokens, LAYOUT)
    _, actual = run_packed(checkpointed, tokens, LAYOUT)
    assert actual.keys() == expected.keys()
    for parameter, gradient in expected.items():
        assert torch.equal(actual[parameter], gradient), parameter


@pytest.mark.parametrize("name", MIXER_FAMILIES)
def test_recomputing_and_fused_norms_change_nothing(name):
    model = make(MIXER_FAMILIES[name], torch.float32).train()
    plain, fused = (copy.deepcopy(model) for _ in range(2))
    dispatch_packed(plain, fuse_norm=False, recompute=False)
    dispatch_packed(fused, fuse_norm=True, recompute=True)
    tokens = draw_tokens(model.config.vocab_size)
    _, expected = run_packed(plain, tokens, LAYOUT)
    _, actual = run_packed(fused, tokens, LAYOUT)
    assert actual.keys() == expected.keys()
    for parameter, gradient in expected.items():
        assert relative_rms(actual[parameter], gradient) < 1e-4, parameter


@pytest.mark.parametrize("name", MIXER_FAMILIES)
def test_the_loss_needs_no_logits(monkeypatch, name):
    model, _ = dispatched(make(MIXER_FAMILIES[name], torch.float32))
    tokens = draw_tokens(model.config.vocab_size)
    inputs = {"input_ids": tokens, "position_ids": LAYOUT.positions}
    calls = []
    op = mamba_lm.linear_cross_entropy
    monkeypatch.setattr(mamba_lm, "linear_cross_entropy", lambda *a: calls.append(1) or op(*a))
    losses = []
    for fuse in (False, True):
        with LAYOUT.published():
            losses.append(packed_loss(model, inputs, tokens, LAYOUT, fuse=fuse))
    assert len(calls) == 1
    torch.testing.assert_close(losses[1], losses[0])


def test_positions_reach_the_attention_of_a_hybrid():
    model, _ = dispatched(make(make_bamba, torch.float32))
    tokens = draw_tokens(model.config.vocab_size)
    with LAYOUT.published():
        expected = model(tokens).logits
        assert torch.equal(model(tokens, position_ids=LAYOUT.positions).logits, expected)
        stretched = model(tokens, position_ids=3 * LAYOUT.positions).logits
    assert relative_rms(stretched, expected) > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dispatched_model_is_saved_as_transformers_saves_it(name, tmp_path):
    model = make(FAMILIES[name], torch.float32)
    packed, _ = dispatched(model)
    assert packed.state_dict().keys() == model.state_dict().keys()
    packed.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    tokens = draw_tokens(model.config.vocab_size)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("prompt", [1, 3, 11])
@pytest.mark.parametrize("name", MIXER_FAMILIES)
def test_generation_with_a_cache_equals_running_the_whole_row_again(name, prompt):
    model = make(MIXER_FAMILIES[name], torch.float32)
    packed, _ = dispatched(model)
    tokens = draw_tokens(model.config.vocab_size)[:, :prompt]
    output = generate(packed, tokens)
    whole = model(output.sequences).logits[0, prompt - 1 : -1]
    torch.testing.assert_close(torch.cat(output.logits), whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", MIXER_FAMILIES)
def test_generation_respects_left_padding(name):
    packed, _ = dispatched(make(MIXER_FAMILIES[name], torch.float32))
    tokens = draw_tokens(packed.config.vocab_size)[:, :6]
    padded = torch.cat([torch.full((1, 3), 7), tokens], dim=1)
    mask = (torch.arange(9) >= 3).long()[None]
    alone = torch.cat(generate(packed, tokens).logits)
    actual = torch.cat(generate(packed, padded, mask).logits)
    torch.testing.assert_close(actual, alone, rtol=1e-3, atol=1e-3)
    leaking = torch.cat(generate(packed, padded).logits)
    assert relative_rms(leaking, alone) > 1e-2


@pytest.mark.parametrize("name", ["Mamba", "Falcon-Mamba", "Mamba-2"])
def test_a_prompt_starts_a_used_cache_afresh(name):
    model = make(MIXER_FAMILIES[name], torch.float32)
    packed, _ = dispatched(model)
    tokens = draw_tokens(model.config.vocab_size)
    with torch.no_grad():
        cache = packed(tokens[:, :7], use_cache=True).cache_params
        again = packed(
            tokens[:, 7:13], use_cache=True, cache_params=cache, cache_position=torch.arange(4)
        ).logits
    torch.testing.assert_close(again, model(tokens[:, 7:13]).logits, rtol=1e-3, atol=1e-3)


def generate(model, tokens, attention_mask=None):
    return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens) if attention_mask is None else attention_mask,
        max_new_tokens=5,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
