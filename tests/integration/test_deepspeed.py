"""DeepSpeed's dtypes and optimizer groups, without an engine (see test_training for one)."""

import inspect
import json
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from mmengine.config import Config
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from transformers import MambaConfig, MambaForCausalLM
from xtuner.configs import cfgs_name_path

from xtuner_mamba.engine import MambaOptimWrapperConstructor
from xtuner_mamba.integration import deepspeed
from xtuner_mamba.model import PackedSupervisedFinetune


@pytest.fixture
def cfg():
    return Config(
        dict(
            model=dict(type=PackedSupervisedFinetune),
            optim_wrapper=dict(
                type=AmpOptimWrapper,
                dtype="bfloat16",
                constructor=MambaOptimWrapperConstructor,
                optimizer=dict(type=torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
            ),
        )
    )


@pytest.fixture
def logged(monkeypatch):
    lines = []
    monkeypatch.setattr(deepspeed, "print_log", lambda message, **kwargs: lines.append(message))
    return lines


@pytest.fixture
def auto_dtype(pristine, monkeypatch):
    """XTuner's function after the patch; what it remembers is forgotten afterwards."""
    monkeypatch.setattr(deepspeed, "_run", {})
    monkeypatch.setattr(torch.cpu, "is_bf16_supported", lambda: True, raising=False)
    utils = pristine("xtuner.tools.utils")
    deepspeed.keep_engine_in_float32(utils)
    return utils.auto_dtype_of_deepspeed_config


def read_config(name):
    with open(cfgs_name_path[name]) as file:
        return json.load(file)


@pytest.mark.parametrize("name", ["deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3_offload"])
def test_engine_stays_in_float32_and_the_forward_is_under_autocast(cfg, auto_dtype, logged, name):
    deepspeed.remember(cfg, covered=True)
    config = auto_dtype(read_config(name))
    assert config["bf16"]["enabled"] is config["fp16"]["enabled"] is False
    assert cfg.model.autocast_dtype == "bfloat16"
    assert "float32" in logged[0]


def test_other_trainings_are_left_to_xtuner(cfg, auto_dtype, logged):
    deepspeed.remember(cfg, covered=False)
    assert auto_dtype(read_config("deepspeed_zero2"))["bf16"]["enabled"] is True
    assert "autocast_dtype" not in cfg.model
    assert logged == []


def test_explicit_dtype_is_respected_with_a_warning(cfg, auto_dtype, logged):
    deepspeed.remember(cfg, covered=True)
    config = read_config("deepspeed_zero2")
    config["bf16"]["enabled"] = True
    assert auto_dtype(config)["bf16"]["enabled"] is True
    assert "autocast_dtype" not in cfg.model
    assert "bf16.enabled: A_log and D are then rounded" in logged[0]


@pytest.mark.parametrize(
    ("wrapper", "has_bfloat16", "dtype"),
    [
        (dict(type=AmpOptimWrapper, dtype="bfloat16"), False, "bfloat16"),
        (dict(type=AmpOptimWrapper, dtype="float16"), True, "bfloat16"),
        (dict(type=AmpOptimWrapper, dtype=torch.float16), False, "float16"),
        (dict(type=AmpOptimWrapper), True, "bfloat16"),
        (dict(type=AmpOptimWrapper, dtype="float32"), True, None),
        (dict(type=OptimWrapper), True, None),
    ],
    ids=str,
)
def test_autocast_follows_the_optim_wrapper(monkeypatch, wrapper, has_bfloat16, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bfloat16)
    assert deepspeed.autocast_dtype(wrapper) == dtype


def weight_decays(pristine, model, patched: bool) -> dict[str, float]:
    """Build the optimizer as XTuner has DeepSpeed's strategy do; the decay of each parameter."""
    module = pristine("xtuner.engine._strategy.deepspeed")
    if patched:
        deepspeed.keep_optimizer_groups(module)
    strategy = object.__new__(module.DeepSpeedStrategy)
    optimizer = dict(type=torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
    wrapper = strategy.build_optim_wrapper(
        dict(type="DeepSpeedOptimWrapper", optimizer=optimizer), model
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: group["weight_decay"]
        for group in wrapper.optimizer.param_groups
        for parameter in group["params"]
    }


def test_optimizer_groups_survive_deepspeed(cfg, auto_dtype, pristine):
    config = MambaConfig(vocab_size=8, hidden_size=8, state_size=4, num_hidden_layers=1)
    model = MambaForCausalLM(config)
    name = "backbone.layers.0.mixer."
    deepspeed.remember(cfg, covered=True)
    auto_dtype({})
    decays = weight_decays(pristine, model, patched=True)
    assert decays[name + "in_proj.weight"] == 0.1
    assert decays[name + "A_log"] == decays[name + "D"] == decays[name + "dt_proj.bias"] == 0.0
    assert len(decays) == len(list(model.parameters()))
    # XTuner alone lets all of them decay: once this fails, the patch is not needed any more
    assert set(weight_decays(pristine, model, patched=False).values()) == {0.1}


class LateGather:
    """An all-gather of one rank that is done when it is waited for, as gloo may do it."""

    def __init__(self, output, partition, group, async_op):
        self.wait = lambda: output.copy_(partition)


@pytest.fixture
def gathered(monkeypatch):
    """Gather two parameters with a function of DeepSpeed's ``zero.Init``; what they hold then."""
    monkeypatch.setattr(partition_parameters.dist, "all_gather_into_tensor", LateGather)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    init = SimpleNamespace(
        num_partitions=2,
        local_device="cpu",
        use_all_gather_into_tensor=True,
        get_partition_dp_group=lambda parameter: None,
    )

    def run(gather) -> list[list[float]]:
        parameters = []
        for value in (1.0, 2.0):
            parameters.append(torch.nn.Parameter(torch.zeros(0)))
            partition = torch.full((4,), value)
            partition.ds_numel = 2
            parameters[-1].__dict__.update(ds_tensor=partition, ds_numel=4, ds_shape=(4,))
        gather(init, parameters)
        return [parameter.tolist() for parameter in parameters]

    return run


@pytest.mark.parametrize("synchronized", [True, False], ids=["cpu", "gpu"])
def test_all_parameters_gathered_at_once_are_waited_for(
    pristine, gathered, monkeypatch, synchronized
):
    accelerator = type(partition_parameters.get_accelerator())
    monkeypatch.setattr(accelerator, "is_synchronized_device", lambda self: synchronized)
    init = partition_parameters.Init
    alone = inspect.unwrap(init._allgather_params_coalesced)
    monkeypatch.setattr(init, "_allgather_params_coalesced", alone)
    # DeepSpeed waits for the last: once this fails, the patch is not needed any more
    assert gathered(alone) == [[0.0] * 4, [2.0] * 4]
    deepspeed.wait_for_every_gather(pristine("xtuner.engine._strategy.deepspeed"))
    first = [1.0] * 4 if synchronized else [0.0] * 4
    assert gathered(init._allgather_params_coalesced) == [first, [2.0] * 4]
