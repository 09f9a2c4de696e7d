"""Functions in processes of their own, which leave nothing behind: no memory and no kernels."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tempfile import NamedTemporaryFile
from typing import Any

# lines of a log that say why a process failed
_TAIL = 15


def run_fresh(function: Callable[..., dict], *arguments: Any) -> dict:
    """Call a function in a new process, and keep what it prints to itself.

    Args:
        function: Of a module that can be imported.
        *arguments: For it.

    Raises:
        RuntimeError: It raised, or its process was killed.
    """
    with NamedTemporaryFile("r", errors="replace") as log:
        pool = ProcessPoolExecutor(
            1, get_context("spawn"), initializer=_print_into, initargs=(log.name,)
        )
        try:
            with pool:
                return pool.submit(function, *arguments).result()
        # XTuner leaves with a message where a config cannot train
        except (Exception, SystemExit) as error:
            tail = "".join(log.readlines()[-_TAIL:])
            raise RuntimeError(
                f"{function.__name__}{arguments} must end with a result, got "
                f"{type(error).__name__}: {error}; the last lines of its process:\n{tail}"
            ) from error


def _print_into(path: str) -> None:
    with open(path, "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
