"""``xtuner-mamba`` is a command of the installed package."""

import subprocess


def test_the_installation_brings_the_command(environment):
    environment.install()
    command = environment.python.with_name("xtuner-mamba")
    done = subprocess.run([command, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: xtuner-mamba VERB" in done.stdout
    # the exit code of a verb is the command's
    done = subprocess.run([command, "lengths"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: xtuner-mamba lengths" in done.stderr
