"""Go on pre-training Mamba-130M on a folder of JSONL, long documents carried from chunk to chunk.

A document goes on in the same row of the next micro-batch, with the state that it had: the model
has read all of it, and gradients reach back to the beginning of the chunk. For documents too long
for a row of mamba_130m_pretrain_jsonl_varlen.

Hardware: one GPU of 24 GB (about as many tokens a micro-batch as the bucket template).
Data:     a JSON object with a "text" field on every line of data/*.jsonl
Run:      xtuner train mamba_130m_pretrain_jsonl_fixed_chunk_carried
          (eight GPUs: NPROC_PER_NODE=8 in front, --deepspeed deepspeed_zero2 behind)
"""

from datasets import load_dataset
from mmengine.dataset import DefaultSampler
from mmengine.hooks import (
    CheckpointHook,
    DistSamplerSeedHook,
    IterTimerHook,
    LoggerHook,
    ParamSchedulerHook,
)
from mmengine.optim import AmpOptimWrapper, CosineAnnealingLR, LinearLR
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer
from xtuner.engine.hooks import DatasetInfoHook, EvaluateChatHook
from xtuner.engine.runner import TrainLoop

from xtuner_mamba.dataset import (
    CarriedChunkBatchSampler,
    carried_collate_fn,
    document_map_fn,
    process_chunk_dataset,
)
from xtuner_mamba.engine import MambaOptimWrapperConstructor
from xtuner_mamba.engine.hooks import CarriedStateHook, PackedLayoutHook
from xtuner_mamba.model import PackedSupervisedFinetune

# PART 1  Settings
# Model
pretrained_model_name_or_path = "state-spaces/mamba-130m-hf"
use_varlen_attn = True

# Data
data_files = "data/*.jsonl"
max_length = 2048  # tokens of a chunk: how far back gradients reach
tokens_per_batch = 16_384  # 8 rows, each with documents of its own
pack_to_max_length = True

# Scheduler & Optimizer
batch_size = 1  # has no say; raise tokens_per_batch instead
accumulative_counts = 4  # 4 x 16,384 tokens per device = 65,536 a step
dataloader_num_workers = 4
max_epochs = 1
optim_type = AdamW
lr = 3e-4
betas = (0.9, 0.95)
weight_decay = 0.1  # not on A_log, D, biases and norms
max_norm = 1  # grad clip
warmup_ratio = 0.03

# Save
save_steps = 1000
save_total_limit = 2  # Maximum checkpoints to keep (-1 means unlimited)

# Evaluate the generation performance during the training
evaluation_freq = 1000
evaluation_inputs = ["The capital of France is", "Once upon a time"]

# PART 2  Model & Tokenizer
tokenizer = dict(
    type=AutoTokenizer.from_pretrained,
    pretrained_model_name_or_path=pretrained_model_name_or_path,
    padding_side="right",
)

model = dict(
    type=PackedSupervisedFinetune,
    use_varlen_attn=use_varlen_attn,
    llm=dict(
        type=AutoModelForCausalLM.from_pretrained,
        pretrained_model_name_or_path=pretrained_model_name_or_path,
    ),
)

# PART 3  Dataset & Dataloader
train_dataset = dict(
    type=process_chunk_dataset,
    dataset=dict(type=load_dataset, path="json", data_files=data_files),
    tokenizer=tokenizer,
    max_length=max_length,
    dataset_map_fn=document_map_fn,
    remove_unused_columns=True,
    shuffle_before_pack=True,
    pack_to_max_length=pack_to_max_length,
    use_varlen_attn=use_varlen_attn,
)

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=dataloader_num_workers,
    dataset=train_dataset,
    sampler=dict(type=DefaultSampler, shuffle=True),
    batch_sampler=dict(
        type=CarriedChunkBatchSampler,
        max_length=max_length,
        tokens_per_batch=tokens_per_batch,
    ),
    collate_fn=dict(type=carried_collate_fn),
)

# PART 4  Scheduler & Optimizer
# bfloat16 needs no loss scaling
optim_wrapper = dict(
    type=AmpOptimWrapper,
    dtype="bfloat16",
    loss_scale=1.0,
    constructor=MambaOptimWrapperConstructor,
    optimizer=dict(type=optim_type, lr=lr, betas=betas, weight_decay=weight_decay),
    clip_grad=dict(max_norm=max_norm, error_if_nonfinite=False),
    accumulative_counts=accumulative_counts,
)

param_scheduler = [
    dict(
        type=LinearLR,
        start_factor=1e-5,
        by_epoch=True,
        begin=0,
        end=warmup_ratio * max_epochs,
        convert_to_iter_based=True,
    ),
    dict(
        type=CosineAnnealingLR,
        eta_min=0.1 * lr,
        by_epoch=True,
        begin=warmup_ratio * max_epochs,
        end=max_epochs,
        convert_to_iter_based=True,
    ),
]

train_cfg = dict(type=TrainLoop, max_epochs=max_epochs)

# PART 5  Runtime
# without XTuner's ThroughputHook: its FLOPs are those of attention
custom_hooks = [
    dict(type=PackedLayoutHook),
    dict(type=CarriedStateHook),
    dict(type=DatasetInfoHook, tokenizer=tokenizer),
    dict(
        type=EvaluateChatHook,
        tokenizer=tokenizer,
        every_n_iters=evaluation_freq,
        evaluation_inputs=evaluation_inputs,
    ),
]

default_hooks = dict(
    timer=dict(type=IterTimerHook),
    logger=dict(type=LoggerHook, log_metric_by_epoch=False, interval=10),
    param_scheduler=dict(type=ParamSchedulerHook),
    checkpoint=dict(
        type=CheckpointHook,
        by_epoch=False,
        interval=save_steps,
        max_keep_ckpts=save_total_limit,
    ),
    sampler_seed=dict(type=DistSamplerSeedHook),
)

env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
    dist_cfg=dict(backend="nccl"),
)

visualizer = None
log_level = "INFO"
load_from = None
resume = False
randomness = dict(seed=None, deterministic=False)
log_processor = dict(by_epoch=False)
