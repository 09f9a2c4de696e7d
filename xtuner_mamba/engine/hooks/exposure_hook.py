"""Log how many tokens of each document length are trained on, and with which loss."""

from collections.abc import Sequence
from pathlib import Path

import torch
from mmengine.dist import all_reduce, is_main_process
from mmengine.hooks import Hook
from mmengine.logging import MessageHub, print_log
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from rich.box import SIMPLE
from rich.table import Table
from torch import Tensor, nn
from xtuner.utils.device import get_device

from xtuner_mamba.dataset.arguments import check_integer
from xtuner_mamba.dataset.buckets import check_boundaries
from xtuner_mamba.engine.tables import table_text
from xtuner_mamba.engine.token_losses import backbone, token_losses
from xtuner_mamba.layout import IGNORE_INDEX, current_layout

# what the counts and the history are kept as, in the MessageHub and so in checkpoints
_COUNTS, _HISTORY = "exposure_counts", "exposure_history"


@HOOKS.register_module()
class ExposureHook(Hook):
    """Log tokens and loss of each length bucket, over all ranks, and draw them at the end.

    Tokens are counted in every iteration. The loss is that of the targets of one iteration in
    ``interval``, whose head is run once more: a tenth of the FLOPs of a step of 130M parameters,
    less of larger models. A piece of a document that was cut counts as a document of its length.

    A table in the log every ``interval`` iterations, ``exposure.png`` in the ``work_dir`` at the
    end. Both go on after ``--resume`` from a checkpoint that ``interval`` divides.

    Args:
        boundaries: Longest document of each bucket, rising; longer ones are in another bucket.
        interval: Iterations between tables.

    Raises:
        ValueError: An argument cannot be met.
    """

    def __init__(
        self,
        boundaries: Sequence[int] = (64, 128, 256, 512, 1024, 2048, 4096, 8192),
        interval: int = 100,
    ) -> None:
        self._boundaries = check_boundaries(boundaries)
        check_integer("interval", interval, 1)
        self._interval = interval

    def before_train(self, runner: Runner) -> None:
        self._model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        self._handles = [
            self._model.register_forward_pre_hook(self._count_tokens, with_kwargs=True),
            backbone(self._model.llm).register_forward_hook(self._add_losses),
        ]
        device = get_device()
        self._edges = torch.tensor(self._boundaries, device=device)
        # rows: tokens, targets of the measured iterations, their losses
        self._counts = torch.zeros(3, len(self._boundaries) + 1, dtype=torch.float64, device=device)
        self._targets: Tensor | None = None
        self._measures = False

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch=None) -> None:
        self._measures = self.every_n_train_iters(runner, self._interval)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch=None, outputs=None
    ) -> None:
        if not self._measures:
            return
        hub, iteration = runner.message_hub, runner.iter + 1
        losses = self._add_up(hub)
        hub.update_info(_HISTORY, {**hub.get_info(_HISTORY, {}), iteration: losses})
        print_log(self._table(iteration, hub.get_info(_COUNTS), losses), logger="current")

    def after_train(self, runner: Runner) -> None:
        for handle in self._handles:
            handle.remove()
        # the iterations since the last table
        self._add_up(runner.message_hub)
        if is_main_process():
            path = Path(runner.work_dir) / "exposure.png"
            self._draw(runner, path)
            print_log(f"exposure of each length in {path}", logger="current")

    def _add_up(self, hub: MessageHub) -> list[float | None]:
        """Add the counts of all ranks to those kept, and return the loss of each bucket."""
        all_reduce(self._counts)
        tokens, targets, losses = self._counts.tolist()
        self._counts.zero_()
        before = hub.get_info(_COUNTS, [0] * len(tokens))
        hub.update_info(_COUNTS, [int(count) + old for count, old in zip(tokens, before)])
        return [loss / count if count else None for loss, count in zip(losses, targets)]

    def _count_tokens(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if not model.training or kwargs.get("mode") != "loss":
            return
        layout = current_layout()
        if layout is None:
            raise RuntimeError(
                "a packed layout must be published for ExposureHook, got none; it needs "
                "use_varlen_attn=True and dict(type=PackedLayoutHook)"
            )
        lengths = layout.cu_seqlens.diff()
        # searched on the device, which is not waited for
        self._bucket_of = torch.searchsorted(self._edges, lengths.long())
        self._counts[0].index_add_(0, self._bucket_of, lengths.double())
        self._targets = layout.targets(kwargs["data"]["labels"]) if self._measures else None

    def _add_losses(self, module: nn.Module, args: tuple, output) -> None:
        if self._targets is None:
            return
        layout, targets = current_layout(), self._targets
        # the backbone is run once for a batch; what comes next is somebody else's
        self._targets = None
        losses = token_losses(self._model.llm, output[0], targets)
        bucket = self._bucket_of[layout.seq_idx[0].long()]
        self._counts[1].index_add_(0, bucket, (targets != IGNORE_INDEX).double())
        self._counts[2].index_add_(0, bucket, losses.double())

    def _table(self, iteration: int, tokens: list[int], losses: list[float | None]) -> str:
        table = Table("document of", "tokens", "share", "loss", box=SIMPLE, title_justify="left")
        table.title = f"exposure after {iteration:,} iterations"
        for name, count, loss in zip(self._names(), tokens, losses):
            if count:
                shown = "" if loss is None else f"{loss:.4f}"
                table.add_row(name, f"{count:,}", f"{count / sum(tokens):.1%}", shown)
        return table_text(table)

    def _names(self) -> list[str]:
        return [f"at most {b:,}" for b in self._boundaries] + [f"over {self._boundaries[-1]:,}"]

    def _draw(self, runner: Runner, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        tokens = runner.message_hub.get_info(_COUNTS)
        history = runner.message_hub.get_info(_HISTORY, {})
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
        shown = [b for b, count in enumerate(tokens) if count]
        names = self._names()
        left.barh([names[b] for b in shown], [tokens[b] for b in shown])
        left.invert_yaxis()
        left.set(xlabel="tokens trained on", title="Exposure of documents by their length")
        for b in shown:
            points = [(i, means[b]) for i, means in history.items() if means[b] is not None]
            if points:
                right.plot(*zip(*points), label=names[b], marker=".")
        right.set(xlabel="iteration", ylabel="loss of a target token", title="Loss")
        if history:
            right.legend()
        figure.savefig(path, dpi=120)
        plt.close(figure)
