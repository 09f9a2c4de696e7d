"""Functions in processes of their own, which leave nothing behind: no memory, kernels or files."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

# lines of a log that say why a process failed
_TAIL = 15

scratch: str | None = None
"""Folder for files of this process, removed after it; ``None`` if it is nobody's fresh process."""


def run_fresh(function: Callable[..., dict], *arguments: Any) -> dict:
    """Call a function in a new process, and keep what it prints to itself.

    The process ends when this call does, and when this process does, whatever the reason.

    Args:
        function: Of a module that can be imported.
        *arguments: For it.

    Raises:
        RuntimeError: It raised, or its process was killed.
    """
    context = get_context("spawn")
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder, "log")
        parent_ended, lifeline = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(
            1, context, initializer=_prepare, initargs=(folder, log, parent_ended)
        )
        try:
            # the pool waits for its process, and the process for the end of the lifeline
            with pool, lifeline:
                return pool.submit(function, *arguments).result()
        # XTuner leaves with a message where a config cannot train
        except (Exception, SystemExit) as error:
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            tail = "\n".join(lines[-_TAIL:])
            raise RuntimeError(
                f"{function.__name__}{arguments} must end with a result, got "
                f"{type(error).__name__}: {error}; the last lines of its process:\n{tail}"
            ) from error
        finally:
            parent_ended.close()


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that whoever is told to end cleans up first."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _prepare(folder: str, log: Path, parent_ended: Connection) -> None:
    global scratch
    scratch = folder
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    Thread(target=_end_with_parent, args=(parent_ended,), daemon=True).start()


def _end_with_parent(parent_ended: Connection) -> None:
    # nothing is ever sent: what is waited for is that the other end is closed
    try:
        parent_ended.poll(None)
    finally:
        os._exit(1)
