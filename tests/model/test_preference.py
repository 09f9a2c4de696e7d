"""DPO, ORPO and reward model on packed pairs against XTuner's own on each pair alone."""

import copy

import pytest
import torch
from mmengine import ConfigDict
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    FalconMambaConfig,
    FalconMambaModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)
from xtuner.dataset.collate_fns.preference_collate_fn import preference_collate_fn
from xtuner.model.dpo import DPO
from xtuner.model.orpo import ORPO
from xtuner.model.reward import RewardModel

from xtuner_mamba.layout import PackedLayout, publish_layout
from xtuner_mamba.model import PackedDPO, PackedORPO, PackedRewardModel, dispatch_packed
from xtuner_mamba.model.preference_loss import (
    DPO_LOSSES,
    Pairs,
    answer_logps,
    log_odds_ratios,
    pairs_of,
)
from xtuner_mamba.testing import relative_rms

VOCAB = 20
# tokens of the prompt and of the two answers; one token, unlike lengths, ragged
PAIRS = [(3, 4, 2), (1, 1, 9), (5, 2, 1)]
REWARD_TOKEN = 19
KWARGS = {"DPO": dict(beta=0.5), "ORPO": dict(beta=0.5), "RewardModel": dict(penalty_weight=0.3)}
OURS = {"DPO": PackedDPO, "ORPO": PackedORPO, "RewardModel": PackedRewardModel}
XTUNERS = {"DPO": DPO, "ORPO": ORPO, "RewardModel": RewardModel}


def make_llm(seed: int = 0) -> MambaForCausalLM:
    torch.manual_seed(seed)
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=8, state_size=4, num_hidden_layers=2, use_cache=False
    )
    llm = MambaForCausalLM(config)
    with torch.no_grad():
        llm.backbone.embeddings.weight.mul_(10)
    return llm.double()


def make_pairs(reward: bool, least: int = 1) -> list[dict]:
    """XTuner's columns of a pair; token ids are at least ``least``."""
    draw = torch.Generator().manual_seed(0)
    pairs = []
    for prompt_length, *answer_lengths in PAIRS:
        prompt = torch.randint(least, VOCAB - 1, (prompt_length,), generator=draw).tolist()
        pair = {}
        for rank, (name, length) in enumerate(zip(("chosen", "rejected"), answer_lengths)):
            answer = torch.randint(least, VOCAB - 1, (length,), generator=draw).tolist()
            ids = prompt + answer
            # once the prompt is a target too, but for its first token that nothing comes before
            labels = ids[:] if len(pairs) == 1 else [-100] * prompt_length + answer
            if reward:
                ids, labels = [*ids, REWARD_TOKEN], [-100] * len(ids) + [rank]
            pair |= {f"{name}_ids": ids, f"{name}_labels": labels}
        pairs.append(pair)
    return pairs


def pack(pairs: list[dict]) -> tuple[PackedLayout, dict]:
    documents = [
        (pair[f"{name}_ids"], pair[f"{name}_labels"])
        for pair in pairs
        for name in ("chosen", "rejected")
    ]
    layout = PackedLayout.from_lengths([len(ids) for ids, _ in documents])
    columns = [[t for part in column for t in part] for column in zip(*documents)]
    data = {name: torch.tensor([c]) for name, c in zip(("input_ids", "labels"), columns)}
    return layout, {**data, "position_ids": layout.positions}


def build(kind: str, classes=OURS, **kwargs):
    """Build a model whose reference or head gives it something to learn."""
    if kind == "DPO" and "lora" not in kwargs:
        kwargs["ref_llm"] = make_llm(seed=1)
    llm = make_llm()
    kwargs = KWARGS[kind] | kwargs
    if classes is XTUNERS:
        model = build_xtuners(kind, llm, kwargs)
    else:
        model = classes[kind](llm, use_activation_checkpointing=False, **kwargs)
    if kind == "RewardModel":
        model.v_head.weight.data = torch.linspace(-1, 1, 8)[None].double()
    return model


def build_xtuners(kind, llm, kwargs):
    """XTuner takes a module in its signatures, but loses it."""
    ref_llm = kwargs.pop("ref_llm", None)
    if kind == "RewardModel":
        llm.model = llm.backbone
        model = RewardModel(llm, use_activation_checkpointing=False, **kwargs)
    else:
        config = ConfigDict(type=lambda **_: llm, pretrained_model_name_or_path="")
        cls = type(kind, (XTUNERS[kind],), {"_dispatch_lm_model_cfg": lambda self, cfg, _: cfg})
        model = cls(config, use_activation_checkpointing=False, **kwargs)
    if ref_llm is not None:
        model.ref_llm = ref_llm.requires_grad_(False)
    return model


def packed_loss(model, pairs, mean_pairs=None):
    layout, data = pack(pairs)
    with layout.published():
        if mean_pairs is not None:
            publish_layout(layout, torch.tensor(float(mean_pairs)))
        return model(data)["loss"]


def xtuners_loss(model, pairs):
    """The mean over pairs, each a padded batch of its own."""
    total = 0.0
    for pair in pairs:
        data = preference_collate_fn([pair])["data"]
        # a Mamba without its head takes none, and stops
        del data["position_ids"]
        total = total + model(data)["loss"].mean()
    return total / len(pairs)


def gradients(model, loss) -> dict[str, torch.Tensor]:
    loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


CASES = [
    *(("DPO", dict(loss_type=loss_type, label_smoothing=0.1)) for loss_type in DPO_LOSSES),
    ("ORPO", {}),
    ("RewardModel", {}),
    ("RewardModel", dict(loss_type="focal", penalty_type="L2")),
    ("RewardModel", dict(penalty_type="none")),
]


@pytest.mark.parametrize(("kind", "kwargs"), CASES, ids=str)
def test_loss_and_gradients_are_xtuners_of_the_pairs_one_by_one(kind, kwargs):
    pairs = make_pairs(reward=kind == "RewardModel")
    ours, theirs = build(kind, **kwargs), build(kind, XTUNERS, **kwargs)
    loss, exact = packed_loss(ours, pairs), xtuners_loss(theirs, pairs)
    # transformers rounds norms, residuals and logits to float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
    actual, expected = gradients(ours, loss), gradients(theirs, exact)
    assert actual.keys() - {"llm.lm_head.weight"} == expected.keys() - {"llm.lm_head.weight"}
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, f"{name} has no gradient to compare"
        assert relative_rms(actual[name], gradient) < 1e-5, name


@pytest.mark.parametrize("kind", KWARGS)
def test_step_is_the_mean_over_its_pairs_however_they_are_packed(kind):
    pairs = make_pairs(reward=kind == "RewardModel", least=0)
    assert any(0 in pair["chosen_ids"] + pair["rejected_ids"] for pair in pairs)
    whole, apart = build(kind), build(kind)
    expected = gradients(whole, packed_loss(whole, pairs))
    # two micro-batches, of one pair and of two
    losses = [packed_loss(apart, part, mean_pairs=1.5) for part in (pairs[:1], pairs[1:])]
    for name, gradient in gradients(apart, sum(losses) / 2).items():
        assert relative_rms(gradient, expected[name]) < 1e-6, name
    # a mean of means would be another step
    means = [packed_loss(apart, part) for part in (pairs[:1], pairs[1:])]
    assert (sum(means) / 2).item() != pytest.approx((sum(losses) / 2).item(), rel=1e-3)


@pytest.mark.parametrize("kind", KWARGS)
def test_a_pair_changes_no_bit_of_the_others(kind):
    pairs = make_pairs(reward=kind == "RewardModel")
    layout, data = pack(pairs)
    owner = layout.seq_idx[0] // 2
    model = build(kind).float()

    def gradient(victim_value):
        embeds = model.llm.get_input_embeddings()(data["input_ids"]).detach()
        embeds[:, owner == 1] += victim_value
        embeds.requires_grad_()
        with layout.published():
            loss = model({**data, "input_ids": None, "inputs_embeds": embeds})["loss"]
            loss.backward()
        return embeds.grad

    clean, poisoned = gradient(0.0), gradient(float("nan"))
    others = owner != 1
    assert torch.equal(clean[:, others], poisoned[:, others])
    assert clean[:, others].abs().max() > 0
    assert poisoned[:, ~others].isnan().any()


def test_chosen_and_rejected_do_not_see_each_other():
    layout, data = pack(make_pairs(reward=False))
    llm = make_llm().float()
    dispatch_packed(llm)
    embeds = llm.get_input_embeddings()(data["input_ids"]).detach()

    def logps(embeds):
        with layout.published(), torch.no_grad():
            return answer_logps(llm(inputs_embeds=embeds).logits, data["labels"], layout)

    clean = logps(embeds)
    # the chosen answer of the second pair
    embeds[:, layout.seq_idx[0] == 2] = float("nan")
    poisoned = logps(embeds)
    assert torch.equal(poisoned.rejected, clean.rejected)
    assert poisoned.chosen.isnan().tolist() == [False, True, False]
    assert torch.equal(poisoned.chosen[[0, 2]], clean.chosen[[0, 2]])


@pytest.mark.parametrize("kind", ["DPO", "ORPO"])
def test_a_token_of_id_0_is_a_target_as_any_other(kind):
    """Mamba's end of text is id 0, which XTuner leaves out: nobody would learn to stop."""
    pairs = make_pairs(reward=False)
    for pair in pairs:
        for name in ("chosen", "rejected"):
            pair[f"{name}_ids"][-1] = pair[f"{name}_labels"][-1] = 0
    # the same model with two of its tokens renamed
    renamed = copy.deepcopy(pairs)
    for pair in renamed:
        for column in pair.values():
            column[:] = [{0: 18, 18: 0}.get(token, token) for token in column]
    losses = []
    for these in (pairs, renamed):
        model = build(kind)
        if these is renamed:
            for llm in filter(None, (model.llm, getattr(model, "ref_llm", None))):
                weight = llm.get_input_embeddings().weight.data
                weight[[0, 18]] = weight[[18, 0]]
        losses.append(packed_loss(model, these).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert xtuners_loss(build(kind, XTUNERS), pairs).item() != pytest.approx(losses[0], rel=1e-3)


def test_policy_with_lora_is_its_own_reference():
    lora = LoraConfig(r=2, target_modules=["in_proj", "out_proj"], init_lora_weights=False)
    model = build("DPO", lora=lora)
    assert model.ref_llm is None
    pairs = make_pairs(reward=False)
    actual = gradients(model, packed_loss(model, pairs))
    assert len(actual) == 8
    assert all("lora_" in name for name in actual)
    other = build("DPO", lora=lora)
    other.load_state_dict(model.state_dict(), strict=False)
    other.ref_llm = make_llm()
    dispatch_packed(other.ref_llm)
    expected = gradients(other, packed_loss(other, pairs))
    for name, gradient in actual.items():
        assert gradient.abs().max() > 0, name
        assert relative_rms(gradient, expected[name]) < 1e-6, name


def test_reference_stays_in_evaluation_and_frozen():
    model = build("DPO").train()
    assert model.llm.training
    assert not any(module.training for module in model.ref_llm.modules())
    assert not any(parameter.requires_grad for parameter in model.ref_llm.parameters())
    # a copy of the policy where none is given
    copied = PackedDPO(make_llm(), use_activation_checkpointing=True)
    assert packed_loss(copied, make_pairs(reward=False)).item() == pytest.approx(0.6931, abs=1e-4)


def test_loss_that_depends_on_the_batch_is_refused_before_anything_is_built():
    with pytest.raises(ValueError, match=r"loss_type must be one of sigmoid, .*, got 'kto_pair'"):
        PackedDPO(None, loss_type="kto_pair")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (dict(beta=0, loss_type="ipo"), "beta must be positive and finite, got 0;"),
        (dict(beta=float("nan")), "beta must be positive and finite, got nan;"),
        (dict(label_smoothing=0.5, loss_type="robust"), r"must be in \[0, 0.5\), got 0.5; pairs"),
        (dict(label_smoothing=-0.1), r"label_smoothing must be in \[0, 0.5\), got -0.1;"),
    ],
)
def test_numbers_without_a_finite_loss_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        PackedDPO(None, **numbers)


@pytest.mark.parametrize("kind", KWARGS)
def test_options_reach_the_mixers(kind):
    options = dict(fuse_norm=True, recompute=True)
    model = build(kind, **options)
    bound = [
        module.forward.keywords
        for module in model.modules()
        if type(module).__name__ in ("MambaMixer", "MambaRMSNorm")
    ]
    assert len(bound) >= 4
    assert all(keywords[name] for keywords in bound for name in options.keys() & keywords.keys())


def test_half_a_pair_is_refused():
    with pytest.raises(ValueError, match="even number of documents, got 3; build"):
        pairs_of(torch.zeros(3))


def test_log_odds_are_finite_where_an_answer_is_certain():
    certain = torch.tensor([0.0, -1e-30, -1.0], requires_grad=True)
    odds = log_odds_ratios(Pairs(certain, torch.tensor([-2.0, 0.0, -3.0])))
    odds.sum().backward()
    assert torch.isfinite(odds).all()
    assert torch.isfinite(certain.grad).all()
    p, q = torch.tensor([-1.0, -3.0]).exp()
    torch.testing.assert_close(odds[2], torch.log(p / (1 - p) / (q / (1 - q))))


@pytest.mark.parametrize("kind", KWARGS)
def test_training_without_a_layout_is_refused(kind):
    _, data = pack(make_pairs(reward=kind == "RewardModel"))
    with pytest.raises(RuntimeError, match="tokens reach a dispatched mixer, got none"):
        build(kind)(data)


def test_without_varlen_it_is_xtuners_own_model():
    pairs = make_pairs(reward=True)
    ours, theirs = build("RewardModel", use_varlen_attn=False), build("RewardModel", XTUNERS)
    assert "forward" not in ours.llm.layers[0].mixer.__dict__
    assert torch.equal(xtuners_loss(ours, pairs), xtuners_loss(theirs, pairs))


def test_reward_is_read_in_float32_under_autocast():
    model = build("RewardModel").float()
    seen = []
    model.v_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        packed_loss(model, make_pairs(reward=True))
    assert seen == [torch.float32]
    model.autocast_dtype = "bfloat16"
    assert packed_loss(model, make_pairs(reward=True)).dtype == torch.float32
    with pytest.raises(ValueError, match="got 'int8'"):
        PackedRewardModel(None, autocast_dtype="int8")
    with pytest.raises(ValueError, match=r"^recompute must be None, True or False, got 'no'; "):
        PackedRewardModel(None, recompute="no")


@pytest.fixture(scope="module")
def tokenizer_cfg(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return dict(type=AutoTokenizer.from_pretrained, pretrained_model_name_or_path=str(path))


def test_lora_checkpoint_holds_the_reward_head():
    lora = LoraConfig(r=2, target_modules=["in_proj", "out_proj"], init_lora_weights=False)
    model = build("RewardModel", lora=lora)
    state = model.state_dict()
    assert torch.equal(state["v_head.weight"], model.v_head.weight)
    assert sum("lora_" in name for name in state) == len(state) - 1 == 8


@pytest.mark.parametrize("lora", [False, True])
def test_saved_reward_model_gives_the_same_scores(tokenizer_cfg, tmp_path, lora):
    kwargs = {}
    if lora:
        targets = ["in_proj", "out_proj", "embeddings"]
        kwargs["lora"] = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model = build("RewardModel", **kwargs).float().eval()
    pairs = make_pairs(reward=True)
    layout, data = pack(pairs)
    with layout.published(), torch.no_grad():
        (predicted,) = model(dict(data), mode="predict")
    scores = predicted["logits"][layout.cu_seqlens[1:].long() - 1]
    assert scores.std() > 0.02

    model.to_hf(ConfigDict(tokenizer=tokenizer_cfg), str(tmp_path), fp32=True)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True)
    # padded rows, as others would score them
    ids = data["input_ids"][0].split(layout.lengths)
    rows = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in ids], batch_first=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(rows, attention_mask=mask).logits, scores)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(loaded(rows).logits, scores)


def test_a_reward_model_that_nothing_can_load_is_not_saved(tmp_path):
    model = build("RewardModel")
    config = FalconMambaConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1)
    model.llm = FalconMambaModel(config)
    with pytest.raises(ValueError, match=r"with its head, got FalconMambaModel; the weights"):
        model.to_hf(ConfigDict(), str(tmp_path))


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_reward_model_that_transformers_has_a_class_for_is_saved(
    tokenizer_cfg, tmp_path, lora, fp32
):
    torch.manual_seed(0)
    settings = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=2)
    llm = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, pad_token_id=0, **settings))
    kwargs = {}
    if lora:
        kwargs["lora"] = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = PackedRewardModel(llm, use_activation_checkpointing=False, **kwargs).eval()
    model.v_head.weight.data = torch.linspace(-1, 1, 8)[None]
    layout, data = pack(make_pairs(reward=True))
    with layout.published(), torch.no_grad():
        (predicted,) = model(dict(data), mode="predict")
    scores = predicted["logits"][layout.cu_seqlens[1:].long() - 1]
    model.to_hf(ConfigDict(tokenizer=tokenizer_cfg), str(tmp_path), fp32=fp32)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, torch_dtype="auto")
    assert loaded.dtype == (torch.float32 if fp32 else torch.float16)
    rows = data["input_ids"][0].split(layout.lengths)
    with torch.no_grad():
        actual = torch.cat([loaded(row[None]).logits for row in rows])
    assert scores.std() > 0.02
    tolerance = 1e-5 if fp32 else 1e-2
    torch.testing.assert_close(actual.float(), scores, atol=tolerance, rtol=tolerance)


def test_reward_model_of_remote_code_is_left_to_xtuner(tmp_path, monkeypatch):
    model = build("RewardModel")
    model.llm = FalconMambaModel(FalconMambaConfig(hidden_size=8, num_hidden_layers=1))
    model.llm.config.auto_map = {"AutoModelForCausalLM": "modeling.Model"}
    saved = []
    monkeypatch.setattr(RewardModel, "to_hf", lambda self, *args, **kwargs: saved.append(args))
    cfg = ConfigDict()
    model.to_hf(cfg, str(tmp_path), fp32=True)
    assert saved == [(cfg, str(tmp_path), True, {})]
