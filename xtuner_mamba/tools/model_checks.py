"""What must hold of the model: documents stay apart, and nothing pulls at its dynamics."""

import math
from collections.abc import Callable
from itertools import accumulate, pairwise, product, starmap

import numpy as np
import torch
from torch import Tensor
from xtuner.utils.device import get_device

from xtuner_mamba.demo.checks import LeakTest
from xtuner_mamba.engine.optim import NO_DECAY
from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.tools.checkup import Finding, NotApplicable
from xtuner_mamba.tools.sample_batch import SampleBatch
from xtuner_mamba.tools.training import Training


def check_boundary_hook(training: Training) -> Finding | str:
    """Check that a hook tells the model where documents start.

    Raises:
        NotApplicable: The config does not tell the model.
    """
    names = [type(hook).__name__ for hook in training.boundary_hooks]
    if not training.uses_varlen and names:
        return Finding(
            f"use_varlen_attn is False, and {names[0]} has none to publish",
            "take it out of custom_hooks, or set use_varlen_attn = True",
            "custom_hooks",
        )
    if not training.uses_varlen:
        raise NotApplicable("use_varlen_attn is False: the model is told no boundaries")
    if not names:
        return Finding(
            "use_varlen_attn is True, and no hook of custom_hooks publishes boundaries",
            "add dict(type=PackedLayoutHook) from xtuner_mamba.engine.hooks to custom_hooks",
            "custom_hooks",
        )
    return f"{names[0]} publishes boundaries"


def check_state_leak(training: Training) -> Finding | str:
    """Check that no document of a batch changes another one, to the last bit."""
    batch = training.batch
    found = run_leak_test(training, batch)
    if found.changed:
        return Finding(
            f"in {found.changed} of {2 * len(batch.places) * (len(batch.places) - 1)} trials a "
            "document changed when another one of its row did",
            "tell the model the boundaries: use_varlen_attn = True, "
            "collate_fn=dict(type=packed_collate_fn) and dict(type=PackedLayoutHook); or give "
            "each document a row of its own with process_document_dataset",
            "collate_fn" if training.uses_varlen else "use_varlen_attn",
        )
    if not found.passed:
        raise RuntimeError(
            "a leak must be seen where documents are run as one, got none; the test shows nothing"
        )
    return (
        f"no document changed another one ({found.changed_without_boundaries} changed when run "
        "as a single one)"
    )


def check_weight_decay(training: Training) -> Finding | str:
    """Check that the optimizer leaves the parameters of the dynamics where they are.

    Raises:
        NotApplicable: None of them trains.
    """
    names = {parameter: name for name, parameter in training.model.named_parameters()}
    decays = {
        names[parameter]: group["weight_decay"]
        for group in training.optim_wrapper.optimizer.param_groups
        for parameter in group["params"]
        if names[parameter].rpartition(".")[2] in NO_DECAY
    }
    if not decays:
        raise NotApplicable(f"no {' or '.join(NO_DECAY)} trains")
    wrong = {name: decay for name, decay in decays.items() if decay}
    if wrong:
        return Finding(
            f"weight decay of {max(wrong.values()):g} on {len(wrong)} of {len(decays)} parameters "
            f"of the dynamics, such as {next(iter(wrong))}",
            "optim_wrapper = dict(..., constructor=MambaOptimWrapperConstructor) from "
            "xtuner_mamba.engine, without paramwise_cfg",
            "optim_wrapper",
        )
    return f"none on {len(decays)} parameters {' and '.join(NO_DECAY)}"


@torch.no_grad()
def run_leak_test(training: Training, batch: SampleBatch) -> LeakTest:
    """Replace one document at a time by other values and by NaN, and compare the others bitwise.

    Goes the way of training: the batch as it was collated, boundaries from the config's hooks. To
    show that the test can fail, the documents are run as a single one, too.

    Raises:
        ValueError: The model computes no numbers.
    """
    model, autocast = training.model.eval(), training.optim_wrapper.optim_context
    device = get_device()
    embed = model.llm.get_input_embeddings()

    def run_as_trained(embeddings: Tensor) -> Tensor:
        with training.fed(batch.collated) as fed, autocast(model):
            others = {k: v for k, v in fed["data"].items() if k not in ("input_ids", "labels")}
            return model.llm(inputs_embeds=embeddings, use_cache=False, **others).logits

    def run_as_one(embeddings: Tensor) -> Tensor:
        layout = PackedLayout.from_lengths([embeddings.shape[1]]).to(device)
        with layout.published(), autocast(model):
            return model.llm(inputs_embeds=embeddings, use_cache=False).logits

    together = torch.from_numpy(np.concatenate(batch.documents))[None]
    ends = list(accumulate(batch.lengths, initial=0))
    return LeakTest(
        changed=_count_changed(
            run_as_trained, embed(batch.data["input_ids"].to(device)), batch.places
        ),
        changed_without_boundaries=_count_changed(
            run_as_one, embed(together.to(device)), list(starmap(slice, pairwise(ends)))
        ),
    )


def _count_changed(run: Callable[[Tensor], Tensor], embeddings: Tensor, places: list[slice]) -> int:
    before = run(embeddings).flatten(0, 1)
    if not before.isfinite().all():
        raise ValueError(
            f"logits must be finite, got {int((~before.isfinite()).sum())} that are not; look at "
            "the weights, and at the dtype of the forward"
        )
    changed = 0
    for victim, value in product(places, (0.5, math.nan)):
        poisoned = embeddings.clone()
        poisoned.flatten(0, 1)[victim] = value
        after = run(poisoned).flatten(0, 1)
        changed += sum(
            not torch.equal(before[place], after[place]) for place in places if place != victim
        )
    return changed
