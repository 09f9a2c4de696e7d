"""What is of attention alone: masks, windows, positions, caches, XTuner's own path, refusals.

That packs equal documents alone is in test_families.py, for these families too.
"""

import copy
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from attention_families import FAMILIES, VOCAB, make
from mixer_families import make_jamba
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_flash_attention_utils
from transformers.models.llama import modeling_llama

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.model.dispatch import attention as dispatched_attention
from xtuner_mamba.model.loss import packed_token_loss
from xtuner_mamba.ops.attention import api
from xtuner_mamba.testing import relative_rms

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# one token, the window of 4 and one over it, neighbours of one token
LENGTHS = [5, 13, 1, 4, 1, 9]
# of every kind one: plain, with windows and a cap, older with experts
SOME = ["Llama", "Gemma2", "Qwen2-MoE"]
# experts are products of the tokens that chose them: what others choose moves the last bits
EXPERTS = {"Mixtral", "Qwen2-MoE"}


def build(builder, dtype=torch.float64, seed=0) -> nn.Module:
    """Build a model whose every parameter matters."""
    torch.manual_seed(seed)
    model = builder()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(DEVICE, dtype)


def make_tokens(lengths=LENGTHS, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (1, sum(lengths)), generator=draw).to(DEVICE)


def run_packed(model, tokens, lengths=LENGTHS, **kwargs):
    with PackedLayout.from_lengths(lengths).to(DEVICE).published():
        return model(tokens, **kwargs).logits


def run_alone(model, tokens, lengths=LENGTHS):
    return torch.cat([model(part).logits for part in tokens.split(lengths, dim=1)], dim=1)


every_family = pytest.mark.parametrize("family", FAMILIES)
some_families = pytest.mark.parametrize("family", SOME)
# on a GPU the kernels are at stake
families_of_device = pytest.mark.parametrize("family", FAMILIES if GPU else SOME)


@families_of_device
def test_a_document_changes_no_bit_of_the_others(family):
    model = build(of_kernel_size(family), torch.bfloat16 if GPU else torch.float32)
    dispatch_packed(model)
    layout = PackedLayout.from_lengths(LENGTHS).to(DEVICE)
    others = layout.seq_idx[0] != 1
    labels = make_tokens().masked_fill(~others, -100)

    def logits_and_gradient(embeds):
        embeds = embeds.clone().requires_grad_()
        with layout.published():
            logits = model(inputs_embeds=embeds).logits
            packed_token_loss(logits, labels, layout).backward()
        return logits.detach(), embeds.grad

    embeds = model.get_input_embeddings()(make_tokens()).detach()
    before = logits_and_gradient(embeds)
    for value in (0.5, float("nan")):
        after = logits_and_gradient(embeds.masked_fill(~others[:, None], value))
        for old, new in zip(before, after):
            old, new = old[:, others], new[:, others]
            assert old.abs().max() > 0
            if family in EXPERTS:
                assert relative_rms(new, old) < torch.finfo(old.dtype).eps * 10
            else:
                assert torch.equal(new, old)
        assert not torch.equal(before[0][:, ~others], after[0][:, ~others])


def of_kernel_size(family):
    """Build with heads of 16 channels, which kernels take."""
    return partial(FAMILIES[family], hidden_size=64, head_dim=16)


@families_of_device
@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16] * GPU, ids=str)
def test_errs_like_eager_documents_alone(monkeypatch, family, dtype):
    """Errors are means over draws: which of two right results errs more is luck."""
    impls, choose = set(), api._choose_impl
    monkeypatch.setattr(api, "_choose_impl", lambda *args: impls.add(impl := choose(*args)) or impl)
    errors = []
    for seed in range(4):
        tokens = make_tokens(seed=seed)
        packed, alone = (build(of_kernel_size(family), dtype, seed) for _ in range(2))
        exact = run_alone(build(of_kernel_size(family), dtype, seed).double(), tokens)
        dispatch_packed(packed)
        results = run_packed(packed, tokens), run_alone(alone, tokens)
        errors.append([relative_rms(logits, exact) for logits in results])
    ours, theirs = (sum(error) / len(errors) for error in zip(*errors))
    # a rounding to bfloat16 can send a token to another expert
    if dtype == torch.float32 or family not in EXPERTS:
        assert ours <= (3 if GPU else 2) * max(theirs, torch.finfo(dtype).eps / 4)
    if not GPU or dtype == torch.float32:
        assert impls == {"blocked"}
    else:
        # PyTorch's kernel has no soft cap
        assert impls <= ({"flash", "blocked"} if family == "Gemma2" else {"varlen"})


class _LargestTensor(TorchDispatchMode):
    """Note the most numbers that an operation has made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@every_family
def test_no_square_of_the_row_is_made(family):
    model = build(FAMILIES[family], torch.float32)
    lengths = [20] * 30
    tokens = make_tokens(lengths)
    with _LargestTensor() as seen, torch.no_grad():
        model(tokens)
    assert seen.numel >= tokens.numel() ** 2, "transformers makes one"
    dispatch_packed(model)
    with _LargestTensor() as seen, torch.no_grad():
        run_packed(model, tokens, lengths)
    assert seen.numel < tokens.numel() ** 2 / 4


@every_family
def test_positions_are_those_in_the_documents(family):
    model = build(FAMILIES[family], torch.float32)
    dispatch_packed(model)
    positions = []
    model.model.rotary_emb.register_forward_pre_hook(lambda module, args: positions.append(args[1]))
    tokens = make_tokens()
    logits = run_packed(model, tokens)
    layout = PackedLayout.from_lengths(LENGTHS).to(DEVICE)
    assert torch.equal(positions[0], layout.positions)
    # given with the batch, as XTuner's are
    assert torch.equal(run_packed(model, tokens, position_ids=layout.positions), logits)
    assert not torch.equal(run_packed(model, tokens, position_ids=layout.positions + 1), logits)
    assert torch.equal(positions[2], layout.positions + 1)


@some_families
def test_rows_of_packs_equal_the_same_documents_in_one_row(family):
    model = build(FAMILIES[family])
    dispatch_packed(model)
    lengths = [3, 4, 1, 6]
    tokens = make_tokens(lengths)
    rows = run_packed(model, tokens.view(2, 7), lengths).view(1, 14, VOCAB)
    torch.testing.assert_close(rows, run_packed(model, tokens, lengths), rtol=0, atol=1e-12)


@some_families
def test_the_implementation_that_transformers_would_use_is_of_no_matter(family):
    builder = FAMILIES[family]
    eager, sdpa = build(builder), build(lambda: builder(implementation="sdpa"))
    for model in (eager, sdpa):
        dispatch_packed(model)
    tokens = make_tokens()
    assert torch.equal(run_packed(eager, tokens), run_packed(sdpa, tokens))
    # and is left as it was
    assert [m.config._attn_implementation for m in (eager, sdpa)] == ["eager", "sdpa"]


@every_family
def test_generation_with_a_cache_is_transformers_own(family):
    model = build(FAMILIES[family], torch.float32).eval()
    theirs = copy.deepcopy(model)
    dispatched = dispatch_packed(model)
    tokens = make_tokens([7])
    assert torch.equal(generate(model, tokens), generate(theirs, tokens))
    assert len(dispatched.counts) == 1
    dispatched.undo()
    assert not any("forward" in vars(module) for module in model.modules())


def generate(model, tokens):
    scores = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=4,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    ).logits
    return torch.cat(scores)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", SOME)
def test_activation_checkpointing_changes_no_bit(name, use_reentrant):
    plain, checkpointed = (build(FAMILIES[name], torch.float32).train() for _ in range(2))
    checkpointed.enable_input_require_grads()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    tokens, layout = make_tokens(), PackedLayout.from_lengths(LENGTHS).to(DEVICE)
    for model in (plain, checkpointed):
        dispatch_packed(model)
        with layout.published():
            packed_token_loss(model(tokens).logits, tokens, layout).backward()
    for (name, parameter), other in zip(plain.named_parameters(), checkpointed.parameters()):
        assert (parameter.grad is None and other.grad is None) or torch.equal(
            parameter.grad, other.grad
        ), name


def test_lora_acts_and_learns():
    model = build(FAMILIES["Llama"], torch.float32)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], r=2))
    dispatch_packed(model)
    tokens = make_tokens()
    before = run_packed(model, tokens)
    before.sum().backward()
    adapters = {n: p for n, p in model.named_parameters() if "lora_B" in n}
    assert len(adapters) == 4
    for parameter in adapters.values():
        assert parameter.grad.abs().max() > 0
        parameter.data.normal_()
    assert not torch.equal(run_packed(model, tokens), before)


def test_autocast_reaches_attention_in_its_dtype(monkeypatch):
    dtypes, attention = [], dispatched_attention.attention

    def spy(q, k, v, **kwargs):
        dtypes.append({t.dtype for t in (q, k, v)})
        return attention(q, k, v, **kwargs)

    monkeypatch.setattr(dispatched_attention, "attention", spy)
    model = build(FAMILIES["Llama"], torch.float32)
    for layer in model.model.layers:
        # as a layer of 4 bits, which gives back the dtype that it was given
        layer.self_attn.v_proj.register_forward_hook(lambda module, args, y: y.float())
    dispatch_packed(model)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        run_packed(model, make_tokens())
    assert dtypes == [{torch.bfloat16}] * 2


@pytest.mark.skipif(not GPU, reason="asks something of a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_no_step_waits_for_the_gpu(name):
    model = build(of_kernel_size(name), torch.bfloat16)
    dispatch_packed(model)
    tokens, layout = make_tokens(), PackedLayout.from_lengths(LENGTHS).to(DEVICE)

    def step():
        with layout.published():
            packed_token_loss(model(tokens).logits, tokens, layout).backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- windows and rotary embeddings that depend on the length --------------------------------------


@pytest.mark.parametrize(
    "name", ["Mistral", "Mixtral", "Qwen2-MoE", "Gemma2", "Phi-3", "Cohere2", "Starcoder2"]
)
def test_a_window_one_token_wider_would_be_noticed(name):
    narrow = build(FAMILIES[name])
    wide = build(lambda: FAMILIES[name](sliding_window=5))
    tokens = make_tokens()
    assert relative_rms(run_alone(wide, tokens), run_alone(narrow, tokens)) > 1e-3


def test_jamba_has_no_window_whatever_its_config_says():
    """As in transformers, but for its flash attention."""
    # the scan's kernels take no float64; a window would change a tenth and more
    dtype, tolerance = (torch.float32, 1e-4) if GPU else (torch.float64, 1e-6)
    model = build(partial(make_jamba, sliding_window=4), dtype)
    tokens = make_tokens()
    alone = run_alone(model, tokens)
    dispatch_packed(model)
    assert relative_rms(run_packed(model, tokens), alone) < tolerance


def test_qwen2_has_a_window_in_its_upper_layers(monkeypatch):
    windows, attention = [], dispatched_attention.attention

    def spy(*args, sliding_window, **kwargs):
        windows.append(sliding_window)
        return attention(*args, sliding_window=sliding_window, **kwargs)

    monkeypatch.setattr(dispatched_attention, "attention", spy)
    model = build(
        lambda: FAMILIES["Qwen2"](use_sliding_window=True, sliding_window=4, max_window_layers=1)
    )
    dispatch_packed(model)
    run_packed(model, make_tokens())
    assert windows == [None, 4]


SCALINGS = {
    "dynamic": dict(
        model_type="llama", max_position_embeddings=8, rope_scaling=dict(type="dynamic", factor=4.0)
    ),
    "longrope": dict(
        model_type="phi3",
        max_position_embeddings=32,
        original_max_position_embeddings=8,
        rope_scaling=dict(type="longrope", short_factor=[1.0, 1.1], long_factor=[2.0, 9.0]),
    ),
}


@pytest.mark.parametrize("settings", SCALINGS.values(), ids=SCALINGS)
def test_a_long_document_does_not_change_the_rotary_embedding_of_others(settings):
    # a long one after a short one, and after a longer one
    lengths = [5, 13, 9, 1]
    tokens = make_tokens(lengths)
    packed = build(lambda: make(**settings))
    dispatch_packed(packed)
    # every document by a model that has seen no other; transformers 4.48 keeps the frequencies of
    # long rope where the model was built
    parts = tokens.cpu().split(lengths, dim=1)
    models = [build(lambda: make(**settings)).cpu() for _ in parts]
    alone = [model(part).logits for model, part in zip(models, parts)]
    exact = torch.cat(alone, dim=1).to(DEVICE)
    for _ in range(2):
        assert relative_rms(run_packed(packed, tokens, lengths), exact) < 1e-6
    stock = type(packed.model.rotary_emb).forward
    packed.model.rotary_emb.forward = stock.__get__(packed.model.rotary_emb)
    assert relative_rms(run_packed(packed, tokens, lengths), exact) > 1e-4


# -- XTuner's own path ----------------------------------------------------------------------------


def full_causal(q, k, v, dropout, softmax_scale, causal, **kwargs):
    """Do what ``flash_attn.flash_attn_func`` documents, ``(batch, seqlen, heads, headdim)``."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    assert causal
    y = F.scaled_dot_product_attention(q, k, v, scale=softmax_scale, is_causal=True)
    return y.transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("Llama", "llama:llama_attn_forward"),
        ("Mistral", "mistral:mistral_attn_forward"),
        ("Qwen2", "qwen2:qwen2_attn_forward"),
    ],
)
def test_the_path_of_xtuner_leaks_where_ours_does_not(monkeypatch, name, forward):
    """Once this fails, XTuner has mended its own."""
    module, function = forward.split(":")
    stock = getattr(import_module(f"xtuner.model.modules.dispatch.{module}"), function)
    installed = {"flash_attn_func": full_causal, "_flash_supports_window_size": True}
    for attribute, value in installed.items():
        monkeypatch.setattr(modeling_flash_attention_utils, attribute, value, raising=False)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    builder = FAMILIES[name]
    settings = {"sliding_window": None} if name == "Mistral" else {}
    ours, theirs, alone = (build(lambda: builder(**settings)) for _ in range(3))
    dispatch_packed(ours)
    theirs.config._attn_implementation = "flash_attention_2"
    for module in theirs.modules():
        if type(module).__name__.endswith("Attention"):
            module.forward = stock.__get__(module)
    tokens = make_tokens()
    exact = run_alone(alone, tokens)
    positions = PackedLayout.from_lengths(LENGTHS).to(DEVICE).positions
    assert relative_rms(run_packed(ours, tokens, position_ids=positions), exact) < 1e-6
    assert relative_rms(run_packed(theirs, tokens, position_ids=positions), exact) > 1e-2


# -- refusals -------------------------------------------------------------------------------------


@pytest.fixture
def llama():
    model = build(FAMILIES["Llama"], torch.float32)
    dispatch_packed(model)
    return model


def test_training_without_a_layout_is_refused_even_if_the_config_has_a_cache(llama):
    llama.config.use_cache = True
    with pytest.raises(RuntimeError, match=r"before 1 x 4 tokens reach .* got none"):
        llama.train()(make_tokens([4]))


def test_evaluation_without_a_layout_and_a_cache_is_refused(llama):
    with pytest.raises(RuntimeError, match=r"before 1 x 4 tokens reach .* got none"):
        llama.eval()(make_tokens([4]))


def test_a_layer_alone_without_a_layout_is_refused(llama):
    x = torch.randn(1, 4, 16, device=DEVICE)
    rotary = llama.model.rotary_emb(x, torch.arange(4, device=DEVICE)[None])
    with pytest.raises(RuntimeError, match=r"before 1 x 4 tokens reach .* got none"):
        llama.model.layers[0].self_attn(x, position_embeddings=rotary, attention_mask=None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"use_cache": True}, "use_cache must be False"),
        ({"output_attentions": True}, "output_attentions must be False .* got True"),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask must be None .* \(1, 4\)"),
    ],
    ids=["cache", "weights", "mask"],
)
def test_what_a_pack_has_no_place_for_is_refused(llama, arguments, told):
    with pytest.raises(RuntimeError, match=told):
        run_packed(llama, make_tokens([4]), [3, 1], **arguments)


@pytest.mark.parametrize("name", ["Llama", "Qwen2-MoE"])
def test_a_mask_for_a_layer_is_refused(name):
    model = build(FAMILIES[name], torch.float32)
    dispatch_packed(model)
    x = torch.randn(1, 4, 16, device=DEVICE)
    rotary = model.model.rotary_emb(x, torch.arange(4, device=DEVICE)[None])
    mask = torch.zeros(1, 1, 4, 4, device=DEVICE)
    layer = model.model.layers[0].self_attn
    with (
        PackedLayout.from_lengths([3, 1]).to(DEVICE).published(),
        pytest.raises(RuntimeError, match=r"must be None .* \(1, 1, 4, 4\)"),
    ):
        layer(x, position_embeddings=rotary, attention_mask=mask)


def test_a_layout_of_another_batch_is_refused(llama):
    with pytest.raises(RuntimeError, match=r"1 x 4 tokens, got 2 documents with 5 tokens"):
        run_packed(llama, make_tokens([4]), [2, 3])


def test_dropped_weights_are_refused_before_training():
    model = build(lambda: FAMILIES["Llama"](attention_dropout=0.1))
    with pytest.raises(RuntimeError, match=r"of LlamaAttention must be 0 .* got 0.1; load"):
        dispatch_packed(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_class_of_the_same_name_is_not_taken_for_that_of_transformers():
    class MixtralAttention(nn.Module):
        attention_dropout = 0.0

        def forward(self, hidden_states):
            return hidden_states.flip(1), None

    model = build(FAMILIES["Mixtral"])
    model.model.layers[1].self_attn = MixtralAttention()
    with pytest.raises(RuntimeError, match=r"MixtralAttention must .* got that of [\w.]+; load"):
        dispatch_packed(model)


def test_internlm3_is_a_llama_by_another_name():
    """Its code is on the Hub; of what it defines, only biases differ from a Llama."""
    names = ("LlamaAttention", "LlamaModel", "LlamaRotaryEmbedding")
    renamed = {
        name: type(name.replace("Llama", "InternLM3"), (getattr(modeling_llama, name),), {})
        for name in names
    }
    scaling = dict(max_position_embeddings=8, rope_scaling=dict(type="dynamic", factor=6.0))
    llama, internlm = (build(lambda: make("llama", **scaling)) for _ in range(2))
    for module in internlm.modules():
        module.__class__ = renamed.get(type(module).__name__, type(module))
    assert dispatch_packed(internlm).counts == {"InternLM3Attention": 2}
    dispatch_packed(llama)
    tokens = make_tokens()
    assert torch.equal(run_packed(internlm, tokens), run_packed(llama, tokens))


def test_attention_outside_a_known_decoder_is_refused():
    config = make("llama").config
    model = nn.Sequential(modeling_llama.LlamaAttention(config, 0))
    with pytest.raises(RuntimeError, match=r"every LlamaAttention must .* outside in Sequential"):
        dispatch_packed(model)


def test_deepseek_of_xtuner_does_not_import_with_its_own_pin():
    """Once this fails, DeepSeek-V2 can have a path."""
    with pytest.raises(ImportError, match="is_torch_greater_or_equal_than_1_13"):
        import_module("xtuner.model.transformers_models")
