"""Train a few dozen steps on one batch of a short, a middle and a long document, and check it.

CONFIG is what `xtuner train` takes. Its data, tokenizer, model, optimizer and boundary hook are
used, its learning rate without the schedule; nothing is saved. Exits with 1 if a check failed,
with 2 if one could not run, and with 0 if not.
"""

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from statistics import fmean

from mmengine.runner import set_random_seed
from rich.console import Console

from xtuner_mamba.tools.checkup import Finding, exit_code, run_checks, summary_of, table_of
from xtuner_mamba.tools.label_checks import (
    check_first_tokens,
    check_label_places,
    check_padding,
    check_padding_labels,
    check_prompts,
)
from xtuner_mamba.tools.model_checks import check_state_leak
from xtuner_mamba.tools.training import Training

# share of the loss that must be gone after the steps: little is enough, since rates of fine-tuning
# are low, and nothing else changes the loss of one batch
_CLEAR_FALL = 0.001
# losses whose mean is the loss after the steps
_NUM_LAST = 3


def main(argv: list[str] | None = None) -> int:
    """Run the checks, and print a table or JSON."""
    args = _parse_args(argv)
    set_random_seed(0)
    # what libraries and the config's own code print is no result
    with redirect_stdout(sys.stderr):
        try:
            training = Training(args.config)
            if training.refusal is not None:
                raise ValueError(training.refusal)
        except (ValueError, OSError, ImportError) as error:
            print(f"{args.config}: {error}")
            return 2
        steps = Steps(training, args.steps)
        results = run_checks(
            {
                "padding": partial(check_padding, training),
                "label places": partial(check_label_places, training),
                "padding labels": partial(check_padding_labels, training),
                "prompt labels": partial(check_prompts, training),
                "first tokens": partial(check_first_tokens, training),
                "leak test": partial(check_state_leak, training),
                "loss falls": steps.check_loss,
                "gradients finite": steps.check_gradients,
            }
        )
    if args.json:
        found = [asdict(result) for result in results]
        print(json.dumps({"checks": found, "losses": steps.losses}, indent=2))
    else:
        console = Console()
        console.print(table_of(results, f"{args.config}: a batch of three documents"))
        for result in results:
            if result.remedy:
                console.print(f"{result.check}: {result.remedy}", highlight=False)
        console.print(summary_of(results), highlight=False)
    return exit_code(results)


class Steps:
    """Optimizer steps on one batch, and what came of them.

    Args:
        training: Whose batch, model and optimizer.
        count: Of steps.
    """

    losses: list[float]
    """Before each step."""

    def __init__(self, training: Training, count: int) -> None:
        self._training, self._count = training, count
        self.losses, self._are_finite = [], []

    def check_loss(self) -> Finding | str:
        """Take the steps, and check that they were of use."""
        self._take()
        first, last = self.losses[0], fmean(self.losses[-_NUM_LAST:])
        said = f"from {first:.3f} to {last:.3f} in {len(self.losses)} steps"
        if last < (1 - _CLEAR_FALL) * first:
            return said
        lr = self._training.optim_wrapper.optimizer.param_groups[0]["lr"]
        return Finding(
            f"{said}, on a batch that could be learnt by heart",
            f"look at the lines below first; then at the learning rate, which is {lr:g}, and at "
            "what is frozen",
            "lr",
        )

    def check_gradients(self) -> Finding | str:
        """Check the gradients of the steps that :meth:`check_loss` took."""
        if not self._are_finite:
            raise RuntimeError("no step was taken")
        count = len(self._are_finite)
        # a loss scale may have to come down at first
        if all(self._are_finite[count // 2 :]):
            return f"in {sum(self._are_finite)} of {count} steps"
        return Finding(
            f"gradients are not finite in step {self._are_finite.index(False) + 1} of {count}",
            "lower the learning rate, clip gradients, or compute in bfloat16 instead of float16",
            "optim_wrapper",
        )

    def _take(self) -> None:
        training, wrapper = self._training, self._training.optim_wrapper
        model = training.model.train()
        for _ in range(self._count):
            # as BaseModel.train_step, with a look at the gradients in between
            with training.fed(training.batch.collated) as fed:
                with wrapper.optim_context(model):
                    losses = model(**fed, mode="loss")
                loss, _ = model.parse_losses(losses)
                wrapper.backward(wrapper.scale_loss(loss))
            self.losses.append(loss.item())
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            self._are_finite.append(all(bool(g.isfinite().all()) for g in gradients))
            # only a loss scale gets over it
            if not self._are_finite[-1] and not hasattr(wrapper, "loss_scaler"):
                break
            wrapper.step()
            wrapper.zero_grad()


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="xtuner-mamba smoke", description=__doc__)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--steps", type=int, default=40, help="to train (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    return args
