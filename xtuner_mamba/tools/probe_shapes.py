"""How large the batches of a config may become: what to try, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass

from mmengine.config import Config

from xtuner_mamba.integration.config_parts import type_name
from xtuner_mamba.tools.batch_search import find_limit

MARGIN = 0.85
"""Share of what fits: batches of other shapes leave gaps in memory that those of a try do not."""
TOLERANCE = 1 / 32
"""Share by which a limit may be found too small, which spares tries."""

_DATASETS = (
    "process_packed_dataset",
    "process_document_dataset",
    "process_chunk_dataset",
    "process_hf_dataset",
)
# tokens of the documents that a pack is made of
_DOCUMENT = 512
# what a config has is multiplied by this at most
_MOST = 16
# shapes of as many tokens take about as much memory: share that the second try is away
_STEP = 1 / 16


@dataclass(frozen=True)
class Shape:
    """Documents of one length, as many as fit: a batch of a bucket, or a pack."""

    length: int
    own: int
    """Documents of a micro-batch, as the config has it."""
    most: int
    """Documents to try at most."""


@dataclass(frozen=True)
class Found:
    """How many documents of a shape fit."""

    shape: Shape
    fits: int
    """The most that were tried and did; 0 if none did."""
    fails: int | None
    """The fewest that were tried and did not; none if all did."""
    num_tries: int
    peak_bytes: int
    """Of the most that did."""
    device: str

    @property
    def advised(self) -> int:
        """Documents of a micro-batch, with a margin."""
        return max(int(MARGIN * self.fits), min(self.fits, 1))

    @property
    def advised_tokens(self) -> int:
        """The same in tokens."""
        return self.advised * self.shape.length


def plan_shapes(cfg: Config, most_tokens: int | None = None) -> list[Shape]:
    """Return the buckets of a config, or what its packs or padded rows are made of.

    Args:
        cfg: As read.
        most_tokens: Of a micro-batch, to try at most; ``None`` is 16 times what the config has.

    Raises:
        ValueError: The config does not train on documents, or has more tokens already.
    """
    loader, packs = cfg.train_dataloader, cfg.get("use_varlen_attn", False)
    name, max_length = type_name(loader.dataset), loader.dataset.get("max_length")
    if name not in _DATASETS or max_length is None:
        raise ValueError(
            f"train_dataloader.dataset must be built by {' or '.join(_DATASETS)} with a max_length,"
            f" got {name} with {max_length}; of other rows the shape is not known"
        )
    sampler = loader.get("batch_sampler") or {}
    own = sampler.get("tokens_per_batch", max_length * loader.batch_size)
    if most_tokens is None:
        most_tokens = _MOST * own
    if most_tokens < own:
        raise ValueError(
            f"--most-tokens must be at least the {own:,} of the config, got {most_tokens:,}"
        )
    if "boundaries" in sampler:
        lengths = sampler.boundaries
    else:
        lengths = [min(_DOCUMENT, max_length) if packs else max_length]
    return [
        Shape(length, own=max(own // length, 1), most=max(most_tokens // length, 1))
        for length in lengths
    ]


def probe(
    shapes: list[Shape], try_shape: Callable[[Shape, int], dict], report: Callable[[str], None]
) -> list[Found]:
    """Search for the limit of each shape, around as many tokens as were the last one's limit.

    Args:
        shapes: What to make larger.
        try_shape: Trains on so many documents of a shape, and tells whether they ``fits``; if so,
            the ``peak_bytes`` and the ``device``.
        report: Is told of each try before it begins.
    """
    found: list[Found] = []
    for shape in shapes:
        start = step = shape.own
        last = next((one for one in reversed(found) if one.fits), None)
        if last is not None:
            start = min(max(last.fits * last.shape.length // shape.length, 1), shape.most)
            step = max(int(_STEP * start), 1)
        tries: dict[int, dict] = {}

        def fits(documents: int, shape: Shape = shape, tries: dict = tries) -> bool:
            report(f"{documents:,} documents of {shape.length:,} tokens")
            tries[documents] = try_shape(shape, documents)
            return tries[documents]["fits"]

        limit = find_limit(fits, start=start, step=step, most=shape.most, tolerance=TOLERANCE)
        best = tries.get(limit.fits, {})
        found.append(
            Found(
                shape,
                limit.fits,
                limit.fails,
                len(tries),
                best.get("peak_bytes", 0),
                best.get("device", ""),
            )
        )
    return found
