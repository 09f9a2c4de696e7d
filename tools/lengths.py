"""Run ``xtuner-mamba lengths`` from a checkout."""

import sys

from xtuner_mamba.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["lengths", *sys.argv[1:]]))
