"""Hand each batch's boundaries, and its optimizer step's target count, to the model."""

from collections import deque
from collections.abc import Iterator

import torch
from mmengine.dist import all_reduce, get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor
from xtuner.utils.device import get_device

from xtuner_mamba.layout import IGNORE_INDEX, PackedLayout, publish_layout, withdraw_layout


@HOOKS.register_module()
class PackedLayoutHook(Hook):
    """Publish the boundaries of ``data_batch["data"]`` for the length of one iteration.

    They are taken out of the batch, so that the model sees transformers' arguments only, and
    withdrawn afterwards, so that a missing layout fails instead of reusing old boundaries. In
    training the batches of a whole optimizer step are fetched ahead, to know how many target
    tokens its loss is the mean of.
    """

    priority = "VERY_HIGH"

    def before_train(self, runner: Runner) -> None:
        loop = runner.train_loop
        micro_steps = _micro_steps(runner)
        if not hasattr(loop, "dataloader_iterator"):
            raise RuntimeError(
                "train_cfg must use an iteration-based loop with PackedLayoutHook, got "
                f"{type(loop).__name__}; use dict(type=xtuner.engine.runner.TrainLoop)"
            )
        loop.dataloader_iterator = StepWindows(
            loop.dataloader_iterator, micro_steps, max_iters=loop.max_iters
        )

    # before_{train,val,test}_iter all end here, and after_..._iter in the next
    def _before_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict, mode: str = "train"
    ) -> None:
        data = data_of_batch(data_batch)
        layout = layout_of_batch(data)
        del data["cumulative_len"]
        data.pop("max_seqlen", None)
        publish_layout(layout.to(get_device()), data.pop("mean_targets", None))

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict, outputs=None, mode: str = "train"
    ) -> None:
        withdraw_layout()


class StepWindows:
    """Iterate over batches, an optimizer step's worth fetched at a time.

    Adds ``mean_targets`` to each batch's data: the step's target tokens over all micro-batches
    and ranks, divided by the number of those, float32, ``()``, on the training device.

    Args:
        batches: An endless iterator of collated batches.
        micro_steps: Micro-batches of an optimizer step.
        max_iters: Micro-batches of the training; the last step may have fewer.
    """

    def __init__(self, batches: Iterator[dict], micro_steps: int, max_iters: int) -> None:
        self._batches, self._micro_steps, self._left = batches, micro_steps, max_iters
        self._window: deque[dict] = deque()

    def __iter__(self) -> "StepWindows":
        return self

    def __next__(self) -> dict:
        if not self._window:
            count = min(self._micro_steps, max(self._left, 1))
            self._window.extend(next(self._batches) for _ in range(count))
            self._left -= count
            mean = mean_targets([data_of_batch(batch) for batch in self._window])
            for batch in self._window:
                batch["data"]["mean_targets"] = mean
        return self._window.popleft()


def mean_targets(window: list[dict]) -> Tensor:
    """Count the target tokens of an optimizer step, over all ranks, per micro-batch.

    Args:
        window: The data of this rank's micro-batches.

    Returns:
        Float32, ``()``, on the training device, without waiting for it.

    Raises:
        ValueError: No micro-batch has a target (seen by a rank that trains alone).
    """
    count = sum(
        int((layout_of_batch(data).targets(data["labels"]) != IGNORE_INDEX).sum())
        for data in window
    )
    # a rank among others may have none, and to stop there would leave them waiting
    if count == 0 and get_world_size() == 1:
        raise ValueError(
            f"an optimizer step must have at least one target token, got {len(window)} "
            "micro-batches whose labels are all -100; drop such documents before packing "
            "(process_packed_dataset does)"
        )
    total = torch.tensor(float(count), device=get_device())
    if get_world_size() > 1:
        all_reduce(total)
    return total.clamp(min=1) / (len(window) * get_world_size())


def data_of_batch(batch: dict) -> dict:
    """Return what the collate function made for the model.

    Raises:
        ValueError: The batch is not of one of XTuner's collate functions, or of ours.
    """
    if not isinstance(batch, dict) or "data" not in batch:
        got = sorted(batch) if isinstance(batch, dict) else type(batch).__name__
        raise ValueError(
            f"the batch must hold data, got {got}; set collate_fn=dict(type=packed_collate_fn) in "
            "the dataloader"
        )
    return batch["data"]


def layout_of_batch(data: dict) -> PackedLayout:
    """Read the boundaries that the collate function left in a batch.

    Rows are laid end to end.

    Raises:
        ValueError: There are none, or they do not fill the rows.
    """
    if "cumulative_len" not in data:
        raise ValueError(
            f"the batch must hold cumulative_len, got {sorted(data)}; use packed_collate_fn on "
            "a dataset from process_packed_dataset"
        )
    lengths: list[int] = []
    for row in data["cumulative_len"]:
        lengths += PackedLayout.from_cu_seqlens(row).lengths
    layout = PackedLayout.from_lengths(lengths)
    shape = tuple(data["input_ids"].shape)
    if layout.total != shape[0] * shape[1]:
        raise ValueError(
            f"cumulative_len must cover the batch of {shape[0]} x {shape[1]} tokens, got "
            f"{layout.total}; the pack was cut or padded after packing"
        )
    return layout


def _micro_steps(runner: Runner) -> int:
    """Micro-batches of an optimizer step, under MMEngine's wrappers and under DeepSpeed."""
    config = getattr(getattr(runner, "strategy", None), "config", None)
    if config is not None and "gradient_accumulation_steps" in config:
        return int(config["gradient_accumulation_steps"])
    return getattr(runner.optim_wrapper, "_accumulative_counts", 1)
