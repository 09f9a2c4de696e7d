"""Losses over pairs of a chosen and a rejected answer, the documents ``2 i`` and ``2 i + 1``."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner_mamba.layout import IGNORE_INDEX, PackedLayout

DPO_LOSSES = ("sigmoid", "robust", "hinge", "ipo", "sppo_hard", "nca_pair")
"""Those of XTuner's that are a mean over pairs. ``kto_pair`` compares a pair with its batch."""


class Pairs(NamedTuple):
    """A number for each answer, ``(num_pairs,)``."""

    chosen: Tensor
    rejected: Tensor


def answer_logps(
    logits: Tensor, labels: Tensor, layout: PackedLayout, *, average: bool = False
) -> Pairs:
    """Sum the log probabilities of every answer's target tokens.

    Args:
        logits: ``(batch, seqlen, vocab)``.
        labels: Int64, ``(batch, seqlen)``, not shifted, -100 on prompts.
        layout: Boundaries of the batch, two documents a pair.
        average: Take the mean over the target tokens instead.
    """
    targets = layout.targets(labels)
    logps = -F.cross_entropy(
        logits.flatten(0, -2), targets, ignore_index=IGNORE_INDEX, reduction="none"
    )
    of_answers = _sums(logps, layout.lengths)
    if average:
        of_answers = of_answers / _sums((targets != IGNORE_INDEX).to(logps.dtype), layout.lengths)
    return pairs_of(of_answers)


def pairs_of(per_document: Tensor) -> Pairs:
    """Tell chosen from rejected.

    Args:
        per_document: ``(num_seqs,)``.

    Raises:
        ValueError: The last pair is no pair.
    """
    if len(per_document) % 2:
        raise ValueError(
            f"a pack of pairs must hold an even number of documents, got {len(per_document)}; "
            "build the dataset with process_preference_dataset"
        )
    return Pairs(per_document[::2], per_document[1::2])


def dpo_losses(
    policy: Pairs, reference: Pairs, loss_type: str, beta: float, label_smoothing: float
) -> Tensor:
    """Compute XTuner's loss of every pair, ``(num_pairs,)``.

    Args:
        policy: Log probabilities of the answers.
        reference: The same by the reference model.
        loss_type: One of :data:`DPO_LOSSES`.
        beta: Weight of the log ratios.
        label_smoothing: Share of pairs assumed to be mislabelled.
    """
    chosen, rejected = (p - r for p, r in zip(policy, reference))
    margin = chosen - rejected
    right, wrong = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
    if loss_type == "sigmoid":
        return -right * (1 - label_smoothing) - wrong * label_smoothing
    if loss_type == "robust":
        unbiased = -right * (1 - label_smoothing) + wrong * label_smoothing
        return unbiased / (1 - 2 * label_smoothing)
    if loss_type == "hinge":
        return torch.relu(1 - beta * margin)
    if loss_type == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    if loss_type == "sppo_hard":
        return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
    if loss_type == "nca_pair":
        return (
            -F.logsigmoid(beta * chosen)
            - 0.5 * F.logsigmoid(-beta * chosen)
            - 0.5 * F.logsigmoid(-beta * rejected)
        )
    raise ValueError(f"loss_type must be one of {', '.join(DPO_LOSSES)}, got {loss_type!r}")


def log_odds_ratios(logps: Pairs) -> Tensor:
    """Return the logarithm of how much greater the odds of the chosen answers are.

        log(p / (1 - p)) - log(q / (1 - q))

    Args:
        logps: Mean log probabilities, log p and log q.
    """
    # at p = 1 the odds are infinite, and two infinities give NaN
    chosen, rejected = (logp.clamp(max=-torch.finfo(logp.dtype).eps) for logp in logps)
    return (chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))


def mean_over_pairs(losses: Tensor, mean_pairs: Tensor | None) -> Tensor:
    """Return the batch's share of the mean over all pairs of the optimizer step.

    Args:
        losses: ``(num_pairs,)``.
        mean_pairs: Pairs of a micro-batch, averaged over the optimizer step, ``()``. ``None``
            stands for the pairs of this batch.
    """
    return losses.sum() / (len(losses) if mean_pairs is None else mean_pairs)


def reward_metrics(rewards: Pairs) -> dict[str, Tensor]:
    """Return what XTuner logs of the rewards, by its names."""
    chosen, rejected = (reward.detach() for reward in rewards)
    return {
        "chosen_rewards": chosen.mean(),
        "rejected_rewards": rejected.mean(),
        "reward_acc": (chosen > rejected).float().mean(),
        "reward_margin": (chosen - rejected).mean(),
    }


def _sums(per_token: Tensor, lengths: Sequence[int]) -> Tensor:
    # not index_add, which adds in any order on a GPU
    return torch.stack([part.sum() for part in per_token.split(lengths)])


def _log1mexp(x: Tensor) -> Tensor:
    return torch.log(-torch.expm1(x))
