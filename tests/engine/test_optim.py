"""Which parameters decay."""

import re

import pytest
import torch
from mixer_families import FAMILIES
from mmengine.optim import OptimWrapper, build_optim_wrapper
from torch import nn
from torch.optim import AdamW
from transformers import MambaConfig, MambaForCausalLM

from xtuner_mamba.engine import MambaOptimWrapperConstructor
from xtuner_mamba.engine.optim import decay_groups


def make_llm():
    config = MambaConfig(vocab_size=20, hidden_size=8, state_size=4, num_hidden_layers=2)
    return MambaForCausalLM(config)


def build(model, **kwargs):
    cfg = dict(
        type=OptimWrapper,
        optimizer=dict(type=AdamW, lr=1e-3, weight_decay=0.1),
        constructor=dict(type=MambaOptimWrapperConstructor)["type"],
        **kwargs,
    )
    return build_optim_wrapper(model, cfg)


def decays(wrapper, model):
    of = {id(p): g["weight_decay"] for g in wrapper.optimizer.param_groups for p in g["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters()}


def test_dynamics_norms_and_biases_do_not_decay():
    model = make_llm()
    decay = decays(build(model), model)

    def last_two(value):
        names = (name.split(".")[-2:] for name, decayed in decay.items() if decayed == value)
        return {".".join(name) for name in names}

    assert last_two(0.0) == {
        "mixer.A_log",
        "mixer.D",
        "conv1d.bias",
        "dt_proj.bias",
        "norm.weight",
        "norm_f.weight",
    }
    projections = {f"{name}_proj.weight" for name in ("in", "x", "dt", "out")}
    assert last_two(0.1) == projections | {"embeddings.weight", "conv1d.weight"}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bias_decays_in_any_family(family):
    model = FAMILIES[family]()
    decay = decays(build(model), model)
    spared = {name for name in decay if re.search(r"(A_log|\.D|bias|norm[^.]*\.weight)$", name)}
    assert {decay[name] for name in spared} == {0.0}
    assert {decay[name] for name in decay.keys() - spared} == {0.1}


def test_a_decaying_step_leaves_the_dynamics_alone():
    model = make_llm()
    wrapper = build(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wrapper.optimizer.step()
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, before[name])
        assert moved == (decays(wrapper, model)[name] > 0 and bool(before[name].any())), name


def test_two_groups_so_that_zero_flattens_two_buffers():
    assert len(build(make_llm()).optimizer.param_groups) == 2


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = nn.Linear(2, 2, bias=False)
    assert len(decay_groups(model, 0.1)) == 1
    model.weight.requires_grad_(False)
    assert decay_groups(model, 0.1) == []


def test_zero3_shapes_are_read_from_deepspeed():
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    decay, no_decay = decay_groups(model, 0.1)
    assert decay["params"] == [model.weight] or decay["params"][0] is model.weight
    assert no_decay["params"][0] is model.bias


def test_paramwise_cfg_beside_it_is_refused():
    with pytest.raises(ValueError, match=r"paramwise_cfg must be empty .* \{'norm_decay_mult': 0"):
        build(make_llm(), paramwise_cfg=dict(norm_decay_mult=0.0))
