"""Parts of a config: what each of them builds, and whether they belong together."""

from collections.abc import Iterator

from mmengine.config import Config

DATALOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")
REWARD_MODELS = ("RewardModel", "PackedRewardModel")
_OF_LIKE_LENGTHS = ("BucketBatchSampler", "TokenBudgetBatchSampler")
# of what packs: its packing where the config names none; XTuner's has no such argument
_PACKINGS = {"process_packed_dataset": "best_fit", "process_hf_dataset": None}
_OF_PAIRS = {
    *("DPO", "ORPO", "PackedDPO", "PackedORPO", *REWARD_MODELS),
    *("build_preference_dataset", "process_preference_dataset"),
    *("preference_collate_fn", "preference_packed_collate_fn"),
}
_OF_DOCUMENTS = {
    *("SupervisedFinetune", "PackedSupervisedFinetune"),
    *("process_hf_dataset", "process_packed_dataset", "process_document_dataset"),
    *("default_collate_fn", "packed_collate_fn", "padded_collate_fn"),
}


class ConfigError(ValueError):
    """A config that cannot train, in words for the person who wrote it."""


def check_parts(cfg: Config) -> None:
    """Check that the parts of a config belong together.

    Raises:
        ConfigError: One needs another than there is.
    """
    _check_batch_sampler(cfg)
    _check_collate_fn(cfg)
    _check_pairs(cfg)


def type_name(node: dict) -> str:
    """Return the bare name of what a config dict builds, whatever form its type has."""
    built = node.get("type")
    return getattr(built, "__name__", str(built)).rpartition(".")[2]


def walk(node: object, path: str = "") -> Iterator[tuple[str, dict]]:
    """Iterate over a part of a config and every dict below it, with their paths."""
    if isinstance(node, dict):
        yield path, node
        # dict's own items: the config's build what they return
        for key, value in dict.items(node):
            yield from walk(value, f"{path}.{key}" if path else key)
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from walk(value, f"{path}[{index}]")


def _check_batch_sampler(cfg: Config) -> None:
    loader = cfg.train_dataloader
    sampler, dataset = loader.get("batch_sampler") or {}, loader.get("dataset") or {}
    name, hooks = type_name(sampler), [type_name(hook) for hook in cfg.get("custom_hooks") or ()]
    if name == "BucketBatchSampler" and "boundaries" in sampler:
        longest, last = dataset.get("max_length"), sampler["boundaries"][-1]
        if isinstance(longest, int) and longest > last:
            raise ConfigError(
                f"the last of boundaries must hold the dataset's max_length, got {last} and "
                f"{longest}; set max_length = boundaries[-1], or add a boundary"
            )
    rows, collate_fn = type_name(dataset), type_name(loader.get("collate_fn") or {})
    carries = {
        rows == "process_chunk_dataset",
        name == "CarriedChunkBatchSampler",
        collate_fn == "carried_collate_fn",
        "CarriedStateHook" in hooks,
    }
    if len(carries) > 1:
        raise ConfigError(
            "process_chunk_dataset, CarriedChunkBatchSampler, carried_collate_fn and "
            f"CarriedStateHook must come together, got dataset {rows}, batch_sampler {name}, "
            f"collate_fn {collate_fn} and custom_hooks {hooks}; see "
            "mamba_130m_pretrain_jsonl_fixed_chunk_carried"
        )
    if "LengthCurriculumHook" in hooks and name not in _OF_LIKE_LENGTHS:
        raise ConfigError(
            f"batch_sampler must be one of {_OF_LIKE_LENGTHS} with LengthCurriculumHook, got "
            f"{name}; use a mamba_*_bucket template, or leave the hook out"
        )


def _check_collate_fn(cfg: Config) -> None:
    """Check that documents of a pack are not laid out as one."""
    for part in DATALOADERS:
        loader = cfg.get(part) or {}
        dataset, collate_fn = loader.get("dataset") or {}, loader.get("collate_fn") or {}
        name = type_name(dataset)
        packing = dataset.get("packing", _PACKINGS.get(name))
        padded = type_name(collate_fn) == "padded_collate_fn"
        if name in _PACKINGS and padded and packing != "wrap":
            raise ConfigError(
                f"packing must be 'wrap', that of fixed chunks, with padded_collate_fn, got "
                f"{packing!r} in the {name} of {part}: it keeps rows apart, and not the documents "
                "of a row; use packed_collate_fn for packs, process_document_dataset for rows of "
                "one document"
            )


def _check_pairs(cfg: Config) -> None:
    """Check that a loss over pairs gets pairs, and a loss over tokens does not."""
    loader = cfg.train_dataloader
    dataset, collate_fn = loader.get("dataset") or {}, loader.get("collate_fn") or {}
    names = [type_name(node) for node in (cfg.model, dataset, collate_fn)]
    if _OF_PAIRS.intersection(names) and _OF_DOCUMENTS.intersection(names):
        raise ConfigError(
            "model, dataset and collate_fn must all be of pairs or all of documents, got "
            f"{', '.join(names)}; DPO, ORPO and reward models take process_preference_dataset "
            "and preference_packed_collate_fn"
        )
    is_reward = bool(dataset.get("is_reward", False))
    if names[0] in _OF_PAIRS and is_reward != (names[0] in REWARD_MODELS):
        raise ConfigError(
            f"is_reward must be True for reward models and for no other, got {is_reward} with "
            f"{names[0]}; set it, and is_dpo to the opposite, in the dataset"
        )
