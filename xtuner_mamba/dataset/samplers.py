"""Samplers of packs."""

import logging
import math
from collections.abc import Iterator

from mmengine.dataset import DefaultSampler
from mmengine.logging import print_log
from mmengine.registry import DATA_SAMPLERS
from xtuner.parallel.sequence import get_sequence_parallel_world_size

from xtuner_mamba.dataset.packed_dataset import PackedDataset


@DATA_SAMPLERS.register_module()
class RedrawSampler(DefaultSampler):
    """Draw the packs anew every epoch, in place of MMEngine's ``DefaultSampler``.

    MMEngine tells the epoch to the sampler and never to the dataset, which worker processes
    have copies of; so indices are ``(epoch, pack)``, and a resumed run that replays its batches
    gets the same ones. A draw that leaves out packs without a target says so in the log, as the
    packing report does of the first.

    Args:
        dataset: What ``process_packed_dataset`` returns.
        shuffle: Whether the order of the packs changes too.
        seed: Of that order, the same on all ranks; MMEngine fills it in.
        round_up: Whether packs are repeated until each rank has as many.

    Raises:
        ValueError: The dataset has no other draws.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        shuffle: bool = True,
        seed: int | None = None,
        round_up: bool = True,
    ) -> None:
        if not isinstance(dataset, PackedDataset) or dataset.seed is None:
            got = type(dataset).__name__
            if isinstance(dataset, PackedDataset):
                got += " with shuffle_before_pack=False"
            raise ValueError(
                f"dataset must come from process_packed_dataset with shuffle_before_pack=True, "
                f"got {got}; use mmengine.dataset.DefaultSampler for packs that stay the same"
            )
        super().__init__(dataset, shuffle=shuffle, seed=seed, round_up=round_up)
        # ranks that share a row share its packs. XTuner's own sampler asks for the data-parallel
        # group, which its DeepSpeed strategy alone makes
        ranks_per_row = get_sequence_parallel_world_size()
        self.rank //= ranks_per_row
        self.world_size //= ranks_per_row
        first = 0 if round_up else self.rank
        self.num_samples = math.ceil((len(dataset) - first) / self.world_size)
        self.total_size = self.num_samples * self.world_size if round_up else len(dataset)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        # read now: workers fetch ahead, and the epoch changes under them
        epoch = self.epoch
        return ((epoch, pack) for pack in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        # here, once: workers forked for this epoch find the plan made
        self.dataset.draw(epoch)
        if epoch and self.dataset.is_first_draw:
            print_log(
                f"packs of epoch {epoch}: those of epoch 0 again, since all draws that were tried "
                f"have more than {len(self.dataset):,} packs with a target; take another seed",
                logger="current",
                level=logging.WARNING,
            )
        left_out = self.dataset.left_out
        if len(left_out):
            print_log(
                f"packs of epoch {epoch}: {len(left_out):,} left out for want of labels "
                f"({left_out.sum():,} tokens)",
                logger="current",
            )
