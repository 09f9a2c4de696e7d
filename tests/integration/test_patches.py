"""Each patch on a copy of its target as others wrote it: the effect, and that it still fits."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from mmengine.config.lazy import LazyObject
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from torch.nn.utils import parametrize
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from xtuner_mamba import integration
from xtuner_mamba.integration import PATCHES
from xtuner_mamba.integration.devices import without_gpu
from xtuner_mamba.model.dispatch import DISPATCH_TABLE


@pytest.fixture
def patched(pristine):
    """Return a copy of a module with every patch that waits for it."""

    def execute(name: str):
        module = pristine(name)
        for entry in PATCHES:
            if (entry.target or entry.after) == name:
                integration.apply(entry, module)
        return module

    return execute


@pytest.mark.parametrize("entry", PATCHES, ids=lambda entry: entry.function)
def test_target_is_what_the_patch_was_written_for(pristine, entry):
    integration.apply(entry, pristine(entry.target or entry.after))
    # the pins of the package are what "checked on" says
    for package in ("xtuner", "mmengine", "deepspeed", "bitsandbytes"):
        if package in entry.checked_on:
            assert f"{package} {version(package)}" in entry.checked_on


def test_moved_target_is_told_and_the_rest_goes_on(pristine, monkeypatch):
    module = pristine("xtuner.configs")
    entry = next(entry for entry in PATCHES if entry.after == module.__name__)
    moved = replace(entry, needs=("cfgs_name_path", "Class.method"))
    monkeypatch.setattr(integration, "PATCHES", (moved, entry))
    message = (
        r"leaves templates:add_templates out: xtuner.configs must have cfgs_name_path, "
        r"Class.method, got no Class.method; install .* \(xtuner 0\.2\.0\), or set XTUNER_MAMBA_"
    )
    with pytest.warns(RuntimeWarning, match=message):
        integration.patch(module)
    assert "mamba_130m_full_alpaca_e3_varlen" in module.cfgs_name_path


def test_modules_without_a_patch_stay_as_they_are(pristine):
    module = pristine("xtuner.utils.constants")
    before = dict(vars(module))
    integration.patch(module)
    assert vars(module) == before


def test_templates_stand_beside_those_of_xtuner(pristine, patched):
    theirs = pristine("xtuner.configs").cfgs_name_path
    both = patched("xtuner.configs").cfgs_name_path
    ours = set(both) - set(theirs)
    assert "mamba_1_4b_full_alpaca_e3_32k_varlen" in ours
    assert all("mamba" in name and os.path.isfile(both[name]) for name in ours)
    assert {name: both[name] for name in theirs} == theirs


class _Attention(nn.Module):
    def forward(self):
        return type(self).__name__


class FirstAttention(_Attention):
    pass


class SecondAttention(_Attention):
    pass


def first_forward(self):
    return "first"


def second_forward(self):
    return "second"


@pytest.fixture
def dispatch(patched):
    """XTuner's dispatch with two attention classes of ours in its table, and flash-attn."""
    module = patched("xtuner.model.modules.dispatch")
    module.SUPPORT_FLASH2 = True
    for name, forward in (("FirstAttention", first_forward), ("SecondAttention", second_forward)):
        module.VARLEN_ATTN_DISPATCH_MAPPING[name] = LazyObject(__name__, forward.__name__)
    return module


def make_mamba() -> MambaForCausalLM:
    return MambaForCausalLM(
        MambaConfig(vocab_size=8, hidden_size=8, state_size=4, num_hidden_layers=2)
    )


def test_table_of_xtuner_holds_our_mixers(dispatch):
    for name, path in DISPATCH_TABLE.items():
        entry = dispatch.VARLEN_ATTN_DISPATCH_MAPPING[name].build()
        assert f"{entry.__module__}:{entry.__name__}" == path


def test_every_class_gets_its_own_forward(dispatch):
    model = nn.Sequential(FirstAttention(), SecondAttention(), make_mamba())
    dispatch.dispatch_varlen_attn_forward(model)
    assert [model[0](), model[1]()] == ["first", "second"]
    mixer = model[2].backbone.layers[0].mixer
    assert mixer.forward.func.__module__ == "xtuner_mamba.model.dispatch.mamba"


def test_xtuner_gives_the_first_forward_to_all(dispatch, pristine):
    stock = pristine("xtuner.model.modules.dispatch")
    stock.SUPPORT_FLASH2 = True
    stock.VARLEN_ATTN_DISPATCH_MAPPING = dispatch.VARLEN_ATTN_DISPATCH_MAPPING
    model = nn.Sequential(FirstAttention(), SecondAttention())
    stock.dispatch_varlen_attn_forward(model)
    # once this fails, the patch has nothing to mend any more
    assert [model[0](), model[1]()] == ["first", "first"]


def test_model_of_xtuner_alone_is_dispatched_by_its_table(dispatch):
    model = nn.Sequential(FirstAttention(), SecondAttention())
    dispatch.dispatch_varlen_attn_forward(model)
    assert [model[0](), model[1]()] == ["first", "second"]


def test_a_layer_whose_class_was_renamed_gets_its_own_forward(dispatch):
    model = nn.Sequential(FirstAttention(), SecondAttention())
    for layer in model:
        layer.register_buffer("of_each_layer", torch.zeros(1))
        parametrize.register_parametrization(layer, "of_each_layer", nn.Identity())
    dispatch.dispatch_varlen_attn_forward(model)
    assert [model[0](), model[1]()] == ["first", "second"]


def test_mamba_needs_no_flash_attn(dispatch):
    dispatch.SUPPORT_FLASH2 = False
    model = make_mamba()
    dispatch.dispatch_varlen_attn_forward(model)
    assert "forward" in vars(model.backbone.layers[1].mixer)


def test_attention_that_only_xtuner_keeps_apart_is_refused_without_flash_attn(dispatch):
    dispatch.SUPPORT_FLASH2 = False
    model = nn.Sequential(make_mamba(), FirstAttention())
    with pytest.raises(RuntimeError, match=r"flash-attn must .* \['FirstAttention'\]"):
        dispatch.dispatch_varlen_attn_forward(model)
    assert "forward" not in vars(model[0].backbone.layers[0].mixer)


@pytest.mark.parametrize("with_flash_attn", [True, False])
def test_attention_of_llama_is_ours_with_and_without_flash_attn(dispatch, with_flash_attn):
    dispatch.SUPPORT_FLASH2 = with_flash_attn
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    dispatch.dispatch_varlen_attn_forward(model)
    forward = model.model.layers[0].self_attn.forward
    assert forward.func.__module__ == "xtuner_mamba.model.dispatch.attention"


@pytest.mark.parametrize("also", [[], [FirstAttention()]], ids=["alone", "beside-known-ones"])
def test_layers_without_a_varlen_path_are_refused_by_name(dispatch, also):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_head=2, n_layer=1, n_positions=8))
    model = nn.Sequential(gpt2, *also)
    with pytest.raises(RuntimeError, match=r"varlen path, got none for \['GPT2\w*Attention'\]"):
        dispatch.dispatch_varlen_attn_forward(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_model_without_token_mixers_is_refused(dispatch):
    with pytest.raises(RuntimeError, match=r"Linear must have .* \['Linear'\]"):
        dispatch.dispatch_varlen_attn_forward(nn.Linear(1, 1))


def test_full_attention_stays_the_business_of_xtuner(pristine, patched):
    name = "xtuner.model.modules.dispatch"
    ours, theirs = patched(name), pristine(name)
    assert ours.dispatch_attn_forward.__code__ == theirs.dispatch_attn_forward.__code__
    model = make_mamba()
    ours.dispatch_modules(model, use_varlen_attn=False)
    assert not any("forward" in vars(module) for module in model.modules())


def test_cpu_answers_whether_it_has_bfloat16(patched, monkeypatch):
    monkeypatch.delattr(torch.cpu, "is_bf16_supported", raising=False)
    patched("xtuner.utils.device")
    assert torch.cpu.is_bf16_supported() is True
    assert torch.ones(2, dtype=torch.bfloat16).sum() == 2


def test_process_groups_start_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", set_device := _raise_without_gpu)
    assert without_gpu(lambda rank: torch.cuda.set_device(rank) or "started")(0) == "started"
    assert torch.cuda.set_device is set_device
    # with a GPU it is selected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="no GPU 0"):
        without_gpu(lambda rank: torch.cuda.set_device(rank))(0)


def _raise_without_gpu(device):
    raise RuntimeError(f"no GPU {device}")


@pytest.mark.parametrize("launcher", ["pytorch", "slurm", "mpi"])
def test_every_launcher_of_mmengine_starts_without_a_gpu(patched, pristine, launcher):
    name = f"_init_dist_{launcher}"
    theirs = getattr(pristine("mmengine.dist.utils"), name)
    assert "set_device" in theirs.__code__.co_names
    assert getattr(patched("mmengine.dist.utils"), name).__wrapped__.__code__ == theirs.__code__


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "iter_1.pth"
    torch.save({"meta": {"seed": 7}, "history": range(3)}, path)
    return str(path)


def test_checkpoints_hold_more_than_weights(pristine, checkpoint):
    # once this passes, the patches have nothing to mend any more
    with pytest.raises(Exception, match="weights_only"):
        pristine("mmengine.runner.checkpoint").load_from_local(checkpoint, "cpu")
    with pytest.raises(Exception, match="weights_only"):
        pristine("xtuner.tools.utils").get_seed_from_checkpoint(checkpoint)


def test_own_checkpoints_are_read_in_full(patched, checkpoint):
    module = patched("mmengine.runner.checkpoint")
    loaded = module.CheckpointLoader.load_checkpoint(checkpoint, "cpu")
    assert loaded["history"] == range(3)
    assert patched("xtuner.tools.utils").get_seed_from_checkpoint(checkpoint) == 7
    with pytest.raises(FileNotFoundError, match="iter_2"):
        module.CheckpointLoader.load_checkpoint(checkpoint.replace("iter_1", "iter_2"), "cpu")
    # and nothing else is from then on
    with pytest.raises(Exception, match="weights_only"):
        torch.load(checkpoint)


def test_bitsandbytes_does_without_triton_ops(pristine, patched):
    # once these fail, the patch has nothing to mend any more
    assert importlib.util.find_spec("triton.ops") is None
    name = "bitsandbytes.triton.triton_utils"
    assert pristine(name).is_triton_available() is True
    assert patched(name).is_triton_available() is False


def test_script_needs_no_xtuner_to_train_lora():
    code = """
import sys
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTuner
from transformers import MambaConfig, MambaForCausalLM
model = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1))
get_peft_model(model, LoraConfig(r=2, target_modules=["in_proj"]))
assert "bitsandbytes" in sys.modules and "xtuner" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_peft_refuses_out_proj_but_in_a_merge(pristine, patched, monkeypatch):
    name, lora = "peft.tuners.tuners_utils", LoraConfig()
    # once this passes, the patch has nothing to mend any more
    with pytest.raises(ValueError, match=r"'out_proj' is incompatible .* issues.$"):
        pristine(name)._check_lora_target_modules_mamba(lora, make_mamba(), "out_proj")
    check = patched(name)._check_lora_target_modules_mamba
    with pytest.raises(ValueError, match=r"incompatible .* Or keep it, and call .*dispatch_packed"):
        check(lora, make_mamba(), "out_proj")
    with pytest.raises(ValueError, match=r"'conv1d' is incompatible .* issues.$"):
        check(lora, make_mamba(), "conv1d")
    monkeypatch.setattr(sys, "argv", ["/xtuner/tools/model_converters/merge.py", "model"])
    check(lora, make_mamba(), "out_proj")


def test_peft_adds_an_adapter_of_mambas_embeddings_to_the_head(pristine, monkeypatch):
    unload = pristine("peft.tuners.tuners_utils").BaseTuner._unload_and_optionally_merge
    monkeypatch.setattr(BaseTuner, "_unload_and_optionally_merge", unload)
    model = get_peft_model(make_mamba(), LoraConfig(target_modules=["embeddings"]))
    merged = model.merge_and_unload()
    # once this fails, the patch has nothing to mend any more
    assert merged.lm_head.weight is merged.get_input_embeddings().weight
