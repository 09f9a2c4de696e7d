"""``xtuner train`` on a config that a tool has changed, and what came of it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from mmengine.config import Config
from mmengine.runner import Runner

from xtuner_mamba.integration.config_parts import type_name
from xtuner_mamba.tools import fresh_process

# in the work_dir
_RESULT = "result.json"
_NEEDED = ("model", "train_dataloader", "optim_wrapper", "train_cfg")
_BOUNDARY_HOOKS = ("PackedLayoutHook", "VarlenAttnArgsToMessageHubHook")


def train_changed(config: str, change: Callable[[Config], None]) -> dict:
    """Run ``xtuner train`` in this process, on a config that is changed once it has been checked.

    So whatever XTuner and this package refuse or rewrite in a config is refused and rewritten
    here too. The work_dir is thrown away.

    Args:
        config: Path, or name of a template.
        change: Changes the config in place, and adds a hook that calls :func:`leave_result`.

    Returns:
        What the hook left.
    """
    from xtuner.tools import train

    check_cfg, arguments = train.check_cfg, sys.argv

    def check_and_change(cfg: Config, args: Any) -> None:
        check_cfg(cfg, args)
        change(cfg)

    with TemporaryDirectory(dir=fresh_process.scratch) as work_dir:
        train.check_cfg = check_and_change
        sys.argv = ["xtuner train", config, "--work-dir", work_dir]
        try:
            train.main()
        finally:
            train.check_cfg, sys.argv = check_cfg, arguments
        return json.loads(Path(work_dir, _RESULT).read_text())


def check_config(cfg: Config) -> None:
    """Refuse a config that has nothing to train, or nothing to train it with.

    Args:
        cfg: As read.

    Raises:
        ValueError: A part is missing.
    """
    missing = [name for name in _NEEDED if not cfg.get(name)]
    if not missing and not cfg.train_dataloader.get("dataset"):
        missing = ["train_dataloader.dataset"]
    if missing:
        raise ValueError(
            f"a config must have {', '.join(_NEEDED)}, got one without {', '.join(missing)}; give "
            "what `xtuner train` takes"
        )


def strip_config(cfg: Config, hook: dict) -> None:
    """Leave of a config what a training step needs: no checkpoint, no schedule, no evaluation.

    Args:
        cfg: Changed in place.
        hook: The config of the only hook beside those that hand boundaries on.
    """
    kept = [node for node in cfg.get("custom_hooks") or [] if type_name(node) in _BOUNDARY_HOOKS]
    cfg.custom_hooks = [*kept, hook]
    for name in ("checkpoint", "logger"):
        cfg.default_hooks[name] = None
    for name in ("val", "test"):
        for part in ("dataloader", "cfg", "evaluator"):
            cfg[f"{name}_{part}"] = None
    cfg.param_scheduler = None
    cfg.resume = False


def leave_result(runner: Runner, result: dict) -> None:
    """Leave what :func:`train_changed` returns."""
    Path(runner.work_dir, _RESULT).write_text(json.dumps(result))


def peak_memory() -> int:
    """Return the most bytes that this process has held: on the GPU if there is one, else in all."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # getrusage would count what the parent held before it became this process
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
