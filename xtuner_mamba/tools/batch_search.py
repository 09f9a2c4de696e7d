"""Find the largest batch that trains, in few tries, since each of them is a training."""

from collections.abc import Callable
from typing import NamedTuple


class Limit(NamedTuple):
    """What is known of the largest size that fits."""

    fits: int
    """The largest that was tried and did; 0 if none did."""
    fails: int | None
    """The smallest that was tried and did not; none if all did."""


def find_limit(
    fits: Callable[[int], bool], *, start: int, step: int, most: int, tolerance: float = 0
) -> Limit:
    """Go away from a guess in steps that double, and bisect what lies between the last two.

    >>> tried = []
    >>> def fits(size):
    ...     tried.append(size)
    ...     return size <= 13
    >>> find_limit(fits, start=4, step=4, most=64)
    Limit(fits=13, fails=14)
    >>> tried
    [4, 8, 16, 12, 14, 13]

    Args:
        fits: Whether a size does. With a size, every smaller one does.
        start: The guess, which is tried first.
        step: From the guess to the second try.
        most: The largest size to try.
        tolerance: Share of the result by which it may be too small.

    Raises:
        ValueError: The guess is out of range, or the step is none.
    """
    if not 1 <= start <= most:
        raise ValueError(f"start must be in [1, most={most}], got {start}")
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}")
    # what is known without a try
    good, bad = 0, most + 1
    size = start
    while bad - good > max(1, tolerance * good):
        if fits(size):
            good = size
        else:
            bad = size
        if bad > most:
            size = min(good + step, most)
        elif not good:
            size = max(bad - step, 1)
        else:
            size = (good + bad) // 2
        step *= 2
    return Limit(good, bad if bad <= most else None)


def most_tries(*, start: int, step: int, most: int, tolerance: float = 0) -> int:
    """Return how often :func:`find_limit` tries at most, whatever fits.

    >>> most_tries(start=4, step=4, most=64)
    10
    """
    return max(_count_tries(limit, start, step, most, tolerance) for limit in range(most + 1))


def _count_tries(limit: int, start: int, step: int, most: int, tolerance: float) -> int:
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    find_limit(fits, start=start, step=step, most=most, tolerance=tolerance)
    return len(tried)
