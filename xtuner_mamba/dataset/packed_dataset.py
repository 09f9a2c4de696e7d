"""Packs as a dataset: planned ahead, put together when they are asked for."""

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
from torch.utils.data import Dataset

from xtuner_mamba.dataset.documents import TokenizedDocuments
from xtuner_mamba.dataset.plan import PackPlan, Pieces, cut_pieces, plan_best_fit, plan_wrap
from xtuner_mamba.dataset.report import PackingReport, padding_of_batches
from xtuner_mamba.layout import IGNORE_INDEX

PLANNERS = {"best_fit": plan_best_fit, "wrap": plan_wrap}
# draws tried for one with no more packs with a target than the first
_MAX_ATTEMPTS = 8


class PackedDataset(Dataset):
    """Packs of documents, as XTuner's datasets give them.

    ``dataset[i]`` is a pack of the first draw, ``dataset[epoch, i]`` one of the draw that
    ``epoch`` names. A draw is a pure function of the seed and the epoch: the epoch travels in
    the index, so worker processes and resumed runs see the same packs. Every draw holds every
    target, in as many packs as the first; packs without a target are left out, not the same ones
    in every draw: :attr:`left_out` tells.

    Args:
        documents: Where the tokens are, packed or not.
        pieces: What of the documents to pack.
        planner: ``plan_best_fit`` or ``plan_wrap``.
        max_length: Tokens of a pack.
        seed: Of the draws. With ``None`` documents stay in order, and all draws are the same.

    Raises:
        ValueError: No pack has a target.
    """

    packing_report: PackingReport
    """What packing made of the dataset; set by :func:`pack_documents`."""
    left_out: np.ndarray
    """Tokens of each pack that the last draw left out for want of a target, int64."""
    is_first_draw: bool
    """Whether the last draw is the first, also for want of another: see :meth:`draw`."""

    def __init__(
        self,
        documents: TokenizedDocuments,
        pieces: Pieces,
        *,
        planner: Callable[..., PackPlan],
        max_length: int,
        seed: int | None,
    ) -> None:
        self.documents, self.pieces = documents, pieces
        self._planner, self._max_length, self.seed = planner, max_length, seed
        self._set_first_draw()
        self._epoch, self._num_packs = 0, len(self._plan)
        if self._num_packs == 0:
            raise ValueError(
                f"a pack must have a label after its documents' first tokens, got none in "
                f"{len(self.left_out)} packs of max_length={max_length}; raise max_length"
            )
        self.length: list[int] = self._plan.lengths.tolist()
        """Tokens of each pack of the first draw, where XTuner's samplers look for them."""

    def __len__(self) -> int:
        return self._num_packs

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, list[int]]:
        epoch, pack = index if isinstance(index, tuple) else (0, index)
        if not -len(self) <= pack < len(self):
            raise IndexError(f"pack must be in [0, {len(self)}), got {pack}")
        pieces = self.draw(epoch)[pack % len(self)]
        input_ids, labels = self.documents.read(pieces)
        cumulative_len = np.concatenate([[0], pieces.lengths.cumsum()])
        starts = cumulative_len[:-1]
        # a document's first token is no target of the document before it
        labels[starts] = IGNORE_INDEX
        position_ids = np.arange(len(labels)) - np.repeat(starts, pieces.lengths)
        return {
            "input_ids": input_ids.tolist(),
            "labels": labels.tolist(),
            "cumulative_len": cumulative_len.tolist(),
            "position_ids": position_ids.tolist(),
        }

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return (self[pack] for pack in range(len(self)))

    def draw(self, epoch: int) -> PackPlan:
        """Return the packs of an epoch; those of the last epoch asked for are kept.

        They are those of the first draw again if all that were tried have more packs with a target.
        Where there are fewer, packs without one fill up the number.
        """
        if epoch != self._epoch:
            self._draw(epoch)
            self._epoch = epoch
        return self._plan

    def _draw(self, epoch: int) -> None:
        for attempt in range(_MAX_ATTEMPTS):
            plan, kept = self._draw_once(epoch, attempt)
            num_missing = len(self) - kept.sum()
            if 0 <= num_missing <= (~kept).sum():
                kept[np.flatnonzero(~kept)[:num_missing]] = True
                self._keep(plan, kept)
                self.is_first_draw = epoch == attempt == 0
                return
        self._set_first_draw()

    def _set_first_draw(self) -> None:
        self._keep(*self._draw_once(0, 0))
        self.is_first_draw = True

    def _keep(self, plan: PackPlan, kept: np.ndarray) -> None:
        self._plan, self.left_out = plan.keep(kept), plan.lengths[~kept]

    def _draw_once(self, epoch: int, attempt: int) -> tuple[PackPlan, np.ndarray]:
        """Return a plan, and whether each of its packs has a target."""
        rng = None if self.seed is None else np.random.default_rng((self.seed, epoch, attempt))
        plan = self._planner(self.pieces.lengths, self._max_length, rng)
        plan = PackPlan(plan.pieces.of(self.pieces), plan.offsets)
        return plan, self.documents.packs_with_target(plan)


def pack_documents(
    documents: TokenizedDocuments,
    max_length: int,
    *,
    packing: Literal["best_fit", "wrap"] = "best_fit",
    too_long: Literal["split", "drop", "error"] = "split",
    seed: int | None = 0,
) -> PackedDataset:
    """Pack tokenized documents: the second half of ``process_packed_dataset``.

    Args:
        documents: Where the tokens are.
        max_length: Tokens of a pack.
        packing: See there.
        too_long: See there.
        seed: Of the draws; ``None`` keeps documents in order.

    Raises:
        ValueError: No document has a target, or one is too long, or all are.
    """
    lengths = documents.lengths
    labelled = documents.has_label
    if not labelled.any():
        raise ValueError(
            f"a document must have a label that is not {IGNORE_INDEX}, got none in "
            f"{len(lengths)} documents of {lengths.sum()} tokens; check what dataset_map_fn puts "
            "into 'output'"
        )
    dropped = labelled & (lengths > max_length)
    if too_long == "error" and dropped.any():
        raise ValueError(
            f"documents must have at most max_length={max_length} tokens, got "
            f"{lengths[dropped][0]} in document {dropped.argmax()} ({dropped.sum()} of "
            f"{len(lengths)} are longer); raise max_length, or set too_long to 'split' or 'drop'"
        )
    dropped &= too_long == "drop"
    chosen = np.flatnonzero(labelled & ~dropped)
    if not chosen.size:
        raise ValueError(
            f"some document must have at most max_length={max_length} tokens, got none of "
            f"{labelled.sum()} with too_long='drop'; raise max_length, or set too_long='split'"
        )
    pieces = Pieces.whole(chosen, lengths[chosen])
    if packing == "best_fit":
        pieces = cut_pieces(pieces.lengths, max_length).of(pieces)

    packs = PackedDataset(
        documents, pieces, planner=PLANNERS[packing], max_length=max_length, seed=seed
    )
    packed = packs.draw(epoch=0).pieces
    cut_short = packed.lengths < lengths[packed.documents]
    packs.packing_report = PackingReport(
        documents=len(np.unique(packed.documents)),
        tokens=int(packed.lengths.sum()),
        packs=len(packs),
        max_length=max_length,
        padding=padding_of_batches(pieces.lengths),
        num_split=len(np.unique(packed.documents[cut_short])),
        num_dropped=int(dropped.sum()),
        num_dropped_tokens=int(lengths[dropped].sum()),
        num_masked=int((~labelled).sum()),
        num_masked_packs=len(packs.left_out),
        num_masked_tokens=int(lengths[~labelled].sum() + packs.left_out.sum()),
    )
    return packs
