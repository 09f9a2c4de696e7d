"""Batches of documents of like length, padded to a boundary: what they hold and when they come."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from mmengine.logging import print_log
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import Sampler

from xtuner_mamba.dataset.arguments import bind_arguments, check_choice
from xtuner_mamba.dataset.batch_plan import (
    BatchPlan,
    check_inputs,
    resolve_inputs,
    warn_of_long_documents,
)
from xtuner_mamba.dataset.batch_sizes import choose_batch_sizes
from xtuner_mamba.dataset.curriculum import LengthCurriculum

# noise on lengths before they are sorted, as a share of the boundary: batch mates are alike, and
# others every epoch
_SPREAD = 0.25


@DATA_SAMPLERS.register_module()
class BucketBatchSampler(Sampler[list[int]]):
    """Batch documents whose lengths share a bucket, about as many tokens in every batch.

    Bucket ``b`` holds the documents that fit ``boundaries[b]`` and no smaller one, in batches of
    ``tokens_per_batch // boundaries[b]``, at least 1. A *step* is a batch a rank, all of the same
    bucket. The order is a pure function of the seed and the epoch, and every epoch has as many
    steps.

    In a config it is the ``batch_sampler``; ``lengths`` and ``seed`` then come from the dataset and
    the ``sampler`` of the dataloader, which has no other say.

    Args:
        lengths: Tokens of each document.
        boundaries: Rising; the last one must hold the longest document.
        tokens_per_batch: Places of a batch, on each rank.
        seed: The same on all ranks.
        shuffle: Whether each epoch draws other batches in another order. If not, buckets come from
            short to long, documents in order.
        sampling: ``"natural"`` visits every document once an epoch, in random order.
            ``"stratified"`` does so in an order in which every run of steps, such as those of an
            optimizer step, has its share of each bucket. ``"sqrt_tokens"`` draws as many steps,
            each bucket in proportion to the square root of its tokens, and each at least once.
        drop_last: Whether documents that fill no step are left out, other ones every epoch. If
            not, batches are smaller where they must be; and where a bucket has fewer documents
            than its steps have ranks, some come twice.
        num_replicas: Data-parallel ranks; the process group's by default.
        rank: Of this process among them.
        batch_sizes: Documents of a full batch of each bucket, in place of ``tokens_per_batch``: a
            number a boundary, or the file that ``xtuner-mamba probe-batch`` writes.
        sampler: MMEngine's; see above.
        batch_size: MMEngine's; must be 1.

    Raises:
        ValueError: An argument cannot be met.
    """

    def __init__(
        self,
        lengths: Sequence[int] | None = None,
        boundaries: Sequence[int] = (),
        tokens_per_batch: int = 16_000,
        seed: int | None = None,
        shuffle: bool = True,
        sampling: Literal["natural", "sqrt_tokens", "stratified"] = "natural",
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        batch_sizes: Sequence[int] | str | None = None,
        sampler: Any = None,
        batch_size: int | None = None,
    ) -> None:
        _check_options(shuffle=shuffle, sampling=sampling, drop_last=drop_last)
        inputs = resolve_inputs(
            lengths,
            tokens_per_batch=tokens_per_batch,
            seed=seed,
            num_replicas=num_replicas,
            rank=rank,
            sampler=sampler,
            batch_size=batch_size,
        )
        self.lengths, self.seed = inputs.lengths, inputs.seed
        self.num_replicas, self.rank = inputs.num_replicas, inputs.rank
        self.shuffle, self.sampling, self.drop_last = shuffle, sampling, drop_last
        self.boundaries = check_boundaries(boundaries)
        """Int64, ``(num_buckets,)``."""
        self.batch_sizes = choose_batch_sizes(self.boundaries, tokens_per_batch, batch_sizes)
        """Documents of a full batch of each bucket, int64, ``(num_buckets,)``."""
        bucket_of = assign_buckets(self.lengths, self.boundaries)
        self._members = [np.flatnonzero(bucket_of == b) for b in range(len(self.boundaries))]
        counts = np.bincount(bucket_of, minlength=len(self.boundaries))
        warn_of_long_documents(self.boundaries[bucket_of], tokens_per_batch)
        step_sizes = self.batch_sizes * self.num_replicas
        self._num_steps = counts // step_sizes if drop_last else -(-counts // step_sizes)
        if not self._num_steps.any():
            raise ValueError(
                f"a bucket must fill a batch on each of {self.num_replicas} ranks with drop_last, "
                f"got {counts.tolist()} documents where {step_sizes.tolist()} are needed; set "
                "drop_last=False, or use smaller batches"
            )
        self.curriculum: LengthCurriculum | None = None
        """What ``LengthCurriculumHook`` sets."""
        # MMEngine's loop tells the epoch to batch_sampler.sampler
        self.sampler, self.epoch = self, 0
        # rows of a batch, which MMEngine asks for on behalf of DeepSpeed
        self.batch_size = 1
        print_log(self._describe(counts), logger="current")

    def __len__(self) -> int:
        return int(self._num_steps.sum())

    def __iter__(self) -> Iterator[list[int]]:
        # drawn now: the epoch changes while a loader still fetches
        plan = self._draw(self.epoch)
        if self.curriculum is not None:
            plan = plan.reorder(self.curriculum, self.epoch, self.lengths, self.num_replicas)
        return plan.of_rank(self.rank, self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Choose what the next iteration draws."""
        self.epoch = epoch

    def _draw(self, epoch: int) -> BatchPlan:
        rng = np.random.default_rng((self.seed, epoch if self.shuffle else 0))
        num_steps = self._num_steps
        if self.sampling == "sqrt_tokens":
            tokens = [self.lengths[members].sum() for members in self._members]
            num_steps = share_steps(self._num_steps, np.array(tokens), rng.random())
        documents, sizes, steps = [], [], []
        for bucket in np.flatnonzero(num_steps):
            first = sum(map(len, sizes)) // self.num_replicas
            num_rounds = -(-num_steps[bucket] // self._num_steps[bucket])
            for _ in range(num_rounds):
                drawn = self._draw_round(bucket, rng)
                documents.append(drawn[0])
                sizes.append(drawn[1])
            steps.append(first + self._choose_steps(bucket, num_steps[bucket], rng))
        offsets = np.concatenate([[0], np.concatenate(sizes).cumsum()])
        order = self._order_steps([len(chosen) for chosen in steps], rng)
        return BatchPlan(np.concatenate(documents), offsets, np.concatenate(steps)[order])

    def _draw_round(self, bucket: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents of a bucket, batch by batch, and the sizes of the batches."""
        members = self._members[bucket]
        num_batches = int(self._num_steps[bucket]) * self.num_replicas
        if self.shuffle:
            members = rng.permutation(members)
        if self.drop_last:
            members = members[: num_batches * self.batch_sizes[bucket]]
        elif len(members) < num_batches:
            # every rank needs a document
            members = np.resize(members, num_batches)
        if self.shuffle:
            noise = rng.random(len(members)) * _SPREAD * self.boundaries[bucket]
            members = members[np.argsort(self.lengths[members] + noise)]
        return members, np.diff(np.arange(num_batches + 1) * len(members) // num_batches)

    def _choose_steps(self, bucket: int, wanted: int, rng: np.random.Generator) -> np.ndarray:
        """Choose among the steps of a bucket's rounds: whole rounds first."""
        one_round = self._num_steps[bucket]
        rounds = range(-(-wanted // one_round))
        order = [
            rng.permutation(one_round) if self.shuffle else np.arange(one_round) for _ in rounds
        ]
        return np.concatenate([r * one_round + order[r] for r in rounds])[:wanted]

    def _order_steps(self, counts: list[int], rng: np.random.Generator) -> np.ndarray:
        if self.sampling == "stratified":
            # each bucket's steps evenly over the epoch
            places = [(np.arange(count) + rng.random()) / count for count in counts]
            return np.argsort(np.concatenate(places), kind="stable")
        return rng.permutation(sum(counts)) if self.shuffle else np.arange(sum(counts))

    def _describe(self, counts: np.ndarray) -> str:
        buckets = ", ".join(
            f"{count:,} documents of at most {boundary:,} tokens in batches of {size}"
            for boundary, size, count in zip(self.boundaries, self.batch_sizes, counts)
        )
        used = np.minimum(counts, self._num_steps * self.batch_sizes * self.num_replicas)
        return (
            f"buckets: {buckets}; {len(self):,} steps an epoch, sampling {self.sampling}, "
            f"{(counts - used).sum():,} documents dropped an epoch"
        )


def check_bucket_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of :class:`BucketBatchSampler`, before there is a dataset.

    Args:
        arguments: By name, as a config has them.

    Raises:
        ValueError: One is unknown, or cannot be met.
    """
    values = bind_arguments(BucketBatchSampler, arguments)
    boundaries = check_boundaries(values["boundaries"])
    check_inputs(**{name: values[name] for name in ("tokens_per_batch", "seed", "batch_size")})
    _check_options(**{name: values[name] for name in ("shuffle", "sampling", "drop_last")})
    choose_batch_sizes(boundaries, values["tokens_per_batch"], values["batch_sizes"])


def _check_options(*, shuffle: bool, sampling: str, drop_last: bool) -> None:
    check_choice("sampling", sampling, ("natural", "sqrt_tokens", "stratified"))
    check_choice("shuffle", shuffle, (True, False))
    check_choice("drop_last", drop_last, (True, False))


def assign_buckets(lengths: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    """Return the bucket of each document: the first whose boundary holds it.

    >>> assign_buckets(np.array([3, 4, 5, 9]), np.array([4, 9])).tolist()
    [0, 0, 1, 1]

    Args:
        lengths: ``(num_documents,)``.
        boundaries: Rising, ``(num_buckets,)``.

    Raises:
        ValueError: A document fits no boundary.
    """
    if lengths.max() > boundaries[-1]:
        raise ValueError(
            f"the last boundary must hold the longest document, got {boundaries[-1]} for "
            f"{lengths.max()} tokens in document {lengths.argmax()} "
            f"({(lengths > boundaries[-1]).sum()} are longer); add a boundary, or cut documents at "
            f"max_length={boundaries[-1]}"
        )
    return np.searchsorted(boundaries, lengths)


def sqrt_token_weights(tokens: np.ndarray) -> np.ndarray:
    """Return the share of each bucket in proportion to the square root of its tokens.

    >>> sqrt_token_weights(np.array([100, 900])).tolist()
    [0.25, 0.75]

    Args:
        tokens: Tokens of each bucket, ``(num_buckets,)``.
    """
    roots = np.sqrt(tokens)
    return roots / roots.sum()


def share_steps(num_steps: np.ndarray, tokens: np.ndarray, offset: float) -> np.ndarray:
    """Share the steps of an epoch among buckets by the square root of their tokens.

    >>> share_steps(np.array([1, 5]), np.array([100, 400]), offset=0.5).tolist()
    [2, 4]

    Args:
        num_steps: Steps that show each document of a bucket once, ``(num_buckets,)``; a bucket
            with none gets none, any other one at least 1.
        tokens: Tokens of each bucket, ``(num_buckets,)``.
        offset: In ``[0, 1)``; uniform ones give each bucket its share on average.

    Returns:
        Steps of each bucket, as many in all, int64, ``(num_buckets,)``.
    """
    exposed, total = num_steps > 0, num_steps.sum()
    ends = sqrt_token_weights(tokens * exposed).cumsum() * total
    ends[exposed.nonzero()[0][-1] :] = total
    counts = np.diff(np.floor(ends + offset).astype(np.int64), prepend=0)
    for bucket in np.flatnonzero(exposed & (counts == 0)):
        counts[counts.argmax()] -= 1
        counts[bucket] = 1
    return counts


def check_boundaries(boundaries: Sequence[int]) -> np.ndarray:
    """Return the boundaries as an array, int64, ``(num_buckets,)``.

    Raises:
        ValueError: There are none, or they do not rise from 1 or more.
    """
    # not int64 at once, which makes 2 of 2.5
    array = np.asarray(boundaries)
    is_list = array.ndim == 1 and array.size and np.issubdtype(array.dtype, np.integer)
    if not is_list or (np.diff(array, prepend=0) < 1).any():
        raise ValueError(
            f"boundaries must be positive integers, rising and not empty, got {boundaries!r}; "
            "`xtuner-mamba lengths` finds those with the least padding"
        )
    return array.astype(np.int64)
