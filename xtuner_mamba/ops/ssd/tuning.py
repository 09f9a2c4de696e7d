"""Timings of mamba_ssm's kernels, kept in Triton's cache folder.

Otherwise every process times all variants of a kernel anew, for minutes, and may choose another
one, which rounds otherwise.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import triton
from triton.runtime.autotuner import Autotuner


def keep_timings(module: ModuleType) -> None:
    """Let a machine time the kernels of a module once."""
    for kernel in vars(module).values():
        if isinstance(kernel, Autotuner):
            _keep_timings(kernel)


def _keep_timings(tuner: Autotuner) -> None:
    tuner.cache_results = not triton.knobs.runtime.interpret
    # Triton keeps no timings of configs that have hooks
    hooks = [config.pre_hook for config in tuner.configs]
    if all(hooks) and len(set(map(_what_it_does, hooks))) == 1:
        tuner.fn = _HookedKernel(tuner.fn, tuner.arg_names, hooks[0])
        for config in tuner.configs:
            config.pre_hook = None


def _what_it_does(hook: Callable) -> tuple:
    cells = getattr(hook, "__closure__", None) or ()
    return getattr(hook, "__code__", hook), *(repr(cell.cell_contents) for cell in cells)


class _HookedKernel:
    """Runs a kernel after a hook, as its tuner does."""

    def __init__(
        self, fn: Any, arg_names: list[str], hook: Callable[[Mapping[str, Any]], object]
    ) -> None:
        # under the name that Triton looks for
        self.fn = fn
        self._arg_names, self._hook = arg_names, hook

    def run(self, *args, **kwargs):
        self._hook(dict(zip(self._arg_names, args)) | kwargs)
        return self.fn.run(*args, **kwargs)
