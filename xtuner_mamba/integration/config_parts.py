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
    _check_reward_tokens(cfg)
    _check_token_steps(cfg)


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


def _check_reward_tokens(cfg: Config) -> None:
    """Check that the reward is read, once the model is saved, where it was trained."""
    token = cfg.model.get("reward_token_id")
    for part in DATALOADERS:
        for path, node in walk(cfg.get(part), part):
            trained = node.get("reward_token_id")
            if token is not None and node.get("is_reward") and trained != token:
                raise ConfigError(
                    f"reward_token_id must be the same in the model and in {path}, got {token} and "
                    f"{trained}; set the dataset's, which the reward is trained at, in both"
                )


def _check_token_steps(cfg: Config) -> None:
    """Check that steps of as many tokens have their wrapper and their loop, and tokens to count."""
    wrapper, loop = type_name(cfg.optim_wrapper), type_name(cfg.get("train_cfg") or {})
    counts_tokens = wrapper == "TokenAccumulationOptimWrapper"
    if counts_tokens != (loop == "TokenStepLoop"):
        raise ConfigError(
            "TokenAccumulationOptimWrapper and TokenStepLoop must come together, got optim_wrapper "
            f"{wrapper} and train_cfg {loop}; set both, or accumulative_counts with TrainLoop"
        )
    if counts_tokens and type_name(cfg.model) in _OF_PAIRS:
        raise ConfigError(
            f"optim_wrapper must count micro-batches for a loss over pairs, got {wrapper} with "
            f"{type_name(cfg.model)}; use AmpOptimWrapper with accumulative_counts, and TrainLoop"
        )
