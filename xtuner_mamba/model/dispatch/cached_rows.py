"""Generation with a dispatched mixer: the states that a cache of transformers holds."""

import torch
from torch import Tensor, nn

from xtuner_mamba.layout import current_layout


class CachedRows:
    """Rows that a cache of transformers continues, each with a state of conv and of scan."""

    def __init__(
        self,
        mixer: nn.Module,
        cache,
        cache_position: Tensor | None,
        attention_mask: Tensor | None,
    ) -> None:
        refuse_cache_with_packs()
        self.conv_states = cache.conv_states[mixer.layer_idx]  # (batch, dim, width)
        self.ssm_states = cache.ssm_states[mixer.layer_idx]  # (batch, ..., dstate)
        self.attention_mask = attention_mask
        if hasattr(cache, "has_previous_state"):  # of a hybrid
            is_prompt = not cache.has_previous_state
        else:
            # as transformers tells a prompt from a single token
            is_prompt = cache_position.shape[0] == self.conv_states.shape[-1]
        if is_prompt:
            self.conv_states.zero_()
            self.ssm_states.zero_()

    def mask(self, x: Tensor) -> Tensor:
        """Fill padding with zeros, ``(batch, seqlen, dim)`` in and out."""
        if self.attention_mask is None:
            return x
        # Zamba's is of the whole row, whatever the cache holds of it
        padding = self.attention_mask[:, -x.shape[1] :, None] == 0
        return x.masked_fill(padding, 0)

    def initial_conv_states(self, x: Tensor) -> Tensor:
        """Return a copy of the inputs before each row, ``(batch, dim, width - 1)``."""
        return self.conv_states[..., 1:].to(x.dtype, copy=True)

    def keep_conv_states(self, x: Tensor, final_states: Tensor) -> None:
        """Remember the conv's last inputs: one more than ``final_states`` has."""
        # not cache.update_conv_state: 4.48 writes the tokens after a prompt shorter than the
        # filter to the wrong place
        recent = torch.cat([self.conv_states, x.mT.to(self.conv_states.dtype)], dim=-1)
        self.conv_states.copy_(recent[..., -self.conv_states.shape[-1] :])

    def initial_ssm_states(self) -> Tensor:
        """Return the state before each row, ``(batch, ..., dstate)``."""
        return self.ssm_states

    def keep_ssm_states(self, final_states: Tensor) -> None:
        """Remember the state after each row."""
        self.ssm_states.copy_(final_states.view_as(self.ssm_states))


def refuse_cache_with_packs() -> None:
    """Check that no layout is published.

    Raises:
        RuntimeError: There is one.
    """
    if current_layout() is not None:
        raise RuntimeError(
            "use_cache must be False while a packed layout is published, got a cache; it holds "
            "one state a row, not one a document: set model.config.use_cache = False"
        )
