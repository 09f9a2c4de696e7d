"""Short documents before long ones: the order of an epoch's batches."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np


class LengthCurriculum:
    """Which lengths may come when, counted in epochs of the batch sampler.

    Args:
        schedule: Pairs of an epoch, and how long documents may be from then on. Both rise, the
            first epoch is 0, and from the last pair on every length may come.

    Raises:
        ValueError: The schedule is something else.
    """

    def __init__(self, schedule: Sequence[tuple[float, int]]) -> None:
        if not _rises(schedule):
            raise ValueError(
                "schedule must be pairs (epoch, boundary) that rise from epoch 0, got "
                f"{schedule!r}; such as [(0, 512), (0.25, 1024), (0.5, 2048)]"
            )
        epochs, boundaries = zip(*schedule)
        self._ends, self._boundaries = epochs[1:], boundaries[:-1]

    def order(self, lengths: np.ndarray, epoch: int) -> tuple[np.ndarray, int]:
        """Order the steps of an epoch so that none comes before its time, as long as that can be.

        Of the steps that may come the first one does. Where none is left the shortest of the
        others comes early, so that each comes once.

        >>> curriculum = LengthCurriculum([(0, 4), (0.5, 8)])
        >>> order, num_early = curriculum.order(np.array([8, 2, 5, 4, 8, 3]), epoch=0)
        >>> order.tolist(), num_early
        ([1, 3, 5, 0, 2, 4], 0)

        Args:
            lengths: Tokens of the longest document of each step, ``(num_steps,)``.
            epoch: Counts from 0.

        Returns:
            Indices of the steps, int64, ``(num_steps,)``, and how many come early.
        """
        left, ordered, num_early = np.arange(len(lengths)), np.arange(0), 0
        for boundary, end in zip(self._boundaries, self._ends):
            stop = np.clip(np.ceil((end - epoch) * len(lengths)), len(ordered), len(lengths))
            wanted = int(stop) - len(ordered)
            is_open = lengths[left] <= boundary
            closed = left[~is_open]
            shortest = closed[np.argsort(lengths[closed], kind="stable")]
            chosen = np.concatenate([left[is_open], shortest])[:wanted]
            num_early += max(wanted - is_open.sum(), 0)
            ordered = np.concatenate([ordered, chosen])
            left = left[~np.isin(left, chosen)]
        return np.concatenate([ordered, left]), int(num_early)


def _rises(schedule: Any) -> bool:
    if not isinstance(schedule, list | tuple) or not schedule:
        return False
    for pair in schedule:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return False
        if not isinstance(pair[0], Real) or not isinstance(pair[1], Integral):
            return False
    epochs, boundaries = zip(*schedule)
    columns_rise = all(np.diff(column).min(initial=1) > 0 for column in (epochs, boundaries))
    return epochs[0] == 0 and boundaries[0] >= 1 and columns_rise
