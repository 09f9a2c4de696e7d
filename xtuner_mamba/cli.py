"""``xtuner-mamba VERB``: the tools that stand beside XTuner's own commands."""

import sys
from contextlib import redirect_stdout
from importlib import import_module

from xtuner_mamba import __version__

VERBS = {
    "lengths": "compare the ways to batch a corpus by the lengths of its documents",
    "probe-batch": "measure the largest batch of each bucket, and the largest pack, that trains",
    "smoke": "train a few steps on short and long documents, and check what comes out",
    "doctor": "look for what usually goes wrong in a config, its data and its logs",
    "compare": "train packs, buckets and fixed chunks side by side on the same documents",
    "convert-mamba-ssm": "convert a checkpoint of mamba_ssm to transformers, or back",
}
"""What each module of :mod:`xtuner_mamba.tools` is for, by the verb, which has dashes."""


def main(argv: list[str] | None = None) -> int:
    """Run a verb with the rest of the arguments, and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    verb = arguments[0] if arguments else None
    if verb in VERBS:
        # imported now, since it takes seconds; what libraries say meanwhile is no result
        with redirect_stdout(sys.stderr):
            module = import_module(f"xtuner_mamba.tools.{verb.replace('-', '_')}")
        return module.main(arguments[1:])
    if verb == "--version":
        print(f"xtuner-mamba {__version__}")
        return 0
    asked = verb in ("-h", "--help")
    if not asked:
        print(f"VERB must be one of {', '.join(VERBS)}, got {verb}", file=sys.stderr)
    lines = [f"  {name:17} {meaning}" for name, meaning in VERBS.items()]
    usage = "usage: xtuner-mamba VERB ...; `xtuner-mamba VERB --help` says more"
    print("\n".join([usage, *lines]), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
