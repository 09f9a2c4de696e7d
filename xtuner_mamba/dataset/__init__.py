"""Documents to packs to batches."""

from xtuner_mamba.dataset.buckets import BucketBatchSampler
from xtuner_mamba.dataset.carried_chunks import (
    CarriedChunkBatchSampler,
    ChunkDataset,
    carried_collate_fn,
    process_chunk_dataset,
)
from xtuner_mamba.dataset.collate import packed_collate_fn
from xtuner_mamba.dataset.document_dataset import DocumentDataset, process_document_dataset
from xtuner_mamba.dataset.map_fns import document_map_fn
from xtuner_mamba.dataset.packed_dataset import PackedDataset
from xtuner_mamba.dataset.packer import VarlenPacker
from xtuner_mamba.dataset.padded_collate import padded_collate_fn
from xtuner_mamba.dataset.plan import plan_best_fit, plan_wrap
from xtuner_mamba.dataset.preference import (
    PreferencePacks,
    preference_packed_collate_fn,
    process_preference_dataset,
)
from xtuner_mamba.dataset.process import process_packed_dataset
from xtuner_mamba.dataset.report import PackingReport
from xtuner_mamba.dataset.samplers import RedrawSampler
from xtuner_mamba.dataset.token_budget import TokenBudgetBatchSampler

__all__ = [
    "BucketBatchSampler",
    "CarriedChunkBatchSampler",
    "ChunkDataset",
    "DocumentDataset",
    "PackedDataset",
    "PackingReport",
    "PreferencePacks",
    "RedrawSampler",
    "TokenBudgetBatchSampler",
    "VarlenPacker",
    "carried_collate_fn",
    "document_map_fn",
    "packed_collate_fn",
    "padded_collate_fn",
    "plan_best_fit",
    "plan_wrap",
    "preference_packed_collate_fn",
    "process_chunk_dataset",
    "process_document_dataset",
    "process_packed_dataset",
    "process_preference_dataset",
]
