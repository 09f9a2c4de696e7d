"""Time a small Mamba on the CPU: packed here, and transformers' own slow_forward.

Four layers of 256 channels, float32, a pack of documents with mean 128, training mode.
slow_forward runs the pack as one row and resets nothing. Its backward takes time quadratic in the
tokens, minutes at 4,096, so backwards are compared on fewer unless asked for; the packed one is
timed at full size too.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.testing import lognormal_lengths, relative_rms

VOCAB = 512


def make_model() -> MambaForCausalLM:
    """Build the model, the same weights every time."""
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=256, state_size=16, num_hidden_layers=4, use_cache=False
    )
    return MambaForCausalLM(config).train()


def make_tokens(total: int) -> Tensor:
    """Draw token ids, ``(1, total)``."""
    return torch.randint(VOCAB, (1, total), generator=torch.Generator().manual_seed(0))


def check(slow: MambaForCausalLM, packed: MambaForCausalLM) -> None:
    """Check that logits and gradients of a pack are those of its documents alone."""
    lengths = [5, 1, 40, 18]
    input_ids = make_tokens(sum(lengths))
    with PackedLayout.from_lengths(lengths).published():
        actual = packed(input_ids).logits
        actual.square().sum().backward()
    expected = [slow(document).logits for document in input_ids.split(lengths, dim=1)]
    for logits in expected:
        logits.square().sum().backward()
    errors = {"logits": relative_rms(actual.detach(), torch.cat(expected, dim=1).detach())}
    for (name, parameter), other in zip(packed.named_parameters(), slow.parameters()):
        errors[name] = relative_rms(parameter.grad, other.grad)
    worst = max(errors, key=errors.get)
    if not errors[worst] < 1e-4:
        raise RuntimeError(f"packed must equal documents alone, got {errors[worst]:.1e} in {worst}")
    packed.zero_grad()
    slow.zero_grad()


def timed(function: Callable, *args: object, **kwargs: object) -> tuple[float, object]:
    """Return milliseconds and the result."""
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return (time.perf_counter() - start) * 1e3, result


class MixerClock:
    """Sums what the mixers of a model take, ``slow_forward`` itself and what stands in for it."""

    def __init__(self, model: MambaForCausalLM) -> None:
        self.milliseconds = 0.0
        self._hooks = []
        for layer in model.backbone.layers:
            self._hooks.append(layer.mixer.register_forward_pre_hook(self._start))
            self._hooks.append(layer.mixer.register_forward_hook(self._stop))

    def remove(self) -> None:
        """Leave the model alone."""
        for hook in self._hooks:
            hook.remove()

    def _start(self, *_: object) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_: object) -> None:
        self.milliseconds += (time.perf_counter() - self._started) * 1e3


def measure(
    models: dict[str, MambaForCausalLM],
    total: int,
    repeats: int,
    *,
    warm_ups: int = 1,
    slow_backward: bool,
) -> dict[str, tuple[float, float, float | None]]:
    """Run a way after the other, ``repeats`` times after the warm-ups.

    Returns:
        Median milliseconds of forward, of its mixers, and of backward, by way.
    """
    input_ids = make_tokens(total)
    layout = PackedLayout.from_lengths(lognormal_lengths(total, scale=128 / 594))
    medians = {}
    for way, model in models.items():
        forwards, mixers, backwards = [], [], []
        clock = MixerClock(model)
        for _ in range(warm_ups + repeats):
            clock.milliseconds = 0.0
            with layout.published():
                forward, output = timed(model, input_ids, labels=input_ids)
                forwards.append(forward)
                mixers.append(clock.milliseconds)
                if way == "packed" or slow_backward:
                    backward, _ = timed(output.loss.backward)
                    backwards.append(backward)
            # freed here, so that the next run does not pay for it
            output = None
            model.zero_grad()
        clock.remove()
        medians[way] = tuple(_median(times[warm_ups:]) for times in (forwards, mixers, backwards))
    return medians


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 1) if values else None


def main(argv: list[str] | None = None) -> int:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of the pack")
    parser.add_argument("--backward-tokens", type=int, default=512, help="where both go backward")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print a line of JSON a way")
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    models = {"slow_forward": make_model(), "packed": make_model()}
    dispatch_packed(models["packed"])
    check(models["slow_forward"], models["packed"])
    # the first few still ask the system for memory, which then stays with the process
    whole = measure(models, args.tokens, args.repeats, warm_ups=4, slow_backward=False)
    part = measure(models, args.backward_tokens, 1, slow_backward=True)
    rows = [
        {
            "way": way,
            "threads": args.threads,
            "tokens": args.tokens,
            "forward_ms": whole[way][0],
            "mixers_forward_ms": whole[way][1],
            "backward_ms": whole[way][2],
            "short_tokens": args.backward_tokens,
            "short_backward_ms": part[way][2],
        }
        for way in models
    ]
    if args.json:
        print("\n".join(map(json.dumps, rows)))
        return 0
    parts = ("forward_ms", "mixers_forward_ms", "backward_ms", "short_backward_ms")
    short = f"on {args.backward_tokens:,} tokens"
    table = Table("way", "forward ms", "of which mixers", "backward ms", short)
    for row in rows:
        cells = (row[part] for part in parts)
        table.add_row(row["way"], *("-" if ms is None else f"{ms:,.0f}" for ms in cells))
    slow, packed = rows
    ratios = (slow[part] and slow[part] / packed[part] for part in parts)
    table.add_row("times faster", *("" if ratio is None else f"{ratio:.1f}" for ratio in ratios))
    Console().print(
        f"{args.tokens:,} tokens, {args.threads} threads, torch {torch.__version__}", table
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
