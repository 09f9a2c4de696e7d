"""Where documents start and end in a packed batch: the one description that all parts share."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from xtuner_mamba.carry import CarriedRows

IGNORE_INDEX = -100
"""Label that the loss leaves out, in PyTorch as in XTuner."""

_MAX_TOTAL = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Boundaries of the documents packed into one row of ``total`` tokens.

    For lengths ``[3, 1, 2]``::

        cu_seqlens = [0, 3, 4, 6]          where each document starts, and the end
        seq_idx    = [0, 0, 0, 1, 2, 2]    which document a token belongs to
        positions  = [0, 1, 2, 0, 0, 1]    where in its document a token stands

    A batch of several rows is described as its rows laid end to end, so that every row end is
    a boundary too.
    """

    cu_seqlens: Tensor
    """Int32, ``(num_seqs + 1,)``."""
    lengths: tuple[int, ...]
    """Tokens of each document, on the host: launching a kernel never waits for the GPU."""
    carried: CarriedRows | None = None
    """Which documents go on with those of the batch before, or in the next; ``None`` for none."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> "PackedLayout":
        """Describe documents of these lengths, packed in this order.

        >>> PackedLayout.from_lengths([3, 1, 2]).cu_seqlens.tolist()
        [0, 3, 4, 6]

        Raises:
            ValueError: There is no document, one without tokens, or more tokens than int32
                counts; or a length is no integer.
        """
        try:
            # not int(), which takes 2.7 for 2 and "3" for 3
            lengths = tuple(map(operator.index, lengths))
        except TypeError:
            raise ValueError(
                f"lengths must be integers, got {list(lengths)}; count the tokens of each document"
            ) from None
        if not lengths or min(lengths) < 1:
            raise ValueError(
                f"lengths must be positive and not empty, got {list(lengths)}; "
                "leave empty documents out before packing"
            )
        if sum(lengths) > _MAX_TOTAL:
            raise ValueError(
                f"lengths must add up to at most {_MAX_TOTAL} tokens, got {sum(lengths)}; "
                "pack the documents into several rows"
            )
        offsets = [0, *accumulate(lengths)]
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        return cls(_mark_checked(cu_seqlens, offsets), lengths)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> "PackedLayout":
        """Describe the documents between these offsets (XTuner's ``cumulative_len``).

        Reads the values, so a tensor on the GPU is waited for. The layout keeps a copy.

        Raises:
            ValueError: The offsets do not rise from 0.
        """
        offsets = _check_offsets(cu_seqlens, total=None)
        lengths = tuple(end - start for start, end in pairwise(offsets))
        return cls(_mark_checked(cu_seqlens.clone(), offsets), lengths)

    @property
    def total(self) -> int:
        """Tokens of all documents together."""
        return sum(self.lengths)

    @property
    def num_seqs(self) -> int:
        """Count of documents."""
        return len(self.lengths)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document."""
        return max(self.lengths)

    @property
    def seq_idx(self) -> Tensor:
        """Document of each token, int32, ``(1, total)``."""
        index = torch.arange(self.num_seqs, dtype=torch.int32, device=self.cu_seqlens.device)
        return self._per_token(index)[None]

    @property
    def positions(self) -> Tensor:
        """Place of each token in its document, int64, ``(1, total)``."""
        starts = self._per_token(self.cu_seqlens[:-1])
        return (torch.arange(self.total, device=starts.device) - starts)[None]

    def targets(self, labels: Tensor) -> Tensor:
        """Shift labels to the tokens that predict them, within documents only.

        For lengths ``[3, 1, 2]``, with ``-`` for -100::

            labels  = [a, b, c,   d,   e, f]
            targets = [b, c, -,   -,   f, -]

        so that the first token of a document is never a target of its neighbour's last one.

        Args:
            labels: Int64, any shape with ``total`` elements, on the layout's device.

        Returns:
            Int64, ``(total,)``.

        Raises:
            ValueError: There are more labels than tokens, or fewer.
        """
        if labels.numel() != self.total:
            raise ValueError(
                f"labels must have the layout's {self.total} tokens, got {labels.numel()} of shape "
                f"{tuple(labels.shape)}; boundaries and labels belong to different packs"
            )
        inner = labels.flatten().index_fill(0, self.cu_seqlens[:-1].long(), IGNORE_INDEX)
        # the row's last token wraps round to the first, which is masked as a document's start
        targets = inner.roll(-1)
        if self.carried is None:
            return targets
        ends = self.cu_seqlens[self.carried.last + 1].long()
        return targets.index_copy(0, ends - 1, self.carried.next_labels)

    def to(self, device: torch.device | str) -> "PackedLayout":
        """Return the same layout with its tensor on ``device``."""
        cu_seqlens = self.cu_seqlens.to(device, non_blocking=True)
        offsets = offsets_on_host(self.cu_seqlens)
        carried = None if self.carried is None else self.carried.to(device)
        return PackedLayout(_mark_checked(cu_seqlens, offsets), self.lengths, carried)

    def check_covers(self, batch: int, seqlen: int) -> None:
        """Check that these documents fill a batch of ``batch`` rows of ``seqlen`` tokens.

        Raises:
            RuntimeError: Tokens are missing or left over, or a document crosses a row end.
        """
        if self.total != batch * seqlen:
            raise RuntimeError(
                f"the packed layout must cover the batch of {batch} x {seqlen} tokens, got "
                f"{self.num_seqs} documents with {self.total} tokens; it belongs to another "
                "batch: publish the layout that was packed with these input_ids"
            )
        if batch > 1:
            ends, offset = set(), 0
            for length in self.lengths:
                offset += length
                ends.add(offset)
            crossed = [end for end in range(seqlen, self.total, seqlen) if end not in ends]
            if crossed:
                raise RuntimeError(
                    f"every row end must be a document boundary, got none at {crossed[:5]} of "
                    f"{batch} rows x {seqlen} tokens; pack every row on its own"
                )

    @contextmanager
    def published(self) -> Iterator["PackedLayout"]:
        """Put the layout where the dispatched mixers look for it, and take it back at the end.

        For scripts and tests: in training, ``PackedLayoutHook`` does this for every iteration.
        Keep the backward inside the same block, since activation checkpointing runs the mixers
        again: under the layout that is published then, be it another one of as many tokens.
        """
        previous = current_layout(), current_mean_targets()
        publish_layout(self)
        try:
            yield self
        finally:
            withdraw_layout()
            if previous[0] is not None:
                publish_layout(*previous)

    def _per_token(self, per_seq: Tensor) -> Tensor:
        # output_size spares a GPU the wait for the sum of the repeats
        return per_seq.repeat_interleave(self.cu_seqlens.diff(), output_size=self.total)


def check_cu_seqlens(cu_seqlens: Tensor, total: int) -> None:
    """Check that offsets rise from 0 to ``total``, on a GPU once per tensor.

    A tensor that a :class:`PackedLayout` made was checked on the host. Any other tensor on a GPU
    is waited for at its first use, not at later ones.

    Raises:
        ValueError: The dtype, the shape or the values are wrong.
    """
    # on the CPU reading costs nothing, and misses no write that PyTorch does not count
    if cu_seqlens.device.type == "cpu":
        offsets = _check_offsets(cu_seqlens, total)
        if getattr(cu_seqlens, "_offsets", None) != tuple(offsets):
            _mark_checked(cu_seqlens, offsets)
    elif getattr(cu_seqlens, "_checked", None) != (_version(cu_seqlens), total):
        _mark_checked(cu_seqlens, _check_offsets(cu_seqlens, total))


def offsets_on_host(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Return the offsets that :func:`check_cu_seqlens` has read, without waiting for a GPU."""
    return cu_seqlens._offsets


def derived_from(cu_seqlens: Tensor) -> dict:
    """Return where ops keep what they make of offsets, until these are checked anew."""
    return cu_seqlens.__dict__.setdefault("_derived", {})


def _mark_checked(cu_seqlens: Tensor, offsets: Sequence[int]) -> Tensor:
    cu_seqlens._checked = (_version(cu_seqlens), offsets[-1])
    cu_seqlens._offsets = tuple(offsets)
    # of offsets that may have been others
    derived_from(cu_seqlens).clear()
    return cu_seqlens


def _version(cu_seqlens: Tensor) -> int | None:
    # rises when somebody writes into the tensor; one of inference mode does not count
    return None if cu_seqlens.is_inference() else cu_seqlens._version


def _check_offsets(cu_seqlens: Tensor, total: int | None) -> list[int]:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            "cu_seqlens must be int32 of shape (num_seqs + 1,) with num_seqs >= 1, got "
            f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; "
            "build it with PackedLayout.from_lengths"
        )
    offsets = cu_seqlens.tolist()
    falls = [i for i, (a, b) in enumerate(pairwise(offsets)) if b <= a]
    if offsets[0] != 0 or falls:
        where = f" at {falls[0]}: {offsets[falls[0] : falls[0] + 2]}" if falls else ""
        raise ValueError(
            "cu_seqlens must start at 0 and rise strictly (no empty document), got "
            f"{offsets if len(offsets) <= 8 else [*offsets[:8], '...']}{where}"
        )
    if total is not None and offsets[-1] != total:
        raise ValueError(
            f"cu_seqlens must end at the row's {total} tokens, got {offsets[-1]}; "
            "boundaries and tokens belong to different packs"
        )
    return offsets


# -- the MessageHub: the one place that knows XTuner's keys --------------------------------------
# a hub and not a ContextVar: recomputation under activation checkpointing runs on autograd's own
# threads, which would see a ContextVar's default


def publish_layout(layout: PackedLayout, mean_targets: Tensor | None = None) -> None:
    """Put the boundaries of the batch in flight on XTuner's MessageHub.

    Args:
        layout: On the device of the batch.
        mean_targets: Target tokens of a micro-batch, averaged over all micro-batches and ranks
            of the optimizer step, float32, ``()``; the loss is divided by it. ``None`` stands
            for the targets of the batch itself.
    """
    hub, rank = _hub(), _rank()
    hub.update_info(f"packed_layout_{rank}", layout)
    hub.update_info(f"mean_targets_{rank}", mean_targets)
    # XTuner's own varlen attention reads these two
    hub.update_info(f"cumulative_len_{rank}", layout.cu_seqlens)
    hub.update_info(f"max_seqlen_{rank}", layout.max_seqlen)


def withdraw_layout() -> None:
    """Take the boundaries back, so that a batch without any fails instead of using old ones."""
    hub, rank = _hub(), _rank()
    for name in ("packed_layout", "mean_targets", "cumulative_len", "max_seqlen"):
        hub.update_info(f"{name}_{rank}", None)


def current_layout() -> PackedLayout | None:
    """Boundaries of the batch in flight, also when XTuner's own hook published them."""
    # asked for once: every layer comes here
    hub, rank = _hub(), _rank()
    cumulative_len = hub.get_info(f"cumulative_len_{rank}")
    if cumulative_len is None:
        return None
    layout = hub.get_info(f"packed_layout_{rank}")
    # XTuner's hook neither writes nor withdraws our key: what it left there may be of an old batch
    if layout is None or layout.cu_seqlens is not cumulative_len:
        layout = PackedLayout.from_cu_seqlens(cumulative_len)
        hub.update_info(f"packed_layout_{rank}", layout)
        # the layout's own copy, by which the next layer knows that it is still the same batch
        hub.update_info(f"cumulative_len_{rank}", layout.cu_seqlens)
        hub.update_info(f"mean_targets_{rank}", None)
    return layout


def current_mean_targets() -> Tensor | None:
    """What :func:`publish_layout` was told about the optimizer step of the batch in flight."""
    return _hub().get_info(f"mean_targets_{_rank()}")


def _hub():
    from mmengine import MessageHub

    return MessageHub.get_instance("varlen_attn_args")


def _rank() -> str:
    from mmengine.dist import get_rank

    return f"rank_{get_rank()}"
