"""Batches by the optimizer step, which know of how many target tokens its loss is the mean."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed
from mmengine.dist import all_reduce, get_world_size, is_distributed
from torch import Tensor
from xtuner.utils.device import get_device

from xtuner_mamba.carry import CarriedRows
from xtuner_mamba.layout import IGNORE_INDEX, PackedLayout


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


class TokenWindows:
    """Iterate over optimizer steps of at least so many target tokens, over all ranks.

    A step is the list of this rank's micro-batches, as many as on every other rank, and goes on
    beyond the end of an epoch. ``mean_targets`` is added to them as by :class:`StepWindows`.

    Args:
        batches: An endless iterator of collated batches.
        tokens_per_step: Target tokens after which a step is full.
        epoch_length: Micro-batches of an epoch.
    """

    def __init__(self, batches: Iterator[dict], tokens_per_step: int, epoch_length: int) -> None:
        self._batches, self._tokens_per_step = batches, tokens_per_step
        self._epoch_length = epoch_length
        # counts are on the host: NCCL would wait for the step before
        self._group = torch.distributed.new_group(backend="gloo") if is_distributed() else None
        self.tokens = 0
        """Target tokens of the last step, over all ranks."""

    def __iter__(self) -> "TokenWindows":
        return self

    def __next__(self) -> list[dict]:
        window: list[dict] = []
        self.tokens = 0
        while self.tokens < self._tokens_per_step:
            batch = next(self._batches)
            if "num_pairs" in data_of_batch(batch):
                raise ValueError(
                    f"tokens_per_step must count target tokens, got {self._tokens_per_step} for "
                    "packs of pairs, whose loss is a mean over pairs; use AmpOptimWrapper with "
                    "accumulative_counts"
                )
            window.append(batch)
            count = torch.tensor(count_targets(data_of_batch(batch)))
            if self._group is not None:
                all_reduce(count, group=self._group)
            self.tokens += int(count)
            if self.tokens == 0 and len(window) >= self._epoch_length:
                raise ValueError(
                    f"an epoch must have at least one target token, got {len(window)} "
                    "micro-batches whose labels are all -100; check what dataset_map_fn puts into "
                    "'output'"
                )
        mean = torch.tensor(self.tokens / (len(window) * get_world_size()), device=get_device())
        for batch in window:
            batch["data"]["mean_targets"] = mean
        return window


def count_targets(data: dict) -> int:
    """Count what the loss of a micro-batch is the mean over: target tokens, or pairs of answers."""
    if "num_pairs" in data:
        return data["num_pairs"]
    return int((layout_of_batch(data).targets(data["labels"]) != IGNORE_INDEX).sum())


def mean_targets(window: list[dict]) -> Tensor:
    """Count the target tokens of an optimizer step, over all ranks, per micro-batch.

    Args:
        window: The data of this rank's micro-batches.

    Returns:
        Float32, ``()``, on the training device, without waiting for it.

    Raises:
        ValueError: No micro-batch has a target (seen by a rank that trains alone).
    """
    count = sum(map(count_targets, window))
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
    if "carried" in data:
        layout = replace(layout, carried=CarriedRows.from_batch(data["carried"]))
    return layout
