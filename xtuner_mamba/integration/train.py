"""``xtuner train``: what happens between reading a config and building it.

``xtuner/tools/train.py`` runs as ``__main__``, so that no import can be waited for. It calls
``set_model_resource(cfg)`` right after reading the config and ``check_cfg(cfg, args)`` after
merging ``--cfg-options``: the first call puts our check in the place of the second.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from types import ModuleType

from mmengine.config import Config


def check_before_building(utils: ModuleType) -> None:
    """Run our checks where ``xtuner train`` runs its own."""
    set_model_resource = utils.set_model_resource

    @functools.wraps(set_model_resource)
    def wrapper(cfg: Config) -> None:
        script = sys._getframe(1).f_globals
        check_cfg = script.get("check_cfg")
        if check_cfg is not None and not isinstance(check_cfg, CheckCfg):
            script["check_cfg"] = CheckCfg(check_cfg, script)
        return set_model_resource(cfg)

    utils.set_model_resource = wrapper


class CheckCfg:
    """XTuner's ``check_cfg`` after ours.

    Args:
        check_xtuner: The function of ``xtuner/tools/train.py``.
        script: Its globals.
    """

    def __init__(self, check_xtuner: Callable, script: dict) -> None:
        self._check_xtuner, self._script = check_xtuner, script

    def __call__(self, cfg: Config, args: argparse.Namespace) -> None:
        """Refuse what cannot train, and adapt what would not train exactly.

        Raises:
            SystemExit: The config cannot train; the message says why and what to do.
        """
        from xtuner_mamba.integration import deepspeed
        from xtuner_mamba.integration.config_checks import check_packed_training
        from xtuner_mamba.integration.config_parts import ConfigError
        from xtuner_mamba.integration.config_rewrites import fit_cpu, train_exactly

        fit_cpu(cfg, args)
        try:
            covered = check_packed_training(cfg, args)
        except ConfigError as error:
            # one paragraph instead of a traceback through XTuner
            raise SystemExit(f"{args.config}: {error}") from None
        if covered:
            train_exactly(cfg)
        deepspeed.remember(cfg, covered)
        self._check_without_flash_attn(cfg, args, covered)

    def _check_without_flash_attn(
        self, cfg: Config, args: argparse.Namespace, covered: bool
    ) -> None:
        before = self._script["SUPPORT_FLASH2"]
        # XTuner asks for flash-attn with use_varlen_attn; our forwards do not use it
        self._script["SUPPORT_FLASH2"] = before or covered
        try:
            self._check_xtuner(cfg, args)
        finally:
            self._script["SUPPORT_FLASH2"] = before
