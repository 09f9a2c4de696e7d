"""XTuner's packer, without its losses."""

import os
from uuid import uuid4

from xtuner.dataset.utils import Packer

from xtuner_mamba.layout import IGNORE_INDEX


class VarlenPacker(Packer):
    """Pack documents batch by batch, in ``datasets.Dataset.map(packer, batched=True)``.

    Takes XTuner's arguments and gives XTuner's columns, with three differences: a tail that
    fills no pack waits for the next batch, and at the end for :meth:`flush`; documents without
    tokens leave no boundary; and the first token of a document, or of the rest of a document
    that was cut, is not a target.

    >>> packer = VarlenPacker(chunk_size=4)
    >>> documents = [[1, 2, 3], [4], [5, 6]]
    >>> packs = packer({"input_ids": documents, "labels": documents})
    >>> packs["input_ids"], packs["labels"]
    ([[1, 2, 3, 4]], [[-100, 2, 3, -100]])
    >>> packs["cumulative_len"], packs["position_ids"]
    ([[0, 3, 4]], [[0, 1, 2, 0]])
    >>> packer.flush()["input_ids"]
    [[5, 6]]

    Args:
        chunk_size: Tokens of a pack.
        use_varlen_attn: Whether boundaries are given, and first tokens masked.
        drop_last: Whether the tail is dropped.
    """

    def __init__(
        self, chunk_size: int = 2048, use_varlen_attn: bool = True, drop_last: bool = False
    ) -> None:
        super().__init__(chunk_size, use_varlen_attn, drop_last)
        self._pid = os.getpid()
        # part of the fingerprint: map() must not answer from its cache, which knows no tail
        self._nonce = uuid4().hex

    def __call__(self, batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        """Pack a batch with what was left of those before.

        Args:
            batch: ``input_ids`` and ``labels``, a list a document; other columns are ignored.

        Raises:
            RuntimeError: It runs in a worker process, whose tail nobody could flush.
            ValueError: A document's labels and tokens disagree in number.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"VarlenPacker must run in process {self._pid}, which flushes it, got "
                f"{os.getpid()}; map with num_proc=None, or use process_packed_dataset"
            )
        documents = _nonempty(batch)
        total = sum(len(input_ids) for input_ids in documents["input_ids"])
        if len(self.residual["input_ids"]) + total >= self.chunk_size:
            return self._mask_first_tokens(super().__call__(documents))
        for name, column in documents.items():
            self.residual[name] = self.residual[name] + [t for row in column for t in row]
        if self.use_varlen_attn:
            for input_ids in documents["input_ids"]:
                self.residual_cumulative_len.append(
                    self.residual_cumulative_len[-1] + len(input_ids)
                )
        return self._no_packs()

    def flush(self) -> dict[str, list[list[int]]]:
        """Return the tail as a last, shorter pack; no pack if there is none, or a second time."""
        if not self.residual["input_ids"]:
            return self._no_packs()
        return self._mask_first_tokens(super().__call__({"input_ids": [], "labels": []}))

    def _mask_first_tokens(self, packs: dict) -> dict:
        for labels, cumulative_len in zip(packs["labels"], packs.get("cumulative_len", [])):
            for start in cumulative_len[:-1]:
                labels[start] = IGNORE_INDEX
        return packs

    def _no_packs(self) -> dict:
        boundaries = ("cumulative_len", "position_ids") if self.use_varlen_attn else ()
        return {name: [] for name in ("input_ids", "labels", *boundaries)}


def _nonempty(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    documents = {"input_ids": [], "labels": []}
    for row, (input_ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"])):
        if len(input_ids) != len(labels):
            raise ValueError(
                f"labels must have as many entries as input_ids, got {len(labels)} and "
                f"{len(input_ids)} in row {row} of the batch; set a label to {IGNORE_INDEX} "
                "where a token is no target"
            )
        if input_ids:
            documents["input_ids"].append(input_ids)
            documents["labels"].append(labels)
    return documents
