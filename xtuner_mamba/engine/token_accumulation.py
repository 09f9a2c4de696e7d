"""Optimizer steps of a constant number of target tokens, however long the documents are."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean, pstdev
from typing import Any

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import LOOPS, OPTIM_WRAPPERS
from mmengine.runner import IterBasedTrainLoop, Runner
from torch import nn
from torch.optim import Optimizer
from xtuner.utils.device import get_device

from xtuner_mamba.dataset.arguments import bind_arguments, check_integer
from xtuner_mamba.engine.hooks.packed_layout_hook import publish_batch
from xtuner_mamba.engine.step_windows import TokenWindows

# optimizer steps that the logged mean and spread are of
_LOGGED_STEPS = 50


def check_accumulation_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of :class:`TokenAccumulationOptimWrapper`, before anything is built.

    Args:
        arguments: By name, as a config has them.

    Raises:
        ValueError: One is unknown, missing, or cannot be met.
    """
    if "accumulative_counts" in arguments:
        raise ValueError(
            "accumulative_counts must be left out of TokenAccumulationOptimWrapper, got "
            f"{arguments['accumulative_counts']}; tokens_per_step alone says when it steps"
        )
    values = bind_arguments(TokenAccumulationOptimWrapper, arguments)
    check_integer("tokens_per_step", values.get("tokens_per_step"), 1)
    if values["dtype"] not in (None, "bfloat16"):
        raise ValueError(
            f"dtype must be None or 'bfloat16', got {values['dtype']!r}; float16 needs the loss "
            "scaling of AmpOptimWrapper, which steps after a count of micro-batches"
        )


@OPTIM_WRAPPERS.register_module()
class TokenAccumulationOptimWrapper(OptimWrapper):
    """Step after so many target tokens, in place of ``accumulative_counts`` micro-batches.

    :class:`TokenStepLoop` tells how many micro-batches a step has. It is the same on all ranks.

    Args:
        optimizer: As in MMEngine's ``OptimWrapper``.
        tokens_per_step: Target tokens, over all ranks, that a step has at least. It ends with the
            micro-batch that reaches them.
        dtype: Of autocast in the forward; ``None`` for none. There is no loss scaling, so
            ``"float16"`` is refused.
        clip_grad: As there.

    Raises:
        ValueError: An argument cannot be met.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        tokens_per_step: int,
        dtype: str | None = None,
        clip_grad: dict | None = None,
    ) -> None:
        check_accumulation_arguments(dict(tokens_per_step=tokens_per_step, dtype=dtype))
        super().__init__(optimizer, clip_grad=clip_grad)
        self.tokens_per_step, self._dtype = tokens_per_step, dtype
        self._is_begun = False

    def begin_step(self, micro_steps: int) -> None:
        """Tell how many micro-batches the next step has."""
        self._accumulative_counts, self._inner_count = micro_steps, 0
        self._is_begun = True

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Leave the counts to :meth:`begin_step`: these are of iterations."""

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Let DDP reduce gradients in the last micro-batch only, and run the forward in autocast.

        Raises:
            RuntimeError: Nobody told how many micro-batches the step has.
        """
        if not self._is_begun:
            raise RuntimeError(
                f"begin_step must be called before the first micro-batch of tokens_per_step="
                f"{self.tokens_per_step}, got none; set train_cfg=dict(type=TokenStepLoop, "
                "max_iters=...)"
            )
        dtype = None if self._dtype is None else getattr(torch, self._dtype)
        device = torch.device(get_device()).type
        autocast = torch.autocast(device, dtype=dtype, enabled=dtype is not None)
        with super().optim_context(model), autocast:
            yield


def check_step_loop_arguments(arguments: Mapping[str, Any], param_schedulers: Any) -> None:
    """Check the arguments of :class:`TokenStepLoop`, before anything is built.

    Args:
        arguments: By name, as a config has them.
        param_schedulers: A config's, or several.

    Raises:
        ValueError: Something is counted in epochs, or there is no count.
    """
    if arguments.get("max_iters") is None:
        others = {name: value for name, value in arguments.items() if name != "max_iters"}
        raise ValueError(
            f"max_iters must be the optimizer steps of TokenStepLoop, got None and {others}; an "
            "epoch has about its target tokens / tokens_per_step of them"
        )
    check_integer("max_iters", arguments["max_iters"], 1)
    schedulers = param_schedulers if isinstance(param_schedulers, list) else [param_schedulers]
    for scheduler in schedulers:
        if isinstance(scheduler, dict) and scheduler.get("by_epoch", True):
            raise ValueError(
                f"param_scheduler must count the optimizer steps of TokenStepLoop, got epochs in "
                f"{scheduler}; set by_epoch=False, and begin and end in optimizer steps"
            )


@LOOPS.register_module()
class TokenStepLoop(IterBasedTrainLoop):
    """Train by optimizer steps: an iteration is all micro-batches of one.

    So learning rates, checkpoints, validation and ``max_iters`` count optimizer steps. What an
    epoch leaves of a step is trained on together with the beginning of the next epoch. The log has
    ``tokens_per_step``, the mean over the last steps, and ``tokens_per_step_std``.

    Args:
        runner: MMEngine's.
        dataloader: The same.
        max_iters: Optimizer steps to train for.
        **kwargs: ``IterBasedTrainLoop``'s other arguments.

    Raises:
        ValueError: Something is counted in epochs.
    """

    def __init__(
        self, runner: Runner, dataloader: Any, max_iters: int | None = None, **kwargs: Any
    ) -> None:
        check_step_loop_arguments(dict(max_iters=max_iters, **kwargs), runner.param_schedulers)
        super().__init__(runner, dataloader, max_iters, **kwargs)
        self._logged: deque[int] = deque(maxlen=_LOGGED_STEPS)

    def run(self) -> nn.Module:
        """Train.

        Raises:
            RuntimeError: The optimizer wrapper steps after something else.
        """
        wrapper = self.runner.optim_wrapper
        if not isinstance(wrapper, TokenAccumulationOptimWrapper):
            raise RuntimeError(
                "optim_wrapper must be a TokenAccumulationOptimWrapper with TokenStepLoop, got "
                f"{type(wrapper).__name__}; with DeepSpeed use xtuner.engine.runner.TrainLoop and "
                "accumulative_counts"
            )
        self.dataloader_iterator = TokenWindows(
            self.dataloader_iterator, wrapper.tokens_per_step, epoch_length=len(self.dataloader)
        )
        return super().run()

    def run_iter(self, data_batch: list[dict]) -> None:
        """Take one optimizer step.

        Args:
            data_batch: Its micro-batches. Hooks are shown the first and the last of them.
        """
        runner, first = self.runner, data_batch[0]
        self._logged.append(self.dataloader_iterator.tokens)
        runner.message_hub.update_scalar("train/tokens_per_step", fmean(self._logged))
        runner.message_hub.update_scalar("train/tokens_per_step_std", pstdev(self._logged))
        runner.optim_wrapper.begin_step(len(data_batch))
        runner.call_hook("before_train_iter", batch_idx=self._iter, data_batch=first)
        outputs = []
        for batch in data_batch:
            if batch is not first:
                publish_batch(batch)
            outputs.append(runner.model.train_step(batch, optim_wrapper=runner.optim_wrapper))
        runner.call_hook(
            "after_train_iter",
            batch_idx=self._iter,
            data_batch=data_batch[-1],
            # each is its share of the step's mean
            outputs={name: sum(o[name] for o in outputs) / len(outputs) for name in outputs[0]},
        )
        self._iter += 1
