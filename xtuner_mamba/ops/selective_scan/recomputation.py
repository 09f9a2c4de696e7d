"""What a scan may know of the backward to come."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


@contextmanager
def backward_follows() -> Iterator[None]:
    """Let scans keep whatever their backward would make again: it comes at once.

    For recomputation, where a forward runs only to be followed by a backward that runs a part of
    it once more. Acts on the thread that enters it.
    """
    before, _thread.is_next = is_backward_next(), True
    try:
        yield
    finally:
        _thread.is_next = before


def is_backward_next() -> bool:
    """Tell whether this thread is inside :func:`backward_follows`."""
    return getattr(_thread, "is_next", False)
