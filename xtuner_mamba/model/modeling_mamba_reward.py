"""A Mamba that scores a text at its last token. Saved beside the weights, so imports no plugin."""

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.mamba.modeling_mamba import MambaModel, MambaPreTrainedModel


class MambaForSequenceClassification(MambaPreTrainedModel):
    """``MambaModel`` with a linear head on the last token.

    Args:
        config: Of the Mamba; ``num_labels`` is the number of scores.
    """

    def __init__(self, config) -> None:
        super().__init__(config)
        self.backbone = MambaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs
    ) -> SequenceClassifierOutput:
        """Score every row, ``(batch, num_labels)``.

        Args:
            input_ids: ``(batch, seqlen)``.
            attention_mask: 0 on padding, right or left, ``(batch, seqlen)``.
            **kwargs: Of ``MambaModel``.
        """
        kwargs["use_cache"] = False
        hidden_states = self.backbone(input_ids, attention_mask=attention_mask, **kwargs)[0]
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
        rows = torch.arange(len(last), device=last.device)
        return SequenceClassifierOutput(logits=self.score(hidden_states[rows, last]))
