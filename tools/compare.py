"""Run ``xtuner-mamba compare`` from a checkout."""

import sys

from xtuner_mamba.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["compare", *sys.argv[1:]]))
