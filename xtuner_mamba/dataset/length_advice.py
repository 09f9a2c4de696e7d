"""Which scheme fits a corpus, and why, in sentences with the numbers that decide it."""

from dataclasses import dataclass

from xtuner_mamba.dataset.lengths import (
    CHUNKS,
    OPTIMAL,
    OWN,
    PACKED,
    POWERS,
    Bucket,
    LengthReport,
    Scheme,
    choose_bucket_count,
)

# share of unused places below which packing needs no second thought
_FULL_ENOUGH = 0.05
# least difference between shares of unused places that is told
_SHOWN = 0.001
# share of padding above which a bucket is too coarse
COARSE = 0.25
# a bucket whose share of tokens the square root raises so many times is seldom seen otherwise
_SELDOM = 3


@dataclass(frozen=True)
class Advice:
    """A scheme, its reason, and what else the lengths call for."""

    scheme: str
    """``"packed"`` or ``"bucket"``, as in the names of the templates."""
    boundaries: tuple[int, ...]
    """The optimal ones that pay, for whoever chooses buckets."""
    reason: str
    notes: list[str]


def advise(report: LengthReport) -> Advice:
    """Recommend a scheme for a corpus."""
    packed, bucketed = report.scheme(PACKED), _best_buckets(report)
    count = len(bucketed.boundaries)
    unused = f"{packed.padding:.1%} of their places unused"
    if packed.padding - report.unused_but_last >= _SHOWN:
        unused += f" ({report.unused_but_last:.1%} but for the last one, which nothing could fill)"
    if report.unused_but_last <= max(_FULL_ENOUGH, bucketed.padding):
        chosen = "packed"
        reason = (
            f"packs leave {unused} and cut no document that fits; {count} optimal buckets pad "
            f"{bucketed.padding:.1%}, powers of two {report.scheme(POWERS).padding:.1%}. Every "
            "step has about as many tokens"
        )
    else:
        chosen = "bucket"
        reason = (
            f"packs would leave {unused}, since few documents fit beside one another in "
            f"{report.max_length:,} tokens; {count} optimal buckets pad {bucketed.padding:.1%}. "
            "With a max_length of many documents packs would be full"
        )
    notes = [
        *_long_documents(report),
        *(
            f"the bucket up to {bucket.boundary:,} is {bucket.padding:.0%} padding; the boundary "
            f"that spares most in it is {bucket.best_split:,}"
            for bucket in coarse_buckets(report)
        ),
        *(
            f"documents of {least:,} to {bucket.boundary:,} tokens are {bucket.natural:.1%} of the "
            f"tokens; sampling='sqrt_tokens' of BucketBatchSampler makes them "
            f"{bucket.sqrt_tokens:.1%}, if the model must be good at such lengths"
            for least, bucket in seldom_seen(report)
        ),
    ]
    return Advice(chosen, bucketed.boundaries, reason, notes)


def _best_buckets(report: LengthReport) -> Scheme:
    prefix = OPTIMAL.format("")
    optimal = [scheme for scheme in report.schemes if scheme.name.startswith(prefix)]
    return optimal[choose_bucket_count([scheme.padding for scheme in optimal]) - 1]


def _long_documents(report: LengthReport) -> list[str]:
    if not report.long_documents:
        return []
    longest = (
        f"The longest has {report.quantiles['max']:,}: raise max_length as far as memory allows"
    )
    fate = {
        "drop": f"dropped. {longest}",
        "truncate": f"truncated. {longest}",
        "error": "refused. Raise max_length, or let too_long be 'split' or 'drop'",
        "split": "cut, so that what comes after a cut is read without what came before. "
        f"{longest} (fixed chunks would cut {report.scheme(CHUNKS).num_split:,} documents)",
    }
    return [
        f"{report.long_documents:,} documents with {report.long_tokens / report.tokens:.1%} of the "
        f"tokens are longer than max_length={report.max_length:,} and are {fate[report.too_long]}"
    ]


def coarse_buckets(report: LengthReport) -> list[Bucket]:
    """Return those of the user's buckets that are padding for more than a quarter."""
    if not any(scheme.name == OWN for scheme in report.schemes):
        return []
    return [
        bucket
        for bucket in report.buckets
        if bucket.padding > COARSE and bucket.best_split is not None
    ]


def seldom_seen(report: LengthReport) -> list[tuple[int, Bucket]]:
    """Return buckets seen far more often if drawn by square roots, each with its least length."""
    lowest = [1, *(bucket.boundary + 1 for bucket in report.buckets)]
    return [
        (least, bucket)
        for least, bucket in zip(lowest, report.buckets)
        if bucket.sqrt_tokens > _SELDOM * bucket.natural
    ]
