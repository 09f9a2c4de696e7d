"""Measure the perplexity of held-out documents far beyond the length that is trained on."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from rich.box import SIMPLE
from rich.table import Table
from torch import Tensor, nn
from xtuner.registry import BUILDER
from xtuner.utils.device import get_device

from xtuner_mamba.dataset.arguments import check_integer
from xtuner_mamba.engine.tables import table_text
from xtuner_mamba.engine.token_losses import backbone, token_losses
from xtuner_mamba.layout import IGNORE_INDEX, PackedLayout

# what the curves are kept as, in the MessageHub and so in checkpoints
_HISTORY = "length_extrapolation"
_SHORTEST = 50
_MULTIPLES = (0.25, 0.5, 1, 2, 4, 8)


@HOOKS.register_module()
class LengthExtrapolationHook(Hook):
    """Log the perplexity by the place in a document, up to 8 times ``max_length``.

    A table in the log and ``length_extrapolation.png`` in the ``work_dir``, every
    ``every_n_iters`` iterations and after training. Perplexity that rises beyond ``max_length``
    is that of a model that does not extrapolate. Every rank measures all documents.

    Args:
        dataset: Held-out documents, or their config: ``process_document_dataset`` with a
            ``max_length`` of 8 times that of training.
        max_length: The longest document, or piece, of training.
        lengths: Ends of the stretches that a perplexity is of. By default 50 tokens and 1/4 to 8
            times ``max_length``.
        num_documents: How many are measured, the longest ones.
        join: Lay documents end to end, as one that is cut at the last of ``lengths``, where no
            document is so long. It tells whether the state lasts, and not what the model makes of
            long documents.
        every_n_iters: Iterations between measurements; ``None`` for one at the end.
        dtype: Of autocast, ``"bfloat16"`` or ``"float16"``; ``None`` for none.

    Raises:
        ValueError: An argument cannot be met.
    """

    priority = "LOW"

    def __init__(
        self,
        dataset: Any,
        max_length: int,
        lengths: Sequence[int] | None = None,
        num_documents: int = 16,
        join: bool = False,
        every_n_iters: int | None = None,
        dtype: str | None = None,
    ) -> None:
        check_integer("max_length", max_length, 1)
        check_integer("num_documents", num_documents, 1)
        if every_n_iters is not None:
            check_integer("every_n_iters", every_n_iters, 1)
        if lengths is None:
            wanted = {_SHORTEST, *(int(max_length * multiple) for multiple in _MULTIPLES)}
            lengths = sorted(length for length in wanted if length >= _SHORTEST)
        array = np.asarray(lengths)
        is_whole = array.ndim == 1 and np.issubdtype(array.dtype, np.integer)
        if not is_whole or lengths[0] < 2 or (np.diff(lengths) < 1).any():
            raise ValueError(
                f"lengths must be integers that rise from 2 or more, got {lengths}; leave them out "
                f"for {_SHORTEST} to {_MULTIPLES[-1]} times max_length"
            )
        if dtype not in (None, "bfloat16", "float16"):
            raise ValueError(f"dtype must be None, 'bfloat16' or 'float16', got {dtype!r}")
        self._dataset, self._max_length = dataset, max_length
        self._lengths, self._num_documents, self._join = list(lengths), num_documents, join
        self._every_n_iters, self._dtype = every_n_iters, dtype

    def before_train(self, runner: Runner) -> None:
        # now, and not after hours of training: a dataset that cannot be built stops the run
        if isinstance(self._dataset, dict):
            self._dataset = BUILDER.build(self._dataset)
        self._documents = self._choose_documents()

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch=None, outputs=None
    ) -> None:
        if self._every_n_iters and self.every_n_train_iters(runner, self._every_n_iters):
            self._measure(runner, runner.iter + 1)

    def after_train(self, runner: Runner) -> None:
        if runner.iter not in runner.message_hub.get_info(_HISTORY, {}):
            self._measure(runner, runner.iter)

    def _choose_documents(self) -> list[tuple[Tensor, Tensor]]:
        """Return token ids and labels of the documents to measure, int64, ``(length,)`` each."""
        longest = self._lengths[-1]
        order = np.argsort(-np.asarray(self._dataset.length), kind="stable")
        ids, labels = [], []
        for index in (order if self._join else order[: self._num_documents]).tolist():
            row = self._dataset[index]
            ids.append(torch.tensor(row["input_ids"]))
            # nobody's target, also where documents are joined
            labels.append(torch.tensor([IGNORE_INDEX, *row["labels"][1:]]))
            if self._join and sum(map(len, ids)) >= self._num_documents * longest:
                break
        if self._join:
            room = self._num_documents * longest
            ids, labels = (torch.cat(column)[:room].split(longest) for column in (ids, labels))
        return [(i[:longest], l[:longest]) for i, l in zip(ids, labels)]

    def _measure(self, runner: Runner, iteration: int) -> None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        was_training = model.training
        model.eval()
        try:
            sums, counts = self._sum_losses(model.llm)
        finally:
            model.train(was_training)
        perplexities = [math.exp(s / c) if c else None for s, c in zip(sums, counts)]
        hub = runner.message_hub
        hub.update_info(_HISTORY, {**hub.get_info(_HISTORY, {}), iteration: perplexities})
        print_log(self._table(iteration, perplexities, counts), logger="current")
        if is_main_process():
            path = Path(runner.work_dir) / "length_extrapolation.png"
            self._draw(hub.get_info(_HISTORY), path)
            print_log(f"perplexity by place in {path}", logger="current")

    @torch.no_grad()
    def _sum_losses(self, llm: nn.Module) -> tuple[list[float], list[int]]:
        """Return the summed loss and the count of targets of each stretch."""
        device = torch.device(get_device())
        edges = torch.tensor(self._lengths, device=device)
        sums = torch.zeros(len(edges), dtype=torch.float64, device=device)
        counts = torch.zeros_like(sums)
        autocast = nullcontext()
        if self._dtype is not None:
            autocast = torch.autocast(device.type, getattr(torch, self._dtype))
        for ids, labels in self._documents:
            layout = PackedLayout.from_lengths([len(ids)]).to(device)
            with layout.published(), autocast:
                hidden = backbone(llm)(ids[None].to(device), use_cache=False)[0]
                targets = layout.targets(labels.to(device))
                losses = token_losses(llm, hidden, targets)
            # the target of token t is the document's token t + 2, counted from 1
            places = torch.arange(2, len(ids) + 2, device=device)
            stretch = torch.searchsorted(edges, places).clamp(max=len(edges) - 1)
            sums.index_add_(0, stretch, losses.double())
            counts.index_add_(0, stretch, (targets != IGNORE_INDEX).double())
        return sums.tolist(), [int(count) for count in counts.tolist()]

    def _table(self, iteration: int, perplexities: list[float | None], counts: list[int]) -> str:
        table = Table(
            "tokens", "of max_length", "perplexity", "targets", box=SIMPLE, title_justify="left"
        )
        table.title = f"perplexity by place in a held-out document, iteration {iteration:,}"
        start = 1
        for end, perplexity, count in zip(self._lengths, perplexities, counts):
            shown = "no document is so long" if perplexity is None else f"{perplexity:,.3f}"
            share = f"{end / self._max_length:.3g}"
            table.add_row(f"{start:,} to {end:,}", share, shown, f"{count:,}")
            start = end + 1
        return table_text(table)

    def _draw(self, history: dict[int, list[float | None]], path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for iteration, perplexities in history.items():
            points = [(x, y) for x, y in zip(self._lengths, perplexities) if y is not None]
            axes.plot(*zip(*points), label=f"iteration {iteration:,}", marker=".")
        axes.axvline(self._max_length, color="black", linewidth=0.8, linestyle="dashed")
        axes.set(xscale="log", xlabel="place in the document, up to", ylabel="perplexity")
        axes.set_title("Beyond the length of training (dashed)")
        axes.legend()
        figure.savefig(path, dpi=120)
        plt.close(figure)
