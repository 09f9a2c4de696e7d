"""Training with a dispatched mixer on rows that go on from batch to batch."""

from torch import Tensor, nn

from xtuner_mamba.layout import PackedLayout


class ContinuedRows:
    """Rows that may go on with a document of the batch before, as :class:`CachedRows` do.

    Reads what the batch before has left and keeps what this one leaves, both for one mixer, and
    twice where a layer runs again in the backward.
    """

    def __init__(self, mixer: nn.Module, layout: PackedLayout) -> None:
        self._carried, self._num_seqs = layout.carried, layout.num_seqs
        self._layer_idx = mixer.layer_idx
        self._before = self._carried.states.before(self._layer_idx)
        self._conv_states: Tensor | None = None

    def mask(self, x: Tensor) -> Tensor:
        """Return ``x``: there is no padding."""
        return x

    def initial_conv_states(self, x: Tensor) -> Tensor | None:
        """Return the inputs before each sequence, ``(num_seqs, dim, width - 1)``."""
        if self._before is None:
            return None
        return self._carried.initial_states(self._before[0], self._num_seqs).to(x.dtype)

    def keep_conv_states(self, x: Tensor, final_states: Tensor) -> None:
        """Keep the last inputs of each row.

        Args:
            x: All inputs, ``(1, total, dim)``.
            final_states: The last ones of each sequence, ``(num_seqs, dim, width - 1)``.
        """
        self._conv_states = final_states[self._carried.last]

    def initial_ssm_states(self) -> Tensor | None:
        """Return the state before each sequence, ``(num_seqs, ..., dstate)``."""
        if self._before is None:
            return None
        return self._carried.initial_states(self._before[1], self._num_seqs)

    def keep_ssm_states(self, final_states: Tensor) -> None:
        """Keep the state after each row, of those after each sequence."""
        final_states = final_states[self._carried.last]
        self._carried.states.keep(self._layer_idx, self._conv_states, final_states)
