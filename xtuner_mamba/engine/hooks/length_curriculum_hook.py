"""Train on short documents first."""

from collections.abc import Sequence

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from xtuner_mamba.dataset.buckets import BucketBatchSampler
from xtuner_mamba.dataset.curriculum import LengthCurriculum
from xtuner_mamba.dataset.token_budget import TokenBudgetBatchSampler


@HOOKS.register_module()
class LengthCurriculumHook(Hook):
    """Let documents of each length come from some epoch on.

    The batches of an epoch stay what they are, and each comes once; only their order changes.
    What may not come yet comes later in the epoch. Where shorter batches run out, the shortest
    of the longer ones come early, and the log says how many. The order is a function of the
    sampler's seed and the epoch, so ``--resume`` goes on in the middle of it.

    Args:
        schedule: Pairs of an epoch, and how long documents may be from then on, such as
            ``[(0, 512), (0.25, 1024), (0.5, 2048)]``. From the last pair on every length comes.

    Raises:
        ValueError: The schedule does not rise from epoch 0.
    """

    def __init__(self, schedule: Sequence[tuple[float, int]]) -> None:
        self._curriculum = LengthCurriculum(schedule)

    # not before_train, when the loop may have wrapped its iterator
    def before_run(self, runner: Runner) -> None:
        loop = runner.train_loop
        sampler = loop.dataloader.batch_sampler
        if not isinstance(sampler, BucketBatchSampler | TokenBudgetBatchSampler):
            raise RuntimeError(
                "batch_sampler must be a BucketBatchSampler or a TokenBudgetBatchSampler with "
                f"LengthCurriculumHook, got {type(sampler).__name__}; packs hold documents of all "
                "lengths: use a mamba_*_bucket template, or leave the hook out"
            )
        sampler.curriculum = self._curriculum
        # the loop's iterator has drawn the first epoch already
        loop.dataloader_iterator = type(loop.dataloader_iterator)(loop.dataloader)
