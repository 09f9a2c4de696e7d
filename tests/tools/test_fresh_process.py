"""A fresh process ends with whoever started it, and nothing of it stays."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# in a fresh process, which holds a named pipe open for as long as it lives
WORK = """
import time
from tempfile import TemporaryDirectory

from xtuner_mamba.tools import fresh_process


def work():
    with TemporaryDirectory(dir=fresh_process.scratch), open("pipe", "w") as pipe:
        print("begun", file=pipe, flush=True)
        time.sleep(60)
        print("finished", file=pipe, flush=True)
    return {}
"""
PARENT = """
from work import work

from xtuner_mamba.tools.fresh_process import interrupted_by_sigterm, run_fresh

with interrupted_by_sigterm():
    run_fresh(work)
"""


def read_in_time(pipe):
    ready, _, _ = select.select([pipe], [], [], 30)
    assert ready, "nothing within 30 seconds"
    return os.read(pipe, 100)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_fresh_process_ends_with_its_parent(tmp_path, number):
    Path(tmp_path, "work.py").write_text(WORK)
    temporary = Path(tmp_path, "temporary")
    temporary.mkdir()
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=tmp_path,
        env=os.environ | dict(TMPDIR=str(temporary)),
        stderr=subprocess.DEVNULL,
    )
    try:
        assert read_in_time(pipe) == b"begun\n"
        assert any(temporary.iterdir())
        parent.send_signal(number)
        # closed by the end of the process, not by that of its work
        assert read_in_time(pipe) == b""
        assert parent.wait(30) != 0
    finally:
        parent.kill()
        os.close(pipe)
    if number != signal.SIGKILL:
        assert not any(temporary.iterdir())
