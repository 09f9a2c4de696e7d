"""What the lengths of the documents do to a training: padding, exposure, steps of unequal size."""

from statistics import fmean, pstdev

from xtuner_mamba.dataset.length_advice import coarse_buckets, seldom_seen
from xtuner_mamba.engine.step_windows import count_targets, layout_of_batch
from xtuner_mamba.integration.config_parts import type_name
from xtuner_mamba.layout import IGNORE_INDEX
from xtuner_mamba.tools.checkup import Finding, NotApplicable
from xtuner_mamba.tools.log_checks import read_log
from xtuner_mamba.tools.training import Training

# standard deviation of a step's tokens, as a share of their mean, beyond which a learning rate
# means another thing in every step
_WIDE = 0.3
# share of the tokens in sequences of one length that makes them all of one length
_ALL = 0.9
# share of the tokens that may lie beyond max_length
_FEW = 0.05


def check_bucket_padding(training: Training) -> Finding | str:
    """Check that no bucket is a quarter padding, and say which boundary to add.

    Raises:
        NotApplicable: There are no buckets.
    """
    if not training.batch_sampler.get("boundaries"):
        raise NotApplicable("no buckets; `xtuner-mamba lengths` shows what they would pad")
    coarse = coarse_buckets(training.length_report)
    if not coarse:
        highest = max(bucket.padding for bucket in training.length_report.buckets)
        return f"at most {highest:.0%} of a bucket"
    shares = ", ".join(f"{bucket.padding:.0%} up to {bucket.boundary:,}" for bucket in coarse)
    cost = "; not computed, but batches are smaller for it" if training.uses_varlen else ""
    added = {bucket.best_split for bucket in coarse}
    return Finding(
        f"padding is {shares}{cost}",
        f"boundaries = {sorted({*training.batch_sampler['boundaries'], *added})}, with "
        f"{sorted(added)} added; or those of `xtuner-mamba lengths`, which pad least",
        "boundaries",
    )


def check_exposure(training: Training) -> Finding | str:
    """Check that no length is seen far less often than sampling by square roots would show it."""
    if training.batch_sampler.get("sampling") == "sqrt_tokens":
        return "buckets are drawn by the square root of their tokens"
    seldom = seldom_seen(training.length_report)
    if seldom:
        shares = ", ".join(
            f"{least:,} to {bucket.boundary:,} tokens are {bucket.natural:.1%} of the tokens "
            f"({bucket.sqrt_tokens:.1%} by square roots)"
            for least, bucket in seldom
        )
        return Finding(
            f"documents of {shares}",
            "batch_sampler = dict(type=BucketBatchSampler, boundaries=[...], "
            "sampling='sqrt_tokens'), if the model must be good at such lengths",
            "sampling" if "sampling" in training.batch_sampler else "train_dataloader",
        )
    share = min(bucket.natural / bucket.sqrt_tokens for bucket in training.length_report.buckets)
    return f"every length has at least {share:.0%} of the tokens that square roots would give it"


def check_trained_lengths(training: Training) -> Finding | str:
    """Check that the model trains on sequences as long, and as short, as the documents are."""
    if training.carries_states:
        return "documents of any length are carried from chunk to chunk"
    report = training.length_report
    lengths = [n for batch in training.first_batches for n in _sequence_lengths(batch["data"])]
    longest = max(lengths)
    of_longest = longest * lengths.count(longest) / sum(lengths)
    documents = training.lengths
    as_long = documents[documents >= longest].sum() / documents.sum()
    if of_longest > _ALL and as_long < _ALL / 2:
        return Finding(
            f"{of_longest:.0%} of the tokens are in sequences of {longest:,}, where documents have "
            f"{report.quantiles['min']:,} to {report.quantiles['max']:,}; inference on shorter "
            "ones will be worse",
            "train on documents as they are: packs (process_packed_dataset, packed_collate_fn) or "
            "buckets (process_document_dataset, padded_collate_fn)",
            "train_dataset",
        )
    dropped = training.too_long == "drop"
    # all of a document that is dropped, the rest of one that is cut
    beyond = (documents - (0 if dropped else training.max_length))[documents > training.max_length]
    beyond = beyond.sum() / documents.sum()
    if beyond > _FEW:
        return Finding(
            f"{beyond:.0%} of the tokens are beyond max_length={training.max_length:,}, up to "
            f"{report.quantiles['max']:,}: nothing so long is trained on",
            "raise max_length as far as memory allows, and measure longer inputs with "
            "LengthExtrapolationHook from xtuner_mamba.engine.hooks",
            "max_length",
        )
    return f"sequences of {min(lengths):,} to {longest:,} tokens"


def check_step_tokens(training: Training) -> Finding | str:
    """Check that optimizer steps have about as many target tokens.

    Raises:
        NotApplicable: There are not two steps.
    """
    settings = training.cfg.optim_wrapper
    if type_name(settings) == "TokenAccumulationOptimWrapper":
        return _check_logged_steps(training, settings.tokens_per_step)
    counts = [_count_targets(batch["data"]) for batch in training.first_batches]
    micro_steps = settings.get("accumulative_counts", 1)
    steps = [
        sum(counts[first : first + micro_steps])
        for first in range(0, len(counts) - micro_steps + 1, micro_steps)
    ]
    if len(steps) < 2:
        raise NotApplicable(f"{len(counts)} batches make no two optimizer steps")
    mean, spread = fmean(steps), pstdev(steps)
    said = f"{mean:,.0f} target tokens a step, {spread / mean:.0%} more or less"
    if spread <= _WIDE * mean:
        return said
    return Finding(
        f"{said} ({min(steps):,} to {max(steps):,})",
        f"optim_wrapper = dict(type=TokenAccumulationOptimWrapper, tokens_per_step={mean:.0f}, ...)"
        " and train_cfg = dict(type=TokenStepLoop, max_iters=...) from xtuner_mamba.engine",
        "accumulative_counts",
    )


def _check_logged_steps(training: Training, tokens_per_step: int) -> Finding | str:
    log = [] if training.work_dir is None else read_log(training.work_dir)
    logged = [entry for entry in log if "tokens_per_step_std" in entry]
    if not logged:
        return f"every step has at least {tokens_per_step:,} target tokens"
    mean, spread = logged[-1]["tokens_per_step"], logged[-1]["tokens_per_step_std"]
    said = f"{mean:,.0f} target tokens a step, {spread / mean:.0%} more or less, says the log"
    if spread <= _WIDE * mean:
        return said
    return Finding(
        said,
        f"raise tokens_per_step: one micro-batch can have as many as {tokens_per_step:,} targets",
        "tokens_per_step",
    )


def _sequence_lengths(data: dict) -> list[int]:
    """Return the tokens of each sequence that the model starts without a state."""
    if "cumulative_len" in data:
        return list(layout_of_batch(data).lengths)
    mask = data.get("attention_mask")
    batch, seqlen = data["input_ids"].shape
    return [seqlen] * batch if mask is None else mask.sum(dim=1).tolist()


def _count_targets(data: dict) -> int:
    if "cumulative_len" in data:
        return count_targets(data)
    return int((data["labels"][:, 1:] != IGNORE_INDEX).sum())
