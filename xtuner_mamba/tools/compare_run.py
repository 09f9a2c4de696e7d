"""Train one scheme of a comparison, and measure it."""

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import load_from_disk
from mmengine.config import Config
from mmengine.config.lazy import LazyObject
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn

from xtuner_mamba.dataset import packed_collate_fn, process_packed_dataset
from xtuner_mamba.engine.hooks.packed_layout_hook import publish_batch
from xtuner_mamba.engine.step_windows import count_targets
from xtuner_mamba.layout import withdraw_layout
from xtuner_mamba.tools.changed_training import (
    leave_result,
    peak_memory,
    strip_config,
    train_changed,
)

SCHEMES = ("packed", "bucket", "fixed chunk")
# of an optimizer wrapper, whatever it counts
_KEPT = ("constructor", "optimizer", "paramwise_cfg", "clip_grad", "dtype")


def train_scheme(config: str, scheme: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Train twice as many steps as asked for, and time the second half.

    Args:
        config: Path, or name of a template.
        scheme: One of :data:`SCHEMES`.
        plan: The ``steps``, the folders ``train`` and ``held_out`` of tokenized documents,
            ``tokens_per_step``, ``tokens_per_batch``, ``max_length``, ``chunk_length`` and
            ``boundaries``.

    Returns:
        ``tokens_per_second``, ``padding``, ``peak_bytes``, ``device``, ``losses`` and ``targets``
        of every step, and the ``held_out`` loss before and after.
    """
    hook = dict(
        type=LazyObject(__name__, "CompareHook"),
        steps=plan["steps"],
        held_out=plan["held_out"],
        max_length=plan["max_length"],
        row_length=plan["tokens_per_batch"] if scheme == "packed" else None,
    )

    def change(cfg: Config) -> None:
        strip_config(cfg, hook)
        set_up_scheme(cfg, scheme, plan)

    return train_changed(config, change)


def set_up_scheme(cfg: Config, scheme: str, plan: dict[str, Any]) -> None:
    """Give a config the batches of a scheme, and steps of as many target tokens in any.

    Args:
        cfg: Changed in place.
        scheme: One of :data:`SCHEMES`.
        plan: As in :func:`train_scheme`.
    """
    ours = partial(LazyObject, "xtuner_mamba.dataset")
    tokens_per_batch = plan["tokens_per_batch"]
    packs = dict(type=ours("process_packed_dataset"))
    padded = dict(type=ours("padded_collate_fn"))
    budget = dict(type=ours("TokenBudgetBatchSampler"), tokens_per_batch=tokens_per_batch)
    buckets = dict(
        type=ours("BucketBatchSampler"),
        tokens_per_batch=tokens_per_batch,
        boundaries=plan["boundaries"],
    )
    dataset, batches = {
        "packed": (
            dict(**packs, max_length=tokens_per_batch),
            dict(collate_fn=dict(type=ours("packed_collate_fn"))),
        ),
        "bucket": (
            dict(type=ours("process_document_dataset"), max_length=plan["max_length"]),
            dict(batch_sampler=buckets, collate_fn=padded),
        ),
        "fixed chunk": (
            dict(**packs, max_length=plan["chunk_length"], packing="wrap"),
            dict(batch_sampler=budget, collate_fn=padded),
        ),
    }[scheme]
    source = dict(type=LazyObject("datasets", "load_from_disk"), dataset_path=plan["train"])
    cfg.train_dataloader = dict(
        batch_size=1,
        num_workers=cfg.train_dataloader.get("num_workers", 0),
        dataset=dict(**dataset, dataset=source, do_dataset_tokenization=False),
        sampler=dict(type="DefaultSampler", shuffle=True),
        **batches,
    )
    optim_wrapper = cfg.optim_wrapper
    for name in set(optim_wrapper) - set(_KEPT):
        optim_wrapper.pop(name)
    optim_wrapper["type"] = LazyObject("xtuner_mamba.engine", "TokenAccumulationOptimWrapper")
    optim_wrapper["tokens_per_step"] = plan["tokens_per_step"]
    steps = plan["steps"]
    cfg.train_cfg = dict(
        type=LazyObject("xtuner_mamba.engine", "TokenStepLoop"), max_iters=2 * steps
    )
    # a model that is trained from random weights needs it
    cfg.param_scheduler = dict(
        type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=steps
    )
    cfg.randomness = dict(seed=0)


class CompareHook(Hook):
    """Measure a training, and the loss of held-out documents before and after it.

    Args:
        steps: To train before the clock starts, and as many with it.
        held_out: Folder of tokenized documents.
        max_length: Of a row of them, which the longest may exceed.
        row_length: Places of a row; ``None`` for as many as the longest in its batch has.
    """

    def __init__(self, steps: int, held_out: str, max_length: int, row_length: int | None) -> None:
        self._steps, self._row_length = steps, row_length
        documents = load_from_disk(held_out)
        self._held_out = process_packed_dataset(
            documents,
            do_dataset_tokenization=False,
            max_length=max(max_length, *map(len, documents["input_ids"])),
        )
        self._losses: list[float] = []
        self._targets: list[int] = []
        self._num_tokens, self._seconds = 0, 0.0

    def before_train(self, runner: Runner) -> None:
        self._before = mean_loss(runner.model, self._held_out)
        self._padding = padding_of(runner.train_dataloader, self._row_length)
        embeddings = runner.model.llm.get_input_embeddings()
        embeddings.register_forward_hook(self._count)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self._steps:
            self._num_tokens, self._seconds = 0, 0.0
        self._start = _now()

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        # without the time to fetch batches: MMEngine sleeps for seconds where an epoch ends
        self._seconds += _now() - self._start
        self._losses.append(outputs["loss"].detach())
        self._targets.append(runner.train_loop.dataloader_iterator.tokens)

    def after_train(self, runner: Runner) -> None:
        peak_bytes = peak_memory()
        # before the held-out tokens, which have embeddings too
        tokens_per_second = self._num_tokens / self._seconds
        after = mean_loss(runner.model, self._held_out)
        result = dict(
            tokens_per_second=tokens_per_second,
            padding=self._padding,
            peak_bytes=peak_bytes,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            losses=[float(loss) for loss in self._losses],
            targets=self._targets,
            held_out=[self._before, after],
        )
        leave_result(runner, result)

    def _count(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        self._num_tokens += inputs[0].numel()


@torch.no_grad()
def mean_loss(model: nn.Module, packs: list[dict]) -> float:
    """Return the mean loss over all targets of documents, each from its own start.

    Args:
        model: XTuner's, around a dispatched language model.
        packs: Of a packed dataset.
    """
    model.eval()
    total, count = 0.0, 0
    for pack in packs:
        batch = packed_collate_fn([pack])
        num_targets = count_targets(batch["data"])
        publish_batch(batch)
        try:
            loss = model(**model.data_preprocessor(batch), mode="loss")["loss"]
        finally:
            withdraw_layout()
        total += num_targets * float(loss)
        count += num_targets
    model.train()
    return total / count


def padding_of(loader: Any, row_length: int | None) -> float:
    """Return the share of places without a token in the batches of an epoch.

    Args:
        loader: MMEngine's.
        row_length: See :class:`CompareHook`.
    """
    lengths = np.asarray(loader.dataset.length[:])
    num_places, num_tokens = 0, 0
    for batch in loader.batch_sampler:
        num_places += len(batch) * (row_length or lengths[batch].max())
        num_tokens += lengths[batch].sum()
    return float(1 - num_tokens / num_places)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
