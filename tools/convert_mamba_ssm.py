"""Run ``xtuner-mamba convert-mamba-ssm`` from a checkout."""

import sys

from xtuner_mamba.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["convert-mamba-ssm", *sys.argv[1:]]))
