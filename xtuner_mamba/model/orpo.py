"""Odds ratio preference optimisation on packed pairs, as a thin subclass of XTuner's."""

import torch.nn.functional as F
from torch import Tensor
from xtuner.model.orpo import ORPO

from xtuner_mamba.layout import current_layout, current_mean_targets
from xtuner_mamba.model.preference_loss import (
    Pairs,
    answer_logps,
    log_odds_ratios,
    mean_over_pairs,
    reward_metrics,
)
from xtuner_mamba.model.sft import PackedSupervisedFinetune


class PackedORPO(PackedSupervisedFinetune, ORPO):
    """``ORPO`` whose packed step equals the step on its pairs one by one.

    The mixers stop at document boundaries, an answer's log probability is the mean over its own
    tokens, a token of id 0 counts as any other, and the loss is the mean over all pairs of the
    optimizer step, that of the chosen answers included. With ``use_varlen_attn=False``, XTuner's
    own model.

    Takes the arguments of ``ORPO`` (``beta``) and of ``PackedSupervisedFinetune``, whose
    ``fuse_loss`` has nothing to fuse here.
    """

    def compute_loss(self, data: dict, data_samples=None) -> dict[str, Tensor]:
        """Return the batch's share of the optimizer step's mean loss over pairs."""
        if not self.use_varlen_attn:
            return ORPO.compute_loss(self, data, data_samples)
        # without a layout a dispatched mixer raises
        layout, labels = current_layout(), data.pop("labels")
        logps = answer_logps(self.llm(**data).logits, labels, layout, average=True)
        log_odds = log_odds_ratios(logps)
        log_ratios = F.logsigmoid(log_odds)
        losses = -logps.chosen - self.beta * log_ratios
        return {
            "loss": mean_over_pairs(losses, current_mean_targets()),
            **reward_metrics(Pairs(*(self.beta * logp for logp in logps))),
            "log_odds_ratio": log_ratios.detach().mean(),
            "log_odds_chosen": log_odds.detach().mean(),
            # not nll_loss, which MMEngine would add to the loss that it logs
            "nll": -logps.chosen.detach().mean(),
        }
