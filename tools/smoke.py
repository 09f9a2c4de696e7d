"""Run ``xtuner-mamba smoke`` from a checkout."""

import sys

from xtuner_mamba.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["smoke", *sys.argv[1:]]))
