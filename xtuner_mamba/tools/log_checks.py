"""What the log of a training shows: ``work_dir/TIMESTAMP/vis_data/scalars.json`` of MMEngine."""

import json
import math
from pathlib import Path

import numpy as np

from xtuner_mamba.tools.checkup import Finding, NotApplicable
from xtuner_mamba.tools.training import Training

# logged losses that tell anything
_FEWEST = 8
# standard errors that the loss must have fallen by
_SURE = 2
# share of the highest peak by which the peaks of memory may differ
_WIDE = 0.25


def read_log(work_dir: Path) -> list[dict]:
    """Read what the newest run in a folder logged in training, a line an entry.

    Raises:
        ValueError: There is no such log, or one of its lines is broken.
    """
    paths = sorted(work_dir.glob("*/vis_data/scalars.json"))
    if not paths:
        raise ValueError(
            f"--work-dir must hold TIMESTAMP/vis_data/scalars.json, which a training writes, got "
            f"none in {work_dir}; name the folder that `xtuner train` was given"
        )
    lines = paths[-1].read_text().splitlines()
    # a run that was killed may have left half a line
    if lines and not lines[-1].endswith("}"):
        lines.pop()
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            raise ValueError(
                f"a log must have JSON in every line, got {error} in line {number} of {paths[-1]}; "
                "take the line out"
            ) from None
    return [entry for entry in entries if "loss" in entry]


def check_loss_falls(training: Training) -> Finding | str:
    """Check that the loss has really fallen, beyond its noise, and is finite.

    Raises:
        NotApplicable: There is no log.
        ValueError: It is too short.
    """
    log = _log_of(training)
    losses = np.array([entry["loss"] for entry in log])
    if not np.isfinite(losses).all():
        step = log[int(np.argmin(np.isfinite(losses)))]["step"]
        return Finding(
            f"the loss of step {step} is {losses[~np.isfinite(losses)][0]}",
            "clip gradients (clip_grad=dict(max_norm=1)), lower the learning rate, and compute in "
            "bfloat16 instead of float16",
            "optim_wrapper",
        )
    if len(losses) < _FEWEST:
        raise ValueError(
            f"the log must have at least {_FEWEST} losses, got {len(losses)}; train for longer, or "
            "lower the interval of LoggerHook"
        )
    quarter = len(losses) // 4
    first, last = losses[:quarter], losses[-quarter:]
    noise = math.hypot(first.std(), last.std()) / math.sqrt(quarter)
    said = f"from {first.mean():.3f} to {last.mean():.3f} (noise {noise:.3f})"
    if first.mean() - last.mean() > _SURE * noise:
        return said
    return Finding(
        said,
        "look at labels and boundaries below, then at the learning rate; a Mamba that starts with "
        "long documents learns slowly: LengthCurriculumHook from xtuner_mamba.engine.hooks starts "
        "with short ones",
        "lr",
    )


def check_memory(training: Training) -> Finding | str:
    """Check that steps need about as much memory.

    Raises:
        NotApplicable: There is no log, or it is of a run without a GPU.
    """
    # the first entry has what building the optimizer took
    peaks = [entry["memory"] for entry in _log_of(training) if "memory" in entry][1:]
    if not peaks:
        raise NotApplicable("the log has no memory, as of a run without a GPU")
    said = f"peaks of {min(peaks):,} to {max(peaks):,} MB"
    if max(peaks) - min(peaks) <= _WIDE * max(peaks):
        return said
    return Finding(
        said,
        "make batches of like size: packs have as many tokens in every step; of buckets take "
        "the sizes that `xtuner-mamba probe-batch` measures",
        "tokens_per_batch",
    )


def _log_of(training: Training) -> list[dict]:
    if training.work_dir is None:
        raise NotApplicable("no log; give --work-dir")
    return read_log(training.work_dir)
