"""Tell the first process of a session to end, and see whether the others do."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """Processes of a session, around a signal to its first."""

    before: int
    with_gpu: int
    after: int
    seconds: float


def end_session(
    leader: subprocess.Popen, has_begun: Callable[[], bool], to_begin: float, to_end: float
) -> Ended:
    """Send SIGTERM to the first process of a session, and see what is left of the others.

    Args:
        leader: Started with ``start_new_session=True``.
        has_begun: When the signal may be sent.
        to_begin: Seconds until then, at most.
        to_end: Seconds after it in which all must have ended. What has not is killed.

    Raises:
        RuntimeError: It did not begin.
    """
    try:
        wait_until(lambda: has_begun() or leader.poll() is not None, to_begin)
        before = session_of(leader)
        if leader.poll() is not None or not has_begun():
            raise RuntimeError(
                f"a training must begin within {to_begin} s, got exit code {leader.poll()}"
            )
        with_gpu = sum(map(has_gpu_open, before))
        leader.terminate()
        start = time.monotonic()
        wait_until(lambda: not session_of(leader), to_end)
        return Ended(len(before), with_gpu, len(session_of(leader)), time.monotonic() - start)
    finally:
        for pid in session_of(leader):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leader.wait()


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition, at most so long."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)


def session_of(leader: subprocess.Popen) -> list[int]:
    """Return the processes of a session that run."""
    # an ended child stays in the list until it is asked
    leader.poll()
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            # it has ended since it was listed
            continue
        if int(session) == leader.pid and state != "Z":
            pids.append(int(path.parent.name))
    return pids


def has_gpu_open(pid: int) -> bool:
    """Tell whether a process holds a device file of an NVIDIA GPU."""
    try:
        opened = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(re.fullmatch(r"/dev/nvidia\d+", path) for path in opened)
