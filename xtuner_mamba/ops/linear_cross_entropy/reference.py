"""Cross entropy of a linear head in plain PyTorch: the definition."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner_mamba.layout import IGNORE_INDEX


def linear_cross_entropy_reference(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """See :func:`xtuner_mamba.ops.linear_cross_entropy`."""
    logits = F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
