"""What a config trains, part by part, each built as ``xtuner train`` builds it."""

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from datasets import Dataset
from mmengine.dataset import DefaultSampler
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import DATASETS, HOOKS
from mmengine.runner import Runner
from torch import nn
from transformers import PreTrainedTokenizerBase
from xtuner.registry import BUILDER
from xtuner.utils import DEFAULT_PAD_TOKEN_INDEX
from xtuner.utils.device import get_device

from xtuner_mamba.dataset.documents import TokenizedDocuments
from xtuner_mamba.dataset.lengths import LengthReport, analyse_lengths
from xtuner_mamba.engine import TokenAccumulationOptimWrapper
from xtuner_mamba.engine.hooks import CarriedStateHook, PackedLayoutHook
from xtuner_mamba.integration.config_checks import check_packed_training
from xtuner_mamba.integration.config_parts import ConfigError, type_name
from xtuner_mamba.integration.config_rewrites import fit_cpu, train_exactly
from xtuner_mamba.tools.corpus import quiet, read_config, read_documents
from xtuner_mamba.tools.sample_batch import SampleBatch, choose_pieces, find_documents

# a pack of more tokens shows nothing else, and its logits take gigabytes
_MOST_TOKENS = 8192
_BOUNDARY_HOOKS = ("PackedLayoutHook", "VarlenAttnArgsToMessageHubHook")
# enough for the mean and the spread of a few optimizer steps
_NUM_BATCHES = 256
# the parts of a dataset's config that have done their work once documents are tokenized
_TOKENIZED = dict(
    do_dataset_tokenization=False,
    dataset_map_fn=None,
    template_map_fn=None,
    rename_maps=(),
    max_dataset_length=None,
    shuffle_before_pack=False,
    map_num_proc=None,
)


class Training:
    """A config's parts, built when they are asked for.

    Args:
        source: Path of a config, or the name of a template.
        work_dir: Where a training with it has left its log, if there was one.

    Raises:
        OSError: There is no such file.
        ValueError: It does not run, or lacks a part that a training has.
    """

    refusal: str | None
    """Why ``xtuner train`` would stop before building anything, but for a missing boundary hook."""

    def __init__(self, source: str, work_dir: Path | None = None) -> None:
        self.source, self.work_dir = source, work_dir
        self.cfg = read_config(source, ["model", "train_dataloader", "optim_wrapper"])
        with quiet():
            self.refusal = self._change_as_xtuner_train()

    def _change_as_xtuner_train(self) -> str | None:
        # without a work_dir there is none to be refused
        args = argparse.Namespace(
            config=self.source, work_dir="/nowhere", deepspeed=None, launcher="none"
        )
        fit_cpu(self.cfg, args)
        hooks = self.cfg.get("custom_hooks") or []
        if not any(type_name(hook) in _BOUNDARY_HOOKS for hook in hooks):
            self.cfg.custom_hooks = [*hooks, dict(type=PackedLayoutHook)]
        try:
            covered = check_packed_training(self.cfg, args)
        except ConfigError as error:
            return str(error)
        finally:
            self.cfg.custom_hooks = hooks
        if covered:
            train_exactly(self.cfg)
        return None

    @property
    def uses_varlen(self) -> bool:
        """Whether rows hold documents whose boundaries the model is told."""
        return bool(self.cfg.model.get("use_varlen_attn", False))

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return self.cfg.train_dataloader.dataset.max_length

    @property
    def too_long(self) -> str:
        """What becomes of longer documents."""
        return self.cfg.train_dataloader.dataset.get("too_long", "split")

    @cached_property
    def documents(self) -> TokenizedDocuments:
        """The whole documents of the corpus."""
        return read_documents(self.cfg)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document with a label, int64, ``(num_documents,)``."""
        return self.documents.lengths[self.documents.has_label]

    @property
    def batch_sampler(self) -> dict:
        """The config of the batch sampler; empty if there is none."""
        return self.cfg.train_dataloader.get("batch_sampler") or {}

    @property
    def carries_states(self) -> bool:
        """Whether documents go on from batch to batch."""
        return type_name(self.batch_sampler) == "CarriedChunkBatchSampler"

    @cached_property
    def length_report(self) -> LengthReport:
        """What :mod:`xtuner_mamba.dataset.lengths` tells of the corpus and of the buckets."""
        return analyse_lengths(
            self.lengths,
            self.max_length,
            boundaries=self.batch_sampler.get("boundaries"),
            tokens_per_batch=self.batch_sampler.get("tokens_per_batch", 16_000),
            batch_sizes=self.batch_sampler.get("batch_sizes"),
            too_long=self.too_long,
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the dataset, or of the config; none where data comes tokenized."""
        node = self.cfg.train_dataloader.dataset.get("tokenizer") or self.cfg.get("tokenizer")
        return BUILDER.build(node) if isinstance(node, dict) else node

    @property
    def pad_token_id(self) -> int:
        """What batches are padded with."""
        pad_token_id = getattr(self.tokenizer, "pad_token_id", None)
        return DEFAULT_PAD_TOKEN_INDEX if pad_token_id is None else pad_token_id

    @cached_property
    def batch(self) -> SampleBatch:
        """Three documents of very different lengths, collated by the config."""
        pieces = choose_pieces(self.documents, min(self.max_length, _MOST_TOKENS))
        read = [self.documents.read(pieces[i : i + 1]) for i in range(len(pieces))]
        documents = [tokens for tokens, _ in read]
        columns = {
            "input_ids": [tokens.tolist() for tokens in documents],
            "labels": [labels.tolist() for _, labels in read],
        }
        node = dict(self.cfg.train_dataloader.dataset.items()) | _TOKENIZED
        # one pack, if the config packs
        node |= dict(dataset=Dataset.from_dict(columns), max_length=int(pieces.lengths.sum()))
        with quiet():
            rows = DATASETS.build(node)
        settings = dict(
            dataset=rows,
            sampler=dict(type=DefaultSampler, shuffle=False),
            batch_size=len(rows),
            num_workers=0,
            collate_fn=self.cfg.train_dataloader.collate_fn,
        )
        if self.carries_states:
            # rows are made by the sampler; here, one of all documents
            places = node["max_length"]
            sampler = dict(max_length=places, tokens_per_batch=places, shuffle=False)
            settings |= dict(batch_size=1, batch_sampler={**self.batch_sampler, **sampler})
        collated = next(iter(Runner.build_dataloader(settings)))
        places = find_documents(collated["data"]["input_ids"], documents)
        return SampleBatch(collated, documents, places, pieces)

    @cached_property
    def first_batches(self) -> list[dict]:
        """The first of the batches that the config makes of the whole corpus."""
        settings = dict(self.cfg.train_dataloader.items()) | dict(num_workers=0)
        for name in ("persistent_workers", "prefetch_factor"):
            settings.pop(name, None)
        with quiet():
            return list(islice(Runner.build_dataloader(settings, seed=0), _NUM_BATCHES))

    @cached_property
    def model(self) -> nn.Module:
        """The model, on the device that it trains on."""
        with quiet():
            return BUILDER.build(copy.deepcopy(self.cfg.model)).to(get_device())

    @cached_property
    def optim_wrapper(self) -> OptimWrapper:
        """The optimizer, which steps after every batch."""
        settings = copy.deepcopy(self.cfg.optim_wrapper)
        settings.pop("accumulative_counts", None)
        return build_optim_wrapper(self.model, settings)

    @property
    def boundary_hooks(self) -> list[Hook]:
        """The config's hooks that publish boundaries."""
        hooks = self.cfg.get("custom_hooks") or []
        return [
            HOOKS.build(dict(hook.items())) for hook in hooks if type_name(hook) in _BOUNDARY_HOOKS
        ]

    @contextmanager
    def fed(self, collated: dict) -> Iterator[dict]:
        """Give what the model is called with, while the config's hooks publish its boundaries."""
        collated = {**collated, "data": dict(collated["data"])}
        hooks = self.boundary_hooks
        carrying = [CarriedStateHook()] if self.carries_states else []
        runner = SimpleNamespace(
            model=self.model, iter=0, message_hub=MessageHub.get_instance("tools")
        )
        if isinstance(self.optim_wrapper, TokenAccumulationOptimWrapper):
            self.optim_wrapper.begin_step(1)
        try:
            # states of before the first batch, every time
            for hook in carrying:
                hook.before_train(runner)
            for hook in hooks:
                hook.before_train_iter(runner, 0, collated)
            yield self.model.data_preprocessor(collated, True)
        finally:
            for hook in hooks:
                hook.after_train_iter(runner, 0, collated)
            for hook in carrying:
                hook.after_train(runner)
