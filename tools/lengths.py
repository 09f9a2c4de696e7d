"""Run ``xtuner-mamba lengths`` from a checkout."""

from xtuner_mamba.tools.lengths import main

if __name__ == "__main__":
    raise SystemExit(main())
