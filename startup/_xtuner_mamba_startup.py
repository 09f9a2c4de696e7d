"""Let xtuner_mamba join XTuner in every process, before a config or a command can.

``xtuner_mamba_startup.pth`` runs this at each start of Python, XTuner or not: builtin modules
only, no output, no exception. A finder waits for modules of XTuner, and of what it trains LoRA
with; Python's own loaders execute them, and :func:`xtuner_mamba.integration.patch` then gets the
executed module. ``XTUNER_MAMBA_DISABLE=1`` switches all of it off.
"""

import os
import sys
from _thread import get_ident

# scripts use the last two without XTuner
WATCHED = {"xtuner", "peft", "bitsandbytes"}


class XTunerFinder:
    """Ask the other finders for a module of these packages, and add a step after its execution."""

    def __init__(self):
        # calls in flight: another hook of this kind may ask us back
        self._busy = set()

    def find_spec(self, fullname, path=None, target=None):
        """Return the spec that another finder gives, its loader prepared."""
        call = (get_ident(), fullname)
        if fullname.partition(".")[0] not in WATCHED or call in self._busy:
            return None
        self._busy.add(call)
        try:
            for finder in sys.meta_path:
                find_spec = None if finder is self else getattr(finder, "find_spec", None)
                spec = find_spec and find_spec(fullname, path, target)
                if spec is not None:
                    patch_after_execution(spec)
                    return spec
            return None
        finally:
            self._busy.discard(call)


def patch_after_execution(spec):
    """Have the spec's loader hand the module to the plugin, once it has executed it."""
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)

    def exec_module(module):
        # the loader is itself again before anything can fail
        del loader.exec_module
        execute(module)
        if module.__name__ == spec.name:
            patch(module)

    # on the instance, so that type, source and resources stay what others expect of a loader;
    # only where we can take it back: not over another hook, nor on a namespace package
    if "exec_module" not in getattr(loader, "__dict__", {"exec_module": None}):
        loader.exec_module = exec_module


def patch(module):
    """Hand an executed module to the plugin; a fault of ours must not break the import."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, XTunerFinder)]
    if not finders:
        # a fault was told, while the package of this module was being executed
        return
    try:
        from xtuner_mamba.integration import patch

        patch(module)
    except Exception as error:
        for finder in finders:
            sys.meta_path.remove(finder)
        print(
            f"xtuner_mamba could not join {module.__name__}: {error!r}; reinstall it, or set "
            "XTUNER_MAMBA_DISABLE=1 to use XTuner without it",
            file=sys.stderr,
        )


if os.environ.get("XTUNER_MAMBA_DISABLE") != "1":
    sys.meta_path.insert(0, XTunerFinder())
