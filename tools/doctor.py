"""Run ``xtuner-mamba doctor`` from a checkout."""

import sys

from xtuner_mamba.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["doctor", *sys.argv[1:]]))
