"""Train two optimizer steps on batches of one shape, and see whether they fit."""

from typing import Any

import torch
from mmengine.config import Config
from mmengine.config.lazy import LazyObject
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch.utils.data import Dataset

from xtuner_mamba.tools.changed_training import (
    leave_result,
    peak_memory,
    strip_config,
    train_changed,
)

# the first makes the optimizer's state, the second runs beside it
_STEPS = 2
# the second runs beside the gradients of the first; more of them change nothing
_MICRO_STEPS = 2
# how missing memory is told, where neither OutOfMemoryError nor MemoryError is raised
_WORDS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


class RandomDocuments(Dataset):
    """Documents of one length, of random tokens that are all targets.

    Args:
        count: Of documents.
        length: Of each.
    """

    vocab_size: int
    """Set by :class:`ProbeHook`, which knows the model."""

    def __init__(self, count: int, length: int) -> None:
        self._count, self._length = count, length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocab_size, (self._length,), generator=draw).tolist()
        return {"input_ids": tokens, "labels": tokens}


class ProbeHook(Hook):
    """Hold a training to a limit of memory, and note what it took.

    Args:
        memory_limit: Bytes; ``None`` for all that there are.
    """

    def __init__(self, memory_limit: int | None) -> None:
        self._memory_limit = memory_limit

    def before_train(self, runner: Runner) -> None:
        embeddings = runner.model.llm.get_input_embeddings()
        runner.train_dataloader.dataset.vocab_size = embeddings.num_embeddings
        if self._memory_limit and torch.cuda.is_available():
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(self._memory_limit / total, 1.0))

    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        # PyTorch's allocator on the CPU knows no limit
        if self._memory_limit and peak_memory() > self._memory_limit:
            raise MemoryError(f"got {peak_memory()} bytes where {self._memory_limit} are allowed")

    def after_train(self, runner: Runner) -> None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        leave_result(runner, dict(fits=True, peak_bytes=peak_memory(), device=device))


def try_shape(
    config: str, documents: int, length: int, memory_limit: int | None = None
) -> dict[str, Any]:
    """Train on batches of so many documents of one length, as the config would.

    Args:
        config: Path, or name of a template.
        documents: Of a micro-batch.
        length: Tokens of each.
        memory_limit: Bytes; ``None`` for all that there are.

    Returns:
        Whether it ``fits``; if so, ``peak_bytes`` and the ``device``.
    """
    hook = dict(type=LazyObject(__name__, "ProbeHook"), memory_limit=memory_limit)

    def change(cfg: Config) -> None:
        strip_config(cfg, hook)
        train_on_shape(cfg, documents, length)

    try:
        return train_changed(config, change)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return dict(fits=False)


def train_on_shape(cfg: Config, documents: int, length: int) -> None:
    """Give a config batches of one shape, and as few of them as show what it takes.

    Args:
        cfg: Changed in place.
        documents: Of a micro-batch.
        length: Tokens of each.
    """
    loader = cfg.train_dataloader
    packs = cfg.get("use_varlen_attn", False)
    collate_fn = dict(type=LazyObject("xtuner_mamba.dataset", "padded_collate_fn"))
    count = _STEPS * _MICRO_STEPS * documents
    cfg.train_dataloader = dict(
        batch_size=documents,
        num_workers=0,
        dataset=dict(type=LazyObject(__name__, "RandomDocuments"), count=count, length=length),
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn=collate_fn if packs else loader.collate_fn,
    )
    optim_wrapper = cfg.optim_wrapper
    if "tokens_per_step" in optim_wrapper:
        # a target more than a micro-batch has
        optim_wrapper.tokens_per_step = documents * (length - 1) + 1
        cfg.train_cfg.max_iters = _STEPS
    else:
        micro_steps = min(optim_wrapper.get("accumulative_counts", 1), _MICRO_STEPS)
        optim_wrapper.accumulative_counts = micro_steps
        loop = LazyObject("xtuner.engine.runner", "TrainLoop")
        cfg.train_cfg = dict(type=loop, max_iters=_STEPS * micro_steps)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error, or what led to it, is that there was not enough memory."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, torch.cuda.OutOfMemoryError | MemoryError):
            return True
        # cuBLAS, Triton's launcher and PyTorch's allocator on the CPU
        if isinstance(chain, RuntimeError) and any(word in str(chain) for word in _WORDS):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
