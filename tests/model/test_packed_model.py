"""MambaForCausalLM on packs against transformers' own forward on each document alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MambaConfig, MambaForCausalLM

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.model.loss import packed_token_loss
from xtuner_mamba.ops import causal_conv1d, selective_scan
from xtuner_mamba.testing import relative_rms

VOCAB = 50
# one token, shorter than the filter, exactly the filter, neighbours of one token, ragged
LENGTHS = [[1], [3, 4, 1, 1], [5, 17, 2, 9]]


def make_model(dtype: torch.dtype = torch.float64, **overrides) -> MambaForCausalLM:
    settings = dict(
        vocab_size=VOCAB, hidden_size=12, state_size=5, num_hidden_layers=2, conv_kernel=4
    )
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(**{**settings, "use_cache": False, **overrides}))
    # away from the symmetric initial values, so that every parameter matters
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "D", "norm.weight", "norm_f.weight", "conv1d.bias")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name.endswith("embeddings.weight"):
                parameter.mul_(10)
    return model.to(dtype)


def make_tokens(lengths: list[int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (1, sum(lengths)), generator=generator)


def run_packed(model, lengths, input_ids, **kwargs):
    with PackedLayout.from_lengths(lengths).published():
        return model(input_ids, **kwargs).logits


def run_alone(model, lengths, input_ids):
    return torch.cat([model(part).logits for part in input_ids.split(lengths, dim=1)], dim=1)


def token_mean_alone(model, lengths, input_ids):
    """Transformers' own loss, document by document, as one mean over all target tokens."""
    total, count = 0.0, 0
    for part in input_ids.split(lengths, dim=1):
        if part.shape[1] > 1:
            total = total + model(part, labels=part).loss * (part.shape[1] - 1)
            count += part.shape[1] - 1
    return total / count


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_logits_equal_transformers_on_each_document_alone(lengths):
    packed, alone = make_model(), make_model()
    dispatch_packed(packed)
    input_ids = make_tokens(lengths)
    exact = run_alone(alone, lengths, input_ids)
    # transformers rounds norms, residuals and logits to float32
    assert relative_rms(run_packed(packed, lengths, input_ids), exact) < 1e-6
    if len(lengths) > 1:
        leaking = run_packed(packed, [sum(lengths)], input_ids)
        assert relative_rms(leaking, exact) > 1e-3, "these documents would not show a leak"


@pytest.mark.parametrize("training", [True, False])
def test_both_modes_give_the_same_logits(training):
    model = make_model()
    dispatch_packed(model)
    lengths = LENGTHS[-1]
    input_ids = make_tokens(lengths)
    exact = run_alone(make_model(), lengths, input_ids)
    assert relative_rms(run_packed(model.train(training), lengths, input_ids), exact) < 1e-6


@pytest.mark.parametrize("lengths", LENGTHS[1:], ids=str)
def test_every_gradient_equals_one_document_at_a_time(lengths):
    packed, alone = make_model(), make_model()
    dispatch_packed(packed)
    input_ids = make_tokens(lengths)
    layout = PackedLayout.from_lengths(lengths)
    with layout.published():
        packed_token_loss(packed(input_ids).logits, input_ids, layout).backward()
    token_mean_alone(alone, lengths, input_ids).backward()
    exact = dict(alone.named_parameters())
    for name, parameter in packed.named_parameters():
        assert exact[name].grad.abs().max() > 0, f"{name} has no gradient to compare"
        assert relative_rms(parameter.grad, exact[name].grad) < 1e-6, name


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 100))
def test_mixer_is_exact_over_random_layouts(lengths, seed):
    """The mixer alone keeps float64 throughout, unlike transformers' norms around it."""
    model = make_model()
    mixer = model.backbone.layers[0].mixer
    dispatch_packed(model)
    generator = torch.Generator().manual_seed(seed)
    shape = (1, sum(lengths), model.config.hidden_size)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    with PackedLayout.from_lengths(lengths).published():
        packed = mixer(x)
    for part, out in zip(x.split(lengths, dim=1), packed.split(lengths, dim=1), strict=True):
        assert relative_rms(out, mixer_token_by_token(mixer, part[0])[None]) < 1e-12


def mixer_token_by_token(mixer, document):
    """A document alone, written from the paper: one token, one state update at a time."""
    weight = {name: p.detach() for name, p in mixer.named_parameters()}
    dim, width = mixer.intermediate_size, mixer.conv_kernel_size
    window = torch.zeros(width, dim, dtype=document.dtype)
    state = torch.zeros(dim, mixer.ssm_state_size, dtype=document.dtype)
    out = []
    for token in document:
        x, z = (weight["in_proj.weight"] @ token).split(dim)
        window = torch.cat([window[1:], x[None]])
        x = (window * weight["conv1d.weight"][:, 0].T).sum(0) + weight["conv1d.bias"]
        x = x * torch.sigmoid(x)
        dt, B, C = (weight["x_proj.weight"] @ x).split(
            [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
        )
        dt = torch.log1p(torch.exp(weight["dt_proj.weight"] @ dt + weight["dt_proj.bias"]))
        decay = torch.exp(dt[:, None] * -torch.exp(weight["A_log"]))
        state = decay * state + (dt * x)[:, None] * B
        y = (state * C).sum(1) + weight["D"] * x
        out.append(weight["out_proj.weight"] @ (y * z * torch.sigmoid(z)))
    return torch.stack(out)


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_document_changes_no_bit_of_the_others(victim, value):
    lengths = [5, 17, 2, 9]
    model = make_model(torch.float32)
    dispatch_packed(model)
    layout = PackedLayout.from_lengths(lengths)
    owner = layout.seq_idx[0]
    labels = make_tokens(lengths).masked_fill(owner == victim, -100)

    def logits_and_gradient(embeds):
        embeds = embeds.clone().requires_grad_()
        with layout.published():
            logits = model(inputs_embeds=embeds).logits
            packed_token_loss(logits, labels, layout).backward()
        return logits.detach(), embeds.grad

    embeds = torch.randn(1, layout.total, 12, generator=torch.Generator().manual_seed(1))
    poisoned = embeds.clone()
    poisoned[:, owner == victim] = value
    logits, gradient = logits_and_gradient(embeds)
    poisoned_logits, poisoned_gradient = logits_and_gradient(poisoned)
    others = owner != victim
    assert torch.equal(logits[:, others], poisoned_logits[:, others])
    assert torch.equal(gradient[:, others], poisoned_gradient[:, others])
    assert gradient[:, others].abs().max() > 0
    assert not torch.equal(logits[:, ~others], poisoned_logits[:, ~others])


def test_loss_never_asks_for_a_neighbours_first_token():
    lengths = [3, 1, 2]
    layout = PackedLayout.from_lengths(lengths)
    labels = torch.tensor([[10, 11, 12, 13, 14, 15]])
    assert layout.targets(labels).tolist() == [11, 12, -100, -100, 15, -100]
    logits = torch.randn(1, 6, VOCAB, generator=torch.Generator().manual_seed(0))
    loss = packed_token_loss(logits, labels, layout)
    wanted = -torch.log_softmax(logits[0], -1)[[0, 1, 4], [11, 12, 15]].mean()
    torch.testing.assert_close(loss, wanted)


def test_a_batch_without_targets_gives_zero_and_not_nan():
    layout = PackedLayout.from_lengths([2, 1])
    logits = torch.randn(1, 3, VOCAB, requires_grad=True)
    loss = packed_token_loss(logits, torch.full((1, 3), -100), layout)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.abs().max() == 0


def test_rows_of_packs_equal_the_same_documents_in_one_row():
    lengths = [3, 4, 1, 6]
    model = make_model()
    dispatch_packed(model)
    input_ids = make_tokens(lengths)
    one_row = run_packed(model, lengths, input_ids)
    two_rows = run_packed(model, lengths, input_ids.view(2, 7))
    torch.testing.assert_close(two_rows.view(1, 14, VOCAB), one_row, rtol=0, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(use_reentrant):
    lengths = LENGTHS[-1]
    plain, checkpointed = make_model(torch.float32), make_model(torch.float32)
    gradients = []
    for model in (plain, checkpointed):
        dispatch_packed(model)
        model.train()
        if model is checkpointed:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        layout = PackedLayout.from_lengths(lengths)
        input_ids = make_tokens(lengths)
        with layout.published():
            packed_token_loss(model(input_ids).logits, input_ids, layout).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_backward_outside_the_published_block_is_refused_under_checkpointing():
    model = make_model(torch.float32).train()
    dispatch_packed(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    loss = run_packed(model, [4, 3], make_tokens([4, 3])).sum()
    with pytest.raises(RuntimeError, match=r"before 1 x 7 tokens reach .* got none"):
        loss.backward()


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 11])
def test_generation_with_a_cache_equals_running_the_whole_row_again(prompt):
    model = make_model(torch.float32).eval()
    dispatch_packed(model)
    output = generate(model, make_tokens([prompt]))
    # transformers' own cache goes wrong after prompts shorter than the filter: no oracle here
    whole = make_model(torch.float32)(output.sequences).logits[0, prompt - 1 : -1]
    torch.testing.assert_close(torch.cat(output.logits), whole, rtol=1e-4, atol=1e-4)


def test_generation_respects_left_padding():
    model = make_model(torch.float32).eval()
    dispatch_packed(model)
    input_ids = make_tokens([6])
    padded = torch.cat([torch.full((1, 3), 7), input_ids], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    alone = torch.cat(generate(model, input_ids).logits)
    torch.testing.assert_close(torch.cat(generate(model, padded, mask).logits), alone)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.cat(generate(model, padded).logits), alone)


def generate(model, input_ids, attention_mask=None):
    return model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids) if attention_mask is None else attention_mask,
        max_new_tokens=8,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )


def test_other_activations_than_silu():
    lengths = [5, 2]
    packed, alone = make_model(hidden_act="gelu"), make_model(hidden_act="gelu")
    dispatch_packed(packed)
    input_ids = make_tokens(lengths)
    exact = run_alone(alone, lengths, input_ids)
    assert relative_rms(run_packed(packed, lengths, input_ids), exact) < 1e-6


@pytest.mark.parametrize("name", ["in_proj", "x_proj", "dt_proj", "out_proj"])
def test_a_layer_in_the_place_of_a_projection_is_called(name):
    class Twice(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return 2 * self.linear(x)

    lengths = [5, 17, 2]
    wrapped, doubled = make_model(), make_model()
    for model in (wrapped, doubled):
        dispatch_packed(model)
        mixer = model.backbone.layers[0].mixer
        linear = getattr(mixer, name)
        if model is wrapped:
            setattr(mixer, name, Twice(linear))
        else:
            for parameter in linear.parameters():
                parameter.data *= 2
    input_ids = make_tokens(lengths)
    expected = run_packed(doubled, lengths, input_ids)
    assert relative_rms(run_packed(wrapped, lengths, input_ids), expected) < 1e-6


def test_ops_refuse_nothing_that_the_mixer_passes_under_autocast():
    lengths = [5, 17, 2]
    model = make_model(torch.float32)
    dispatch_packed(model)
    input_ids = make_tokens(lengths)
    exact = run_packed(model, lengths, input_ids)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = run_packed(model, lengths, input_ids)
    assert 1e-5 < relative_rms(rounded, exact) < 0.1


def test_reset_module_is_importable_on_its_own():
    """R23: others can build a mixer of their own from the two ops and a layout."""
    layout = PackedLayout.from_lengths([2, 3])
    x = torch.randn(1, 5, 4)
    y = causal_conv1d(x, torch.randn(4, 3), cu_seqlens=layout.cu_seqlens, activation="silu")
    A = -torch.rand(4, 2)
    B = torch.randn(1, 5, 2)
    assert selective_scan(y, x, A, B, B, cu_seqlens=layout.cu_seqlens).shape == (1, 5, 4)
