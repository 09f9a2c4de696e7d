"""Log how many tokens a second are trained on, and what of the places and of the FLOPs they use."""

from collections import deque
from dataclasses import dataclass

from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn

from xtuner_mamba.dataset.arguments import check_integer
from xtuner_mamba.engine.flops import training_flops_per_token

# iterations that the logged means are of
_LOGGED_ITERS = 50


@dataclass
class _Counts:
    """What an iteration ran."""

    batches: int = 0
    places: int = 0
    tokens: int = 0
    seconds: float = 0.0


@HOOKS.register_module()
class ThroughputHook(Hook):
    """Log the throughput of this rank, in place of XTuner's hook of that name.

    Means over the last iterations:

    - ``tokens_per_sec``: tokens that are no padding, by the time of the iteration with its data;
    - ``tflops``: model FLOPs of these tokens, 1e12 a second (see
      :func:`~xtuner_mamba.engine.flops.training_flops_per_token`); left out for a model whose
      layers are counted nowhere;
    - ``padding_percent``: share of the executed places that hold padding;
    - ``packing_percent``: share of ``tokens_per_batch`` that holds a token, if that is given.

    Args:
        tokens_per_batch: What a micro-batch has room for: ``max_length`` of packs,
            ``tokens_per_batch`` of a batch sampler.
    """

    # after IterTimerHook, before LoggerHook, as XTuner's
    priority = 55

    def __init__(self, tokens_per_batch: int | None = None) -> None:
        if tokens_per_batch is not None:
            check_integer("tokens_per_batch", tokens_per_batch, 1)
        self._tokens_per_batch = tokens_per_batch
        self._counts, self._logged = _Counts(), deque(maxlen=_LOGGED_ITERS)

    def before_train(self, runner: Runner) -> None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        self._flops = training_flops_per_token(model.llm)
        if self._flops is None:
            print_log(
                "train/tflops is left out: the FLOPs of this model's layers are counted nowhere",
                logger="current",
            )
        self._handle = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch=None, outputs=None
    ) -> None:
        self._counts.seconds = runner.message_hub.get_scalar("train/time").current()
        self._logged.append(self._counts)
        self._counts = _Counts()
        for name, value in self._means().items():
            runner.message_hub.update_scalar(f"train/{name}", value)

    def after_train(self, runner: Runner) -> None:
        self._handle.remove()

    def _count(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if not model.training or kwargs.get("mode") != "loss":
            return
        data = kwargs["data"]
        places, mask = data["input_ids"].numel(), data.get("attention_mask")
        self._counts.batches += 1
        self._counts.places += places
        # rows that are laid end to end have no mask
        self._counts.tokens += places if mask is None else int(mask.sum())

    def _means(self) -> dict[str, float]:
        batches, places, tokens, seconds = (
            sum(getattr(counts, name) for counts in self._logged)
            for name in ("batches", "places", "tokens", "seconds")
        )
        means = {
            "tokens_per_sec": tokens / seconds,
            "padding_percent": 100 * (1 - tokens / places),
        }
        if self._flops is not None:
            means["tflops"] = self._flops * tokens / seconds / 1e12
        if self._tokens_per_batch is not None:
            means["packing_percent"] = 100 * tokens / (batches * self._tokens_per_batch)
        return means
