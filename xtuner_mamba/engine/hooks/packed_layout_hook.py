"""Hand each batch's boundaries, and its optimizer step's target count, to the model."""

import logging
from dataclasses import replace

from mmengine.hooks import CheckpointHook, Hook
from mmengine.logging import print_log
from mmengine.optim import LinearParamScheduler
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from xtuner.utils.device import get_device

from xtuner_mamba.engine.hooks.carried_state_hook import carried_states
from xtuner_mamba.engine.step_windows import (
    StepWindows,
    TokenWindows,
    data_of_batch,
    layout_of_batch,
)
from xtuner_mamba.layout import publish_layout, withdraw_layout


@HOOKS.register_module()
class PackedLayoutHook(Hook):
    """Publish the boundaries of ``data_batch["data"]`` for the length of one iteration.

    They are taken out of the batch, so that the model sees transformers' arguments only, and
    withdrawn afterwards, so that a missing layout fails instead of reusing old boundaries. In
    training the batches of a whole optimizer step are fetched ahead, to know how many target
    tokens its loss is the mean of.
    """

    priority = "VERY_HIGH"

    def before_run(self, runner: Runner) -> None:
        count = sum(isinstance(hook, PackedLayoutHook) for hook in runner.hooks)
        if count > 1:
            raise RuntimeError(
                f"custom_hooks must hold PackedLayoutHook once, got it {count} times; leave the "
                "others out, for which the first one leaves no boundaries in the batch"
            )

    def before_train(self, runner: Runner) -> None:
        loop = runner.train_loop
        micro_steps = _micro_steps(runner)
        if not hasattr(loop, "dataloader_iterator"):
            raise RuntimeError(
                "train_cfg must use an iteration-based loop with PackedLayoutHook, got "
                f"{type(loop).__name__}; use dict(type=xtuner.engine.runner.TrainLoop)"
            )
        _warn_of_lost_warm_ups(runner)
        # TokenStepLoop has seen to it
        if isinstance(loop.dataloader_iterator, TokenWindows):
            return
        _warn_of_broken_steps(runner, micro_steps)
        loop.dataloader_iterator = StepWindows(
            loop.dataloader_iterator, micro_steps, max_iters=loop.max_iters
        )

    # before_{train,val,test}_iter all end here, and after_..._iter in the next
    def _before_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict, mode: str = "train"
    ) -> None:
        publish_batch(data_batch)

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict, outputs=None, mode: str = "train"
    ) -> None:
        withdraw_layout()


def publish_batch(batch: dict) -> None:
    """Take the boundaries out of a batch and put them where the mixers look for them."""
    data = data_of_batch(batch)
    layout = layout_of_batch(data)
    del data["cumulative_len"]
    for name in ("max_seqlen", "num_pairs"):
        data.pop(name, None)
    carried = data.pop("carried", None)
    if carried is not None:
        states = carried_states()
        states.begin(carried)
        layout = replace(layout, carried=replace(layout.carried, states=states))
    publish_layout(layout.to(get_device()), data.pop("mean_targets", None))


def _warn_of_broken_steps(runner: Runner, micro_steps: int) -> None:
    """Tell of checkpoints within an optimizer step, which have none of its gradients."""
    for hook in runner.hooks:
        if not isinstance(hook, CheckpointHook) or hook.interval < 1:
            continue
        interval = hook.interval * (len(runner.train_dataloader) if hook.by_epoch else 1)
        if interval % micro_steps:
            print_log(
                f"checkpoints of every {interval:,} iterations lie within optimizer steps of "
                f"accumulative_counts={micro_steps}: --resume would lose the gradients that "
                "their step has so far; set by_epoch=False and interval to a multiple of "
                f"{micro_steps}",
                logger="current",
                level=logging.WARNING,
            )


def _warn_of_lost_warm_ups(runner: Runner) -> None:
    """Tell of a warm-up too short to end, which few packs make of one that many rows had."""
    schedulers = runner.param_schedulers or []
    if isinstance(schedulers, dict):
        schedulers = [scheduler for group in schedulers.values() for scheduler in group]
    for scheduler in schedulers:
        if not isinstance(scheduler, LinearParamScheduler) or scheduler.total_iters > 0:
            continue
        print_log(
            f"{scheduler.param_name} must warm up for two "
            f"{'epochs' if scheduler.by_epoch else 'iterations'} or more, got one: MMEngine leaves "
            f"it at {scheduler.start_factor} of its value for good; raise warmup_ratio, or set "
            "param_scheduler = None",
            logger="current",
            level=logging.WARNING,
        )


def _micro_steps(runner: Runner) -> int:
    """Micro-batches of an optimizer step, under MMEngine's wrappers and under DeepSpeed."""
    config = getattr(getattr(runner, "strategy", None), "config", None)
    if config is not None and "gradient_accumulation_steps" in config:
        return int(config["gradient_accumulation_steps"])
    return getattr(runner.optim_wrapper, "_accumulative_counts", 1)
