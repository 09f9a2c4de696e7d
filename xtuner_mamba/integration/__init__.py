"""How the plugin joins XTuner: the only place that touches what others keep to themselves.

``_xtuner_mamba_startup`` hands every module of XTuner, PEFT and bitsandbytes to :func:`patch` when
Python has executed it. One entry of :data:`PATCHES` is one thing that the plugin changes;
``docs/xtuner.md`` tells why. Imports nothing heavy, since it runs at the first of those imports.
"""

import warnings
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from types import ModuleType


@dataclass(frozen=True)
class Patch:
    """One change to a module that is not ours."""

    after: str
    """The module whose execution sets it off."""
    function: str
    """``module:function`` of this package; it gets the module to change."""
    needs: tuple[str, ...]
    """What the module must have, or it is not what the function was written for."""
    target: str | None = None
    """The module to change, if it is another one."""
    checked_on: str = "xtuner 0.2.0"


PATCHES = (
    Patch(
        after="xtuner.entry_point",
        function="commands:fail_like_the_child",
        needs=("cli", "print_log", "subprocess"),
    ),
    Patch(
        after="xtuner.configs",
        function="templates:add_templates",
        needs=("cfgs_name_path",),
    ),
    Patch(
        after="xtuner.model.modules.dispatch",
        function="dispatch:dispatch_per_class",
        needs=("VARLEN_ATTN_DISPATCH_MAPPING", "SUPPORT_FLASH2", "dispatch_varlen_attn_forward"),
    ),
    Patch(
        after="xtuner.tools.utils",
        function="train:check_before_building",
        needs=("set_model_resource",),
    ),
    Patch(
        after="xtuner.tools.utils",
        function="deepspeed:keep_engine_in_float32",
        needs=("auto_dtype_of_deepspeed_config",),
    ),
    Patch(
        after="xtuner.engine._strategy.deepspeed",
        function="deepspeed:keep_optimizer_groups",
        needs=("DeepSpeedStrategy.build_optim_wrapper",),
        checked_on="xtuner 0.2.0, mmengine 0.10.6",
    ),
    Patch(
        after="xtuner.engine._strategy.deepspeed",
        function="deepspeed:gather_whole_mixers",
        needs=("DeepSpeedStrategy._wrap_model",),
        checked_on="xtuner 0.2.0, mmengine 0.10.6, deepspeed 0.16.2",
    ),
    Patch(
        after="xtuner.engine._strategy.deepspeed",
        function="deepspeed:start_single_process",
        needs=("DeepSpeedStrategy.build_model",),
        checked_on="xtuner 0.2.0, mmengine 0.10.6, deepspeed 0.16.2",
    ),
    Patch(
        after="xtuner.engine._strategy.deepspeed",
        function="deepspeed:wait_for_every_gather",
        needs=("DeepSpeedStrategy",),
        checked_on="xtuner 0.2.0, deepspeed 0.16.2",
    ),
    Patch(
        after="xtuner.engine._strategy.deepspeed",
        function="devices:spare_compiler",
        needs=("DeepSpeedStrategy",),
        checked_on="xtuner 0.2.0, deepspeed 0.16.2",
    ),
    Patch(
        after="xtuner.tools.utils",
        function="checkpoints:load_seed_of_own_checkpoint",
        needs=("get_seed_from_checkpoint",),
    ),
    Patch(
        after="xtuner.registry",
        function="checkpoints:load_own_checkpoints",
        needs=("CheckpointLoader.register_scheme", "load_from_local"),
        target="mmengine.runner.checkpoint",
        checked_on="mmengine 0.10.6, torch 2.14",
    ),
    Patch(
        after="xtuner.utils.zero_to_any_dtype",
        function="checkpoints:load_zero_checkpoints_unrounded",
        needs=("get_state_dict_from_zero_checkpoint",),
    ),
    Patch(
        after="xtuner.registry",
        function="convert:build_what_was_trained",
        needs=("BUILDER.build",),
    ),
    Patch(
        after="xtuner.registry",
        function="devices:init_dist_without_gpu",
        needs=("_init_dist_pytorch", "_init_dist_slurm", "_init_dist_mpi"),
        target="mmengine.dist.utils",
        checked_on="mmengine 0.10.6",
    ),
    Patch(
        after="bitsandbytes.triton.triton_utils",
        function="adapters:spare_bitsandbytes_triton",
        needs=("is_triton_available",),
        checked_on="bitsandbytes 0.45.0, triton 3.8",
    ),
    Patch(
        after="peft.tuners.tuners_utils",
        function="adapters:adapt_out_proj",
        needs=("_check_lora_target_modules_mamba",),
        checked_on="peft 0.21.2",
    ),
    Patch(
        after="peft.tuners.tuners_utils",
        function="adapters:untie_adapted_embeddings",
        needs=("BaseTuner._unload_and_optionally_merge",),
        checked_on="peft 0.21.2",
    ),
    Patch(
        after="xtuner.utils.device",
        function="devices:tell_cpu_has_bfloat16",
        needs=("torch", "get_torch_device"),
        checked_on="xtuner 0.2.0, torch 2.14",
    ),
)


def patch(module: ModuleType) -> None:
    """Apply what waits for ``module``; what does not fit any more is left out with a warning."""
    for entry in PATCHES:
        if entry.after == module.__name__:
            target = module if entry.target is None else import_module(entry.target)
            try:
                apply(entry, target)
            except Exception as error:
                warnings.warn(
                    f"xtuner_mamba leaves {entry.function} out: {error}; install what it was "
                    f"checked on ({entry.checked_on}), or set XTUNER_MAMBA_DISABLE=1 to use "
                    "XTuner without the plugin",
                    RuntimeWarning,
                    stacklevel=2,
                )


def apply(entry: Patch, target: ModuleType) -> None:
    """Apply one patch.

    Raises:
        AttributeError: The target is not what the patch was written for.
    """
    for name in entry.needs:
        try:
            attrgetter(name)(target)
        except AttributeError:
            raise AttributeError(
                f"{target.__name__} must have {', '.join(entry.needs)}, got no {name}"
            ) from None
    module_name, function_name = entry.function.split(":")
    function = getattr(import_module(f"{__name__}.{module_name}"), function_name)
    function(target)
