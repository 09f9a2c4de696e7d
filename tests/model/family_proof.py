"""What is measured of a family: a tiny model on packs against the same on each document alone.

In float64 the two must be equal; in 16 bits, on a GPU, packs may err as transformers itself does.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.model.loss import packed_token_loss
from xtuner_mamba.testing import relative_rms

# of products of float32 by another count of rows, on any number of threads
ROUNDING = 2e-6
# longer than a window of 4, one token, shorter than a filter of 4, longer than a chunk of 8
LENGTHS = (5, 17, 1, 2, 9)
# a token more than chunks of 64 and of 128, one token, shorter than a filter, ragged; 16 on average
LONGER = (65, 129, 1, 3, 58)
# sizes that the kernels of a GPU take, whatever a config calls them
GPU_SIZES = dict(
    hidden_size=64,
    intermediate_size=128,
    state_size=16,
    time_step_rank=4,
    num_heads=4,
    head_dim=32,
    mamba_d_state=16,
    mamba_d_head=32,
    attention_hidden_size=128,
    attention_head_dim=32,
    # all of them: a choice would jump with the last bit of a router
    num_experts_per_tok=4,
)
# of the larger models' parameters: more of it, and 16 bits tell nothing of what went in
_SPREAD = 0.1
# models drawn: which of two right results is off by more is luck
_DRAWS = 3
_OPS = ("selective_scan", "ssd", "attention")
# of transformers: with kernels of a GPU where these are installed, and the definition is wanted
_KERNEL_USERS = ("bamba", "falcon_mamba", "mamba", "mamba2")


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


@dataclass(frozen=True)
class RoundedProof:
    """What a family's small model showed in 16 bits, beside transformers' own in 16 bits.

    Errors are relative rms against float64 on each document alone, and means over several models.
    """

    layers: dict[str, int]
    """Dispatched layers by class."""
    backends: dict[str, str]
    """What computed each op."""
    logits_error: float
    eager_logits_error: float
    """Of transformers, on each document alone."""
    worst: str
    """The parameter whose gradient errs most, compared with transformers."""
    gradient_error: float
    eager_gradient_error: float
    excess: float
    """How many times as much as transformers, or as one rounding if that is more, any result errs;
    logits too."""
    leak: float
    """Error of the logits if the row were one document: what isolation spares."""
    changed: float
    """Largest relative change of other documents when one is overwritten; 0 is: not a bit."""
    has_experts: bool


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
        has_experts=has_experts(alone),
    )


def prove_rounded(
    build: Callable[[], PreTrainedModel], dtype: torch.dtype, device: torch.device | str
) -> RoundedProof:
    """Measure a family in 16 bits, with sizes that the kernels of a GPU take."""
    build = partial(resized, build)
    errors, leaks, used = {}, [], {}
    layout = PackedLayout.from_lengths(LONGER).to(device)
    whole_row = PackedLayout.from_lengths([layout.total]).to(device)
    for seed in range(_DRAWS):
        eager = make(build, dtype, seed, _SPREAD).to(device)
        packed, layers = dispatched(eager)
        # the values of 16 bits, in float64
        oracle = copy.deepcopy(eager).double()
        tokens = draw_tokens(eager.config.vocab_size, LONGER).to(device)
        with _without_kernels(), InFloat64():
            exact = _flat(*run_alone(oracle, tokens, LONGER))
        with _without_kernels():
            alone = _flat(*run_alone(eager, tokens, LONGER))
        with backends_of(used):
            actual = _flat(*run_packed(packed, tokens, layout))
        assert actual.keys() == exact.keys()
        for name, value in exact.items():
            pair = _error(actual[name], value), _error(alone[name], value)
            errors.setdefault(re.sub(r"layers\.\d+", "layers", name), []).append(pair)
        with torch.no_grad(), whole_row.published():
            leaks.append(_error(packed(tokens).logits, exact["logits"]))
    # a correct rounding errs by a quarter of the last place
    rounding = torch.finfo(dtype).eps / 4
    means = {name: [sum(e) / len(e) for e in zip(*pairs)] for name, pairs in errors.items()}
    excess = {name: ours / max(theirs, rounding) for name, (ours, theirs) in means.items()}
    worst = max(excess.keys() - {"logits"}, key=excess.get)
    return RoundedProof(
        layers=layers,
        backends=used,
        logits_error=means["logits"][0],
        eager_logits_error=means["logits"][1],
        worst=worst,
        gradient_error=means[worst][0],
        eager_gradient_error=means[worst][1],
        excess=max(excess["logits"], excess[worst]),
        leak=min(leaks),
        changed=largest_change_elsewhere(build, dtype, LONGER, device),
        has_experts=has_experts(eager),
    )


def resized(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Build a family's model again, with the sizes of :data:`GPU_SIZES`."""
    model = build()
    config = copy.deepcopy(model.config)
    for name, size in GPU_SIZES.items():
        if hasattr(config, name):
            setattr(config, name, size)
    return type(model)(config)


@contextmanager
def backends_of(used: dict[str, str]) -> Iterator[None]:
    """Note which implementation of each op is called, by the op's name."""
    with ExitStack() as stack:
        for op in _OPS:
            api = import_module(f"xtuner_mamba.ops.{op}.api")

            def resolve(impl: str, *args, op: str = op, original: Callable = api._resolve):
                used[op] = impl
                return original(impl, *args)

            stack.enter_context(mock.patch.object(api, "_resolve", resolve))
        yield


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Let transformers compute in plain PyTorch, whatever is installed."""
    with ExitStack() as stack:
        for name in _KERNEL_USERS:
            module = import_module(f"transformers.models.{name}.modeling_{name}")
            stack.enter_context(mock.patch.object(module, "is_fast_path_available", False))
        yield


def has_experts(model: PreTrainedModel) -> bool:
    """Tell whether a router sends tokens to experts."""
    return any(name.endswith("experts") for name, _ in model.named_modules())


def make(
    build: Callable[[], PreTrainedModel], dtype: torch.dtype, seed: int = 0, spread: float = 0.3
) -> PreTrainedModel:
    """Build a model whose every parameter matters."""
    torch.manual_seed(seed)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    return model.to(dtype)


def dispatched(model: PreTrainedModel) -> tuple[PreTrainedModel, dict[str, int]]:
    """Return a dispatched copy, and how many layers of which class that changed."""
    model = copy.deepcopy(model)
    return model, dispatch_packed(model).counts


def draw_tokens(vocab_size: int, lengths: Sequence[int] = LENGTHS) -> Tensor:
    """Draw a row of tokens, ``(1, total)``."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (1, sum(lengths)), generator=draw)


def run_packed(
    model: PreTrainedModel, tokens: Tensor, layout: PackedLayout
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of a row, and the gradient of its mean loss by every parameter that has one."""
    model.zero_grad()
    with layout.published():
        logits = model(tokens).logits
        packed_token_loss(logits, tokens, layout).backward()
    return logits.detach(), _gradients(model)


def run_alone(
    model: PreTrainedModel, tokens: Tensor, lengths: Sequence[int] = LENGTHS
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run each document alone through transformers, as :func:`run_packed` runs their row."""
    model.zero_grad()
    logits, total = [], 0.0
    for document in tokens.split(list(lengths), dim=1):
        logits.append(model(document).logits)
        total = total + F.cross_entropy(logits[-1][0, :-1], document[0, 1:], reduction="sum")
    (total / (tokens.numel() - len(lengths))).backward()
    return torch.cat(logits, dim=1).detach(), _gradients(model)


def largest_change_elsewhere(
    build: Callable[[], PreTrainedModel],
    dtype: torch.dtype = torch.float32,
    lengths: Sequence[int] = LENGTHS,
    device: torch.device | str = "cpu",
) -> float:
    """Overwrite each document's embeddings in turn, also with NaN, and look at the others.

    Returns:
        The largest relative change of their logits, loss or gradients; infinity for NaN.
    """
    model, _ = dispatched(make(build, dtype).to(device))
    layout = PackedLayout.from_lengths(lengths).to(device)
    draw = torch.Generator().manual_seed(1)
    embeds = torch.randn(1, layout.total, model.config.hidden_size, generator=draw)
    embeds = embeds.to(device, dtype)
    largest = 0.0
    for victim in range(len(lengths)):
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
    labels = draw_tokens(model.config.vocab_size, layout.lengths).to(tokens.device)
    labels = labels.masked_fill(~tokens, -100)
    with layout.published():
        logits = model(inputs_embeds=embeds).logits
        loss = packed_token_loss(logits, labels, layout)
        loss.backward()
    return logits[:, tokens].detach(), loss.detach(), embeds.grad[:, tokens]


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _flat(logits: Tensor, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"logits": logits} | gradients


def _error(actual: Tensor, expected: Tensor) -> float:
    error = relative_rms(actual, expected)
    # the larger of a number and NaN may be the number
    return torch.inf if math.isnan(error) else error
