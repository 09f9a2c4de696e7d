"""``xtuner MODE``: the exit code of the command, and the Python that runs it."""

import functools
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace

# how XTuner starts a mode, and the same without looking for another Python on PATH
_LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


def fail_like_the_child(entry_point: ModuleType) -> None:
    """Make ``xtuner`` exit as its child did, and with 2 when it did not understand."""
    cli, print_log = entry_point.cli, entry_point.print_log

    @functools.wraps(cli)
    def cli_with_exit_code() -> None:
        refusals = []

        def watch(message, *args, **kwargs):
            if str(message).startswith("WARNING: command error"):
                refusals.append(message)
            return print_log(message, *args, **kwargs)

        entry_point.print_log = watch
        cli()
        if refusals:
            sys.exit(2)

    entry_point.subprocess = SimpleNamespace(run=run)
    entry_point.cli = cli_with_exit_code


def run(command: list[str]) -> None:
    """Run a mode's script, hand SIGTERM on to it, and leave with its code if it fails."""
    program, *arguments = command
    child = subprocess.Popen([*_LAUNCHERS.get(program, [program]), *arguments])
    # a scheduler tells this process alone; without it the child would go on, and keep its GPU
    previous = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        code = child.wait()
    finally:
        signal.signal(signal.SIGTERM, previous)
    if code:
        # a signal is negative here and 128 + n in a shell
        sys.exit(code if code > 0 else 128 - code)
