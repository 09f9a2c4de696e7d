"""``xtuner train --deepspeed`` for Mamba: float32 parameters, and the optimizer's groups.

DeepSpeed's bf16 and fp16 engines cast the whole module, ``A_log`` and ``D`` included, and ZeRO's
buckets cannot hold two dtypes. So the engine keeps float32 and the model runs its forward under
autocast. XTuner 0.2.0 also drops ``constructor`` and ``paramwise_cfg`` when it rewrites
``optim_wrapper`` for DeepSpeed.
"""

import functools
import importlib.util
import logging
import os
import socket
from types import ModuleType

import torch
from mmengine.config import Config
from mmengine.dist import is_distributed
from mmengine.logging import print_log
from torch import nn

from xtuner_mamba.integration.config_parts import type_name
from xtuner_mamba.integration.config_rewrites import PACKED_MODELS
from xtuner_mamba.model.dispatch import DISPATCH_TABLE, token_mixers

# what the steps below must know of the config in training; one training a process
_run: dict = {}


def remember(cfg: Config, covered: bool) -> None:
    """Keep a config that ``xtuner train`` is about to use.

    Args:
        cfg: The config.
        covered: Whether it trains on packed documents with forwards of ours.
    """
    _run.clear()
    _run.update(cfg=cfg, covered=covered)


def keep_engine_in_float32(utils: ModuleType) -> None:
    """Switch a DeepSpeed config's automatic bf16 and fp16 off, and autocast on."""
    auto_dtype = utils.auto_dtype_of_deepspeed_config

    @functools.wraps(auto_dtype)
    def wrapper(ds_config: dict) -> dict:
        if "cfg" in _run:
            cfg = _run["cfg"]
            # the last moment before XTuner replaces optim_wrapper
            _run["groups"] = {
                key: cfg.optim_wrapper[key]
                for key in ("constructor", "paramwise_cfg")
                if key in cfg.optim_wrapper
            }
            if _run["covered"]:
                choose_dtypes(cfg, ds_config)
        return auto_dtype(ds_config)

    utils.auto_dtype_of_deepspeed_config = wrapper


def choose_dtypes(cfg: Config, ds_config: dict) -> None:
    """Resolve ``"auto"`` in ``ds_config`` to float32, and set the model's autocast instead."""
    for name in ("bf16", "fp16"):
        section = ds_config.get(name) or {}
        if section.get("enabled") is True:
            print_log(
                f"the DeepSpeed config sets {name}.enabled: A_log and D are then rounded in every "
                'forward; set it to "auto" to keep them in float32',
                logger="current",
                level=logging.WARNING,
            )
            return
        if section.get("enabled") == "auto":
            section["enabled"] = False
    dtype = autocast_dtype(cfg.optim_wrapper)
    if type_name(cfg.model) in PACKED_MODELS:
        cfg.model.autocast_dtype = dtype
    print_log(
        f"xtuner_mamba keeps DeepSpeed's parameters in float32, forward under autocast: {dtype}",
        logger="current",
    )


def autocast_dtype(optim_wrapper: dict) -> str | None:
    """Return the dtype in which an ``AmpOptimWrapper`` would run the forward.

    bfloat16 stands in for float16 where the GPU has it, since a float32 engine does not scale
    the loss.
    """
    if type_name(optim_wrapper) != "AmpOptimWrapper":
        return None
    dtype = str(optim_wrapper.get("dtype") or torch.float16).removeprefix("torch.")
    if dtype == "float16" and torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        return "bfloat16"
    return dtype if dtype in ("float16", "bfloat16") else None


def keep_optimizer_groups(strategy: ModuleType) -> None:
    """Give DeepSpeed's strategy the constructor back that XTuner dropped."""
    build = strategy.DeepSpeedStrategy.build_optim_wrapper

    @functools.wraps(build)
    def build_optim_wrapper(self, optim_wrapper, *args, **kwargs):
        if isinstance(optim_wrapper, dict):
            optim_wrapper = {**_run.get("groups", {}), **optim_wrapper}
        return build(self, optim_wrapper, *args, **kwargs)

    strategy.DeepSpeedStrategy.build_optim_wrapper = build_optim_wrapper


def gather_whole_mixers(strategy: ModuleType) -> None:
    """Let ZeRO-3 gather all of a dispatched mixer's parameters for its forward.

    It gathers those of each module for that module's own forward; a dispatched mixer reads
    some weights (of the conv, of dt) without calling the module that they belong to.
    """
    wrap = strategy.DeepSpeedStrategy._wrap_model

    @functools.wraps(wrap)
    def wrap_model(self, model: nn.Module) -> nn.Module:
        from deepspeed.runtime.zero import register_external_parameter

        for name, mixers in token_mixers(model).items():
            for mixer in mixers if name in DISPATCH_TABLE else ():
                own = set(mixer.parameters(recurse=False))
                for parameter in mixer.parameters():
                    if parameter not in own:
                        register_external_parameter(mixer, parameter)
        return wrap(self, model)

    strategy.DeepSpeedStrategy._wrap_model = wrap_model


def start_single_process(strategy: ModuleType) -> None:
    """Let DeepSpeed run in the only process of a training, as in ``xtuner train FILE``.

    Without a launcher's variables it asks MPI for them, and stops where mpi4py is missing: ZeRO-3
    already while the model is built.
    """
    build = strategy.DeepSpeedStrategy.build_model

    @functools.wraps(build)
    def build_model(self, model: nn.Module | dict) -> nn.Module:
        if not is_distributed():
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            os.environ.update(
                RANK="0",
                LOCAL_RANK="0",
                WORLD_SIZE="1",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        return build(self, model)

    strategy.DeepSpeedStrategy.build_model = build_model


def wait_for_every_gather(strategy: ModuleType) -> None:
    """Let ZeRO-3 on the CPU wait for all parameters that it gathers at once.

    DeepSpeed waits for the last of them alone: NCCL completes them in order. gloo has threads and
    does not, so a forward could read memory into which nothing had been written yet, and what a
    weight had been before could be written over the one just loaded.
    """
    if not importlib.util.find_spec("deepspeed"):
        return
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import Init

    gather = Init._allgather_params_coalesced

    @functools.wraps(gather)
    def gather_in_order(self, param_list, *args, **kwargs):
        if not get_accelerator().is_synchronized_device():
            return gather(self, param_list, *args, **kwargs)
        # the last of one is all of them
        for parameter in param_list:
            gather(self, [parameter], *args, **kwargs)

    Init._allgather_params_coalesced = gather_in_order
