"""Direct preference optimisation on packed pairs, as a thin subclass of XTuner's."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from xtuner.model.dpo import DPO

from xtuner_mamba.layout import current_layout, current_mean_targets
from xtuner_mamba.model.preference_loss import (
    DPO_LOSSES,
    Pairs,
    answer_logps,
    dpo_losses,
    mean_over_pairs,
    reward_metrics,
)
from xtuner_mamba.model.sft import PackedSupervisedFinetune


class PackedDPO(PackedSupervisedFinetune, DPO):
    """``DPO`` whose packed step equals the step on its pairs one by one.

    The mixers of policy and reference stop at document boundaries, an answer's log probability is
    that of its own tokens, a token of id 0 counts as any other, and the loss is the mean over all
    pairs of the optimizer step. With ``use_varlen_attn=False``, XTuner's own model.

    Args:
        llm: The policy, as in XTuner.
        loss_type: One of ``sigmoid``, ``robust``, ``hinge``, ``ipo``, ``sppo_hard``, ``nca_pair``.
        beta: Weight of the log ratios.
        label_smoothing: Share of pairs assumed to be mislabelled.
        **kwargs: Other arguments of ``DPO`` (``ref_llm``) and of ``PackedSupervisedFinetune``,
            whose ``fuse_loss`` has nothing to fuse here.

    Raises:
        ValueError: The loss is not a mean over pairs, or has no finite value with these numbers.
    """

    def __init__(
        self,
        llm: dict | nn.Module,
        *,
        loss_type: str = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        **kwargs,
    ) -> None:
        if not 0 < beta < math.inf:
            raise ValueError(f"beta must be positive and finite, got {beta}; XTuner's is 0.1")
        if not 0 <= label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing must be in [0, 0.5), got {label_smoothing}; pairs of which half "
                "are mislabelled teach nothing"
            )
        if kwargs.get("use_varlen_attn", True) and loss_type not in DPO_LOSSES:
            raise ValueError(
                f"loss_type must be one of {', '.join(DPO_LOSSES)} on packed pairs, got "
                f"{loss_type!r}; 'kto_pair' would depend on which pairs share a pack"
            )
        super().__init__(
            llm, loss_type=loss_type, beta=beta, label_smoothing=label_smoothing, **kwargs
        )

    def train(self, mode: bool = True) -> "PackedDPO":
        """Set the mode of the policy; the reference stays as it is in evaluation."""
        super().train(mode)
        if self.ref_llm is not None:
            self.ref_llm.eval()
        return self

    def compute_loss(self, data: dict, data_samples=None) -> dict[str, Tensor]:
        """Return the batch's share of the optimizer step's mean loss over pairs."""
        if not self.use_varlen_attn:
            return DPO.compute_loss(self, data, data_samples)
        # without a layout a dispatched mixer raises
        layout, labels = current_layout(), data.pop("labels")

        def logps(llm: nn.Module) -> Pairs:
            logits = llm(**data).logits
            return answer_logps(logits, labels, layout, average=self.loss_type == "ipo")

        # first, so that its logits are gone when the policy's are made
        with torch.no_grad(), self._reference() as ref_llm:
            reference = logps(ref_llm)
        policy = logps(self.llm)
        losses = dpo_losses(policy, reference, self.loss_type, self.beta, self.label_smoothing)
        rewards = Pairs(*(self.beta * (p - r) for p, r in zip(policy, reference)))
        loss = mean_over_pairs(losses, current_mean_targets())
        return {"loss": loss, **reward_metrics(rewards)}

    @contextmanager
    def _reference(self) -> Iterator[nn.Module]:
        if self.ref_llm is not None:
            yield self.ref_llm
        else:
            with self.llm.disable_adapter():
                yield self.llm
