"""Checkpoints of mamba_ssm: the same bits there and back, and the logits of the formulas."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)

from xtuner_mamba.testing import relative_rms
from xtuner_mamba.tools.convert_mamba_ssm import convert, main
from xtuner_mamba.tools.mamba_ssm_format import config_from_mamba_ssm, config_to_mamba_ssm

CONFIGS = {
    # as on state-spaces/mamba-130m, but for the sizes
    "mamba": {
        "d_model": 8,
        "n_layer": 2,
        "vocab_size": 21,
        "ssm_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
    },
    # as on state-spaces/mamba2-130m, but for the sizes
    "mamba2": {
        "d_model": 8,
        "d_intermediate": 0,
        "n_layer": 2,
        "vocab_size": 21,
        "ssm_cfg": {"layer": "Mamba2", "d_state": 4, "headdim": 4, "chunk_size": 8},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": True,
    },
}
PADDED_VOCAB = 24


def make_weights(kind: str, tied: bool = True) -> dict[str, torch.Tensor]:
    """Draw what mamba_ssm would save, ``A_log`` and ``D`` in another dtype than the rest."""
    dim, inner, dstate, rank, width = 8, 16, 16, 1, 4
    shapes = {
        "in_proj.weight": (2 * inner, dim),
        "conv1d.weight": (inner, 1, width),
        "conv1d.bias": (inner,),
        "x_proj.weight": (rank + 2 * dstate, inner),
        "dt_proj.weight": (inner, rank),
        "dt_proj.bias": (inner,),
        "A_log": (inner, dstate),
        "D": (inner,),
        "out_proj.weight": (dim, inner),
    }
    if kind == "mamba2":
        dstate, nheads = 4, 4
        shapes = {
            "in_proj.weight": (2 * inner + 2 * dstate + nheads, dim),
            "conv1d.weight": (inner + 2 * dstate, 1, width),
            "conv1d.bias": (inner + 2 * dstate,),
            "dt_bias": (nheads,),
            "A_log": (nheads,),
            "D": (nheads,),
            "norm.weight": (inner,),
            "out_proj.weight": (dim, inner),
        }
    draw = torch.Generator().manual_seed(0)
    weights = {"backbone.embedding.weight": torch.randn(PADDED_VOCAB, dim, generator=draw)}
    for layer in range(2):
        for name, shape in shapes.items():
            value = 0.5 * torch.randn(shape, generator=draw)
            weights[f"backbone.layers.{layer}.mixer.{name}"] = value
        weights[f"backbone.layers.{layer}.norm.weight"] = 1 + 0.3 * torch.randn(dim, generator=draw)
    weights["backbone.norm_f.weight"] = 1 + 0.3 * torch.randn(dim, generator=draw)
    for name, value in weights.items():
        # values that float16 has, so that both dtypes compute the same
        weights[name] = value.half() if name.endswith(("A_log", ".D")) else value.half().float()
    embedding = weights["backbone.embedding.weight"]
    weights["lm_head.weight"] = embedding if tied else embedding.flip(0).contiguous()
    return weights


@pytest.fixture
def write(tmp_path):
    def write(kind: str, weights=None, **changes):
        folder = tmp_path / "mamba_ssm"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIGS[kind] | changes))
        tied = changes.get("tie_embeddings", True)
        weights = make_weights(kind, tied) if weights is None else weights
        torch.save(weights, folder / "pytorch_model.bin")
        return folder

    return write


def rms_norm(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def logits_from_the_paper(kind: str, weights: dict, input_ids: list[int]) -> torch.Tensor:
    """Evaluate mamba_ssm's weights a token and a state update at a time, in float64."""
    w = {name: value.double() for name, value in weights.items()}
    mixer = {"mamba": mix_1, "mamba2": mix_2}[kind]
    residual = w["backbone.embedding.weight"][input_ids]
    for layer in range(2):
        prefix = f"backbone.layers.{layer}."
        own = {name.removeprefix(f"{prefix}mixer."): w[name] for name in w if prefix in name}
        residual = residual + mixer(own, rms_norm(residual, w[f"{prefix}norm.weight"]))
    return rms_norm(residual, w["backbone.norm_f.weight"]) @ w["lm_head.weight"].T


def convolve(w, x):
    width = w["conv1d.weight"].shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    taps = [padded[k : k + len(x)] * w["conv1d.weight"][:, 0, k] for k in range(width)]
    return F.silu(sum(taps) + w["conv1d.bias"])


def mix_1(w, u):
    x, z = (u @ w["in_proj.weight"].T).chunk(2, dim=-1)
    x = convolve(w, x)
    dt, B, C = (x @ w["x_proj.weight"].T).split([1, 16, 16], dim=-1)
    dt = F.softplus(dt @ w["dt_proj.weight"].T + w["dt_proj.bias"])
    state, ys = torch.zeros_like(w["A_log"]), []
    for t in range(len(u)):
        decay = torch.exp(-dt[t][:, None] * torch.exp(w["A_log"]))
        state = decay * state + (dt[t] * x[t])[:, None] * B[t]
        ys.append(state @ C[t] + w["D"] * x[t])
    return (torch.stack(ys) * F.silu(z)) @ w["out_proj.weight"].T


def mix_2(w, u):
    z, xBC, dt = (u @ w["in_proj.weight"].T).split([16, 24, 4], dim=-1)
    x, B, C = convolve(w, xBC).split([16, 4, 4], dim=-1)
    dt = F.softplus(dt + w["dt_bias"])
    state, ys = torch.zeros(4, 4, 4, dtype=torch.float64), []
    for t in range(len(u)):
        x_t = x[t].view(4, 4)
        decay = torch.exp(-dt[t] * torch.exp(w["A_log"]))[:, None, None]
        state = decay * state + (dt[t][:, None] * x_t)[:, :, None] * B[t]
        ys.append((state @ C[t] + w["D"][:, None] * x_t).flatten())
    return rms_norm(torch.stack(ys) * F.silu(z), w["norm.weight"]) @ w["out_proj.weight"].T


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_imported_model_computes_the_formulas_of_the_paper(write, tmp_path, kind, tied):
    done = convert(write(kind, tie_embeddings=tied), tmp_path / "hf")
    assert (done.source_format, done.target_format) == ("mamba_ssm", "transformers")
    assert (done.layers, done.vocab_size, done.dtypes) == (2, PADDED_VOCAB, ["float16", "float32"])
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert "backbone.embeddings.weight" in stored
    assert ("lm_head.weight" in stored) != tied
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", torch_dtype=torch.float32).eval()
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    input_ids = [3, 1, 20, 0, 7, 7, 2, 11, 5, 20, 13]
    exact = logits_from_the_paper(kind, make_weights(kind, tied), input_ids)
    with torch.no_grad():
        logits = model(torch.tensor([input_ids])).logits[0]
    assert relative_rms(logits, exact) < 1e-5
    swapped = logits_from_the_paper(kind, make_weights(kind, not tied), input_ids)
    assert relative_rms(swapped, exact) > 0.1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_there_and_back_keeps_every_bit(write, tmp_path, kind, tied):
    source = write(kind, tie_embeddings=tied)
    convert(source, tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "back")
    assert (done.source_format, done.target_format) == ("transformers", "mamba_ssm")
    before = torch.load(source / "pytorch_model.bin")
    after = torch.load(tmp_path / "back" / "pytorch_model.bin")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert weight.dtype == after[name].dtype, name
        assert torch.equal(weight, after[name]), name
    # the config says the same in other words
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    imported = config_from_mamba_ssm(json.loads((source / "config.json").read_text()))
    assert config_from_mamba_ssm(written).to_dict() == imported.to_dict()
    convert(tmp_path / "back", tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").vocab_size == PADDED_VOCAB


@pytest.mark.parametrize("safe", [True, False])
def test_model_of_transformers_is_exported_and_comes_back(tmp_path, safe):
    config = MambaConfig(
        vocab_size=20, hidden_size=8, state_size=3, conv_kernel=3, num_hidden_layers=2, expand=3
    )
    torch.manual_seed(0)
    model = MambaForCausalLM(config)
    # in several files, as of models that do not fit into one
    model.save_pretrained(tmp_path / "hf", safe_serialization=safe, max_shard_size="4KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors" if safe else "*.bin"))) > 1
    exported = convert(tmp_path / "hf", tmp_path / "mamba_ssm")
    # the tied head, which a *.bin has under a second name, is no other parameter
    assert exported.parameters == sum(p.numel() for p in model.parameters())
    written = json.loads((tmp_path / "mamba_ssm" / "config.json").read_text())
    assert written["ssm_cfg"] == {"d_state": 3, "d_conv": 3, "expand": 3, "dt_rank": 1}
    assert convert(tmp_path / "mamba_ssm", tmp_path / "back").parameters == exported.parameters
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(back[name], weight), name


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mamba", dict(rms_norm=False), "^rms_norm must be True for .*, got False"),
        ("mamba", dict(rms_norm=None), "^rms_norm must be True for .*, got None"),
        ("mamba2", dict(d_intermediate=16), "^d_intermediate must be 0 .*, got 16"),
        ("mamba2", dict(attn_layer_idx=[1]), r"^attn_layer_idx must be \[\] .*, got \[1\]"),
        ("mamba2", dict(ssm_cfg=dict(layer="Mamba2", ngroups=2)), "ssm_cfg.ngroups must be 1 .* 2"),
        ("mamba", dict(ssm_cfg=dict(layer="Mamba3")), "must be Mamba1 or Mamba2, got 'Mamba3'"),
        ("mamba", dict(ssm_cfg=dict(headdim=4)), r"knows of a Mamba1, got \['headdim'\]"),
        ("mamba", dict(n_layer=3), r"got no for backbone.layers.2.\S+, which should be \("),
        ("mamba", dict(vocab_size=25), r"got \(24, 8\) for backbone.emb\S+, which should be \(32"),
        ("mamba", dict(n_layer=1), r"for backbone.layers.1.\S+, which should be none \(10 of 12"),
    ],
)
def test_model_that_transformers_does_not_have_is_refused(write, tmp_path, kind, changes, message):
    source = write(kind, **changes)
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_keys_left_out_have_the_defaults_of_mamba_ssm():
    config = config_from_mamba_ssm({"d_model": 8, "n_layer": 2})
    # 50,277 rounded up to a multiple of 8
    assert (config.vocab_size, config.residual_in_fp32) == (50280, True)
    rounded = config_from_mamba_ssm({"d_model": 8, "n_layer": 2, "vocab_size": 21})
    assert rounded.vocab_size == 24


def test_limits_of_dt_come_along_and_back(tmp_path):
    settings = dict(vocab_size=24, hidden_size=8, state_size=4, head_dim=4, num_heads=4, n_groups=1)
    config = Mamba2Config(
        **settings, num_hidden_layers=2, chunk_size=8, time_step_limit=(0.1, 0.5), bos_token_id=0
    )
    torch.manual_seed(0)
    Mamba2ForCausalLM(config).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "mamba_ssm")
    written = json.loads((tmp_path / "mamba_ssm" / "config.json").read_text())
    assert written["ssm_cfg"]["dt_limit"] == [0.1, 0.5]
    convert(tmp_path / "mamba_ssm", tmp_path / "back")
    assert tuple(AutoConfig.from_pretrained(tmp_path / "back").time_step_limit) == (0.1, 0.5)
    config.time_step_limit = [0.0, float("inf")]
    assert "dt_limit" not in config_to_mamba_ssm(config)["ssm_cfg"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pytorch_model.bin", b"xx", r"^pytorch_model.bin must hold .* read \(UnpicklingError\)"),
        ("pytorch_model.bin", b"", r"^pytorch_model.bin must hold .* read \(EOFError\)"),
        ("model.safetensors", b"xx", r"^model.safetensors must hold .* \(SafetensorError\); down"),
        ("config.json", b"[1]", r"^config.json must hold an object, got \[1\]; download"),
    ],
)
def test_damaged_file_is_named(write, tmp_path, name, content, message):
    source = write("mamba")
    (source / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_download_that_was_cut_short_is_named(write, tmp_path):
    source = write("mamba")
    path = source / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"^pytorch_model.bin must hold .*; download it again"):
        convert(source, tmp_path / "hf")


def test_weights_of_an_old_pytorch_are_read(write, tmp_path):
    source = write("mamba")
    path = source / "pytorch_model.bin"
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
    assert convert(source, tmp_path / "hf").layers == 2


def test_tokenizer_that_is_not_there_leaves_no_target(write, tmp_path, capsys):
    target, missing = tmp_path / "hf", str(tmp_path / "nothing")
    assert main([str(write("mamba")), str(target), "--tokenizer", missing]) == 1
    error = capsys.readouterr().err
    assert ": --tokenizer must name a folder with a tokenizer, or one on the Hub" in error
    assert f"got {missing!r} (" in error
    assert not target.exists()


def test_name_on_the_hub_is_told_from_a_folder(tmp_path, capsys):
    assert main(["state-spaces/mamba-130m", str(tmp_path / "hf")]) == 1
    said = capsys.readouterr().err
    assert "with a config.json, got state-spaces/mamba-130m; download" in said
    assert not (tmp_path / "hf").exists()


def test_head_that_only_the_config_takes_for_tied_is_not_lost(write, tmp_path):
    source = write("mamba", make_weights("mamba", tied=False))
    with pytest.raises(ValueError, match=r"lm_head.weight must be the embeddings' .*, got another"):
        convert(source, tmp_path / "hf")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MambaConfig(hidden_act="gelu"), "hidden_act must be silu in mamba_ssm's Mamba1, got gelu"),
        (MambaConfig(layer_norm_epsilon=1e-6), "layer_norm_epsilon must be 1e-05 .*, got 1e-06"),
        (Mamba2Config(), "n_groups must be 1 in mamba_ssm's Mamba2, got 8"),
    ],
)
def test_model_that_mamba_ssm_does_not_have_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config_to_mamba_ssm(config)


def test_command_tells_what_it_did_and_overwrites_nothing(write, tmp_path, capsys):
    source, target = str(write("mamba")), str(tmp_path / "hf")
    assert main([source, target, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == PADDED_VOCAB
    assert main([source, target]) == 1
    assert f"target must not exist, got {target}; choose" in capsys.readouterr().err
    assert main([target, str(tmp_path / "back")]) == 0
    assert "MambaForCausalLM" in capsys.readouterr().out
    # a folder of something else, and one without weights
    other = tmp_path / "other"
    other.mkdir()
    assert main([str(other), str(tmp_path / "none")]) == 1
    (other / "config.json").write_text('{"model_type": "llama"}')
    (other / "pytorch_model.bin").write_bytes((tmp_path / "back/pytorch_model.bin").read_bytes())
    assert main([str(other), str(tmp_path / "none")]) == 1
    assert "got 'llama' and ['model_type']" in capsys.readouterr().err
    (other / "pytorch_model.bin").unlink()
    assert main([str(other), str(tmp_path / "none")]) == 1
    assert "must hold *.safetensors or pytorch_model*.bin, got ['config" in capsys.readouterr().err


def test_command_brings_a_tokenizer(write, tmp_path, capsys):
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tokenizer")
    tokenizer = str(tmp_path / "tokenizer")
    assert main([str(write("mamba")), str(tmp_path / "hf"), "--tokenizer", tokenizer]) == 0
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert "gpt-neox" not in capsys.readouterr().out
