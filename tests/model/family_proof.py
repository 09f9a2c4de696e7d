"""What is measured of a family: a tiny model on packs against the same on each document alone."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.model.loss import packed_token_loss
from xtuner_mamba.testing import relative_rms

# longer than a window of 4, one token, shorter than a filter of 4, longer than a chunk of 8
LENGTHS = (5, 17, 1, 2, 9)


@dataclass(frozen=True)
class Proof:
    """What a family's tiny model showed."""

    layers: dict[str, int]
    """Dispatched layers by class."""
    logits_error: float
    """Relative rms against each document alone."""
    gradient_error: float
    """The largest of all parameters."""
    leak: float
    """Error of the logits if the row were one document: what isolation spares."""
    changed: float
    """Largest relative change of other documents when one is overwritten; 0 is: not a bit."""
    has_experts: bool
    """Whether layers multiply as many rows at once as were routed to them, which rounds them."""


class InFloat64(TorchFunctionMode):
    """Turns casts to float32 into casts to float64.

    transformers rounds norms, decays and logits to float32 in models of every dtype, which would
    hide an error of ours below 1e-6.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run a function of PyTorch with another dtype."""
        if func is Tensor.float:
            func = Tensor.double
        if any(isinstance(arg, Tensor) for arg in args):
            args = [torch.float64 if arg is torch.float32 else arg for arg in args]
            kwargs = {
                name: torch.float64 if value is torch.float32 else value
                for name, value in (kwargs or {}).items()
            }
        return func(*args, **(kwargs or {}))


def prove(build: Callable[[], PreTrainedModel]) -> Proof:
    """Measure a family in float64 on the CPU."""
    alone = make(build, torch.float64)
    packed, layers = dispatched(alone)
    tokens = draw_tokens(alone.config.vocab_size)
    layout = PackedLayout.from_lengths(LENGTHS)

    with InFloat64():
        expected, gradients = run_alone(alone, tokens)
        logits, actual = run_packed(packed, tokens, layout)
        with torch.no_grad(), PackedLayout.from_lengths([layout.total]).published():
            leaking = packed(tokens).logits
    assert actual.keys() == gradients.keys()
    return Proof(
        layers=layers,
        logits_error=_error(logits, expected),
        gradient_error=max(_error(actual[name], gradients[name]) for name in gradients),
        leak=_error(leaking, expected),
        changed=largest_change_elsewhere(build),
        has_experts=any(name.endswith("experts") for name, _ in alone.named_modules()),
    )


def make(
    build: Callable[[], PreTrainedModel], dtype: torch.dtype, seed: int = 0
) -> PreTrainedModel:
    """Build a model whose every parameter matters."""
    torch.manual_seed(seed)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype)


def dispatched(model: PreTrainedModel) -> tuple[PreTrainedModel, dict[str, int]]:
    """Return a dispatched copy, and how many layers of which class that changed."""
    model = copy.deepcopy(model)
    return model, dispatch_packed(model).counts


def draw_tokens(vocab_size: int) -> Tensor:
    """Draw a row of tokens, ``(1, total)``."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (1, sum(LENGTHS)), generator=draw)


def run_packed(
    model: PreTrainedModel, tokens: Tensor, layout: PackedLayout
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of a row, and the gradient of its mean loss by every parameter that has one."""
    model.zero_grad()
    with layout.published():
        logits = model(tokens).logits
        packed_token_loss(logits, tokens, layout).backward()
    return logits.detach(), _gradients(model)


def run_alone(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Run each document alone through transformers, as :func:`run_packed` runs their row."""
    model.zero_grad()
    logits, total = [], 0.0
    for document in tokens.split(list(LENGTHS), dim=1):
        logits.append(model(document).logits)
        total = total + F.cross_entropy(logits[-1][0, :-1], document[0, 1:], reduction="sum")
    (total / (tokens.numel() - len(LENGTHS))).backward()
    return torch.cat(logits, dim=1).detach(), _gradients(model)


def largest_change_elsewhere(build: Callable[[], PreTrainedModel]) -> float:
    """Overwrite each document's embeddings in turn, also with NaN, and look at the others.

    Returns:
        The largest relative change of their logits, loss or gradients; infinity for NaN.
    """
    model, _ = dispatched(make(build, torch.float32))
    layout = PackedLayout.from_lengths(LENGTHS)
    draw = torch.Generator().manual_seed(1)
    embeds = torch.randn(1, layout.total, model.config.hidden_size, generator=draw)
    largest = 0.0
    for victim in range(len(LENGTHS)):
        others = layout.seq_idx[0] != victim
        before = _seen_by(others, model, embeds, layout)
        for value in (0.5, torch.nan):
            overwritten = embeds.clone()
            overwritten[:, ~others] = value
            after = _seen_by(others, model, overwritten, layout)
            for actual, expected in zip(after, before):
                if not torch.equal(actual, expected):
                    largest = max(largest, _error(actual, expected))
    return largest


def _seen_by(
    tokens: Tensor, model: PreTrainedModel, embeds: Tensor, layout: PackedLayout
) -> tuple[Tensor, ...]:
    """Logits, loss and gradients of some tokens of a row."""
    embeds = embeds.clone().requires_grad_()
    labels = draw_tokens(model.config.vocab_size).masked_fill(~tokens, -100)
    with layout.published():
        logits = model(inputs_embeds=embeds).logits
        loss = packed_token_loss(logits, labels, layout)
        loss.backward()
    return logits[:, tokens].detach(), loss.detach(), embeds.grad[:, tokens]


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _error(actual: Tensor, expected: Tensor) -> float:
    error = relative_rms(actual, expected)
    # the larger of a number and NaN may be the number
    return torch.inf if math.isnan(error) else error
