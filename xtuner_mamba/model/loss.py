"""The token-weighted loss of a packed batch, without its logits where the model can."""

import functools

import torch
import torch.nn.functional as F
from mmengine import print_log
from torch import Tensor, nn

from xtuner_mamba.layout import IGNORE_INDEX, PackedLayout
from xtuner_mamba.model.dispatch.mamba import is_partitioned
from xtuner_mamba.model.dispatch.mamba_lm import mamba_causal_lm_forward


def packed_loss(
    llm: nn.Module,
    inputs: dict,
    labels: Tensor,
    layout: PackedLayout,
    mean_targets: Tensor | None = None,
    *,
    fuse: bool | None = None,
) -> Tensor:
    """Run a dispatched model and return the batch's share of the step's mean token loss.

    Args:
        llm: The model.
        inputs: What it takes, but for the labels.
        labels: As in :func:`packed_token_loss`, as are ``layout`` and ``mean_targets``.
        layout: See there.
        mean_targets: See there.
        fuse: Compute the loss from the last hidden states, a slice of tokens at a time. ``None``
            stands for "on a GPU". A model that cannot gets the loss of its logits, and the log
            says why.
    """
    if labels.is_cuda if fuse is None else fuse:
        obstacle = _obstacle(llm)
        if obstacle is None:
            targets = layout.targets(labels)
            return _mean(llm(**inputs, targets=targets).loss, targets, mean_targets)
        _say_once(f"Loss from the whole logits, more memory and slower: {obstacle}")
    return packed_token_loss(llm(**inputs).logits, labels, layout, mean_targets)


def packed_token_loss(
    logits: Tensor, labels: Tensor, layout: PackedLayout, mean_targets: Tensor | None = None
) -> Tensor:
    """Sum the cross entropy over the target tokens and divide by the step's mean target count.

    Averaged over the step's micro-batches and ranks, as MMEngine and DeepSpeed do, this is the
    mean over every target token of the optimizer step.

    Args:
        logits: ``(batch, seqlen, vocab)``.
        labels: Int64, ``(batch, seqlen)``, not shifted, -100 where there is no target.
        layout: Boundaries of the batch.
        mean_targets: Targets of a micro-batch, averaged over the optimizer step, ``()``. ``None``
            stands for the targets of this batch.
    """
    targets = layout.targets(labels)
    total = F.cross_entropy(
        logits.flatten(0, -2), targets, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return _mean(total, targets, mean_targets)


def _mean(total: Tensor, targets: Tensor, mean_targets: Tensor | None) -> Tensor:
    if mean_targets is None:
        mean_targets = (targets != IGNORE_INDEX).sum().clamp(min=1)
    return total / mean_targets


def _obstacle(llm: nn.Module) -> str | None:
    """Say why the loss cannot read the head's weight, ``None`` if it can."""
    base = llm.get_base_model() if hasattr(llm, "get_base_model") else llm
    if getattr(base.forward, "func", None) is not mamba_causal_lm_forward:
        return f"{type(base).__name__} has no forward that leaves the logits out"
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return f"the head must be a linear layer without bias, got {head}"
    if is_partitioned(head.weight):
        return "ZeRO-3 gathers the head for its own forward only"
    if "forward" in head.__dict__ or head._forward_hooks or head._forward_pre_hooks:
        return "the head has hooks, which only its own forward runs"
    if head.weight.is_cuda and head.weight.dtype == torch.float64:
        return "the kernels take no float64"
    return None


@functools.cache
def _say_once(message: str) -> None:
    print_log(message, "current")
