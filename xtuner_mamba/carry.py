"""Documents that go on from one batch to the next: where in a row, and with which states."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CarriedRows:
    """Rows of a batch that may begin and end within a document.

    Row 0 has the last 5 tokens of a document and 3 of another, row 1 the first 8 of one that goes
    on. In the layout ``[5, 3, 8]`` these are::

        last        = [1, 2]         the last sequence of each row
        continues   = [True, False]  whether its first one goes on with a document
        next_labels = [-100, 7]      what comes after the row, if that is its document still
    """

    last: Tensor
    """Int64, ``(num_rows,)``."""
    continues: Tensor
    """Bool, ``(num_rows,)``."""
    next_labels: Tensor
    """Int64, ``(num_rows,)``, -100 where there is none."""
    states: "CarriedStates | None" = None
    """Of the batches before; ``None`` where nothing is computed, but counted."""

    @classmethod
    def from_batch(cls, carried: dict) -> "CarriedRows":
        """Read what ``carried_collate_fn`` says about the rows of a batch."""
        return cls(
            last=torch.tensor(carried["num_pieces"]).cumsum(0) - 1,
            continues=torch.tensor(carried["continues"]),
            next_labels=torch.tensor(carried["next_labels"]),
        )

    @property
    def first(self) -> Tensor:
        """First sequence of each row, int64, ``(num_rows,)``."""
        return torch.cat([torch.zeros_like(self.last[:1]), self.last[:-1] + 1])

    def to(self, device: torch.device | str) -> "CarriedRows":
        """Return the same rows with their tensors on ``device``."""
        names = ("last", "continues", "next_labels")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **moved)

    def initial_states(self, states: Tensor, num_seqs: int) -> Tensor:
        """Give the states of the rows to the sequences that continue them, zeros to the others.

        Args:
            states: After the last token of each row of the batch before, ``(num_rows, ...)``.
            num_seqs: Sequences of this batch.

        Returns:
            ``(num_seqs, ...)``.
        """
        continues = self.continues.view(-1, *[1] * (states.ndim - 1))
        # filled, not multiplied by 0: what stands there may be NaN
        kept = states.masked_fill(~continues, 0)
        return states.new_zeros(num_seqs, *states.shape[1:]).index_copy_(0, self.first, kept)


class CarriedStates:
    """States of conv and scan after the last token of each row, of every mixer of this rank.

    What a batch begins with stays until the next one, so that layers can run again in its
    backward. Without gradient: a document is trained on by truncated backpropagation.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._after: dict[int, tuple[Tensor, Tensor]] = {}
        self._chunk: tuple[int, int] | None = None
        self._plan: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._after)

    def begin(self, carried: dict) -> None:
        """Turn to the next batch.

        Args:
            carried: What ``carried_collate_fn`` says about it.

        Raises:
            RuntimeError: Rows continue documents of a batch that was not the one before, or that
                was cut by another plan.
        """
        epoch, step = carried["chunk"]
        goes_on = any(carried["continues"])
        if goes_on and self._chunk != (epoch, step - 1):
            raise RuntimeError(
                f"carried states must be those of step {step - 1} of epoch {epoch}, got "
                f"{self._chunk}; a batch was left out, or resumed without the states beside its "
                "checkpoint"
            )
        plan = carried["plan"]
        if goes_on and self._plan != plan:
            saved = {name: self._plan[name] for name in plan if plan[name] != self._plan[name]}
            wanted = {name: plan[name] for name in saved}
            raise RuntimeError(
                f"carried states must be of the documents and rows that go on, got those of "
                f"{saved} for {wanted}; resume with the data and the settings of the checkpoint, "
                "or train from its weights with load_from and resume=False"
            )
        # another plan may have other rows
        self._before = self._after if goes_on else {}
        self._after, self._chunk, self._plan = {}, (epoch, step), plan

    def before(self, layer_idx: int) -> tuple[Tensor, Tensor] | None:
        """Return the states of conv and scan of the batch before, if there was one.

        ``(num_rows, dim, width - 1)`` and ``(num_rows, ..., dstate)``.
        """
        return self._before.get(layer_idx)

    def keep(self, layer_idx: int, conv_states: Tensor, ssm_states: Tensor) -> None:
        """Keep the states after this batch, shaped as those of :meth:`before`."""
        self._after[layer_idx] = conv_states.detach(), ssm_states.detach()

    def state_dict(self) -> dict:
        """Return what a checkpoint needs, on the CPU."""
        states = {layer: tuple(t.cpu() for t in pair) for layer, pair in self._after.items()}
        return {"chunk": self._chunk, "plan": self._plan, "states": states}

    def load_state_dict(self, saved: dict, device: torch.device | str) -> None:
        """Go on after the batch that was the last before :meth:`state_dict`."""
        states = saved["states"].items()
        self._after = {layer: tuple(t.to(device) for t in pair) for layer, pair in states}
        self._chunk, self._plan = saved["chunk"], saved["plan"]
