"""Run ``xtuner-mamba probe-batch`` from a checkout."""

import sys

from xtuner_mamba.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["probe-batch", *sys.argv[1:]]))
