"""Model FLOPs of a training step of Mamba, as a number a token."""

from itertools import chain

from torch import nn

from xtuner_mamba.model.dispatch import token_mixers

_MIXERS = {"MambaMixer", "FalconMambaMixer"}


def training_flops_per_token(llm: nn.Module) -> int | None:
    """Count the FLOPs that a token costs, forward and backward, in a model of Mamba-1 mixers.

    A multiplication, an addition and an exponential are one FLOP each. A linear layer has one
    product and one sum for every weight::

        forward    2 in out
        backward   2 in out for its input, and as many for its weight, if that is trained

    The depthwise conv has ``width`` products and sums for each of ``dim`` channels: forward
    ``2 width dim``, backward the same twice. The scan has for each of ``dim * dstate`` states::

        forward    a = exp(dt A)                  2
                   h = a h + (dt x) B             3
                   y = sum over states of C h     2     = 7
        backward   dC = sum dy h                  2
                   dh += dy C                     2
                   dB = sum dh (dt x)             2
                   d(dt x) = sum dh B             2
                   g = dh h_prev a                2
                   d(dt) += sum g A               2
                   dA += g dt                     1
                   dh_prev = a dh                 1     = 14

    Left out is what has no second dimension to sum over: norms, activations, gates, ``D``, the
    embedding, softmax and optimizer. So is what activation checkpointing computes again: these
    are the FLOPs of the model, not of the machine.

    Args:
        llm: A Hugging Face model, also wrapped by PEFT.

    Returns:
        FLOPs of a token that is no padding; ``None`` for a model with other token mixers.
    """
    found = token_mixers(llm)
    if not found or not set(found) <= _MIXERS:
        return None
    flops = 0
    for module in llm.modules():
        if isinstance(module, nn.Linear):
            times = 2 + module.weight.requires_grad
            flops += times * 2 * module.in_features * module.out_features
    for mixer in chain.from_iterable(found.values()):
        dim, width = mixer.intermediate_size, mixer.conv_kernel_size
        flops += 3 * 2 * width * dim + 3 * 7 * dim * mixer.ssm_state_size
    return flops
