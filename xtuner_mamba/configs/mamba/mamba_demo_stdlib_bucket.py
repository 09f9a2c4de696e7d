"""Pre-train a Mamba of 3M parameters on Python's standard library, in buckets of like length.

Hardware: two CPU cores, about two minutes.
Data:     demo/model and demo/corpus/*.jsonl, which tools/run_demo.py makes
Run:      xtuner train mamba_demo_stdlib_bucket
          (in the folder that holds demo/)
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
from mmengine.optim import CosineAnnealingLR, LinearLR, OptimWrapper
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer
from xtuner.engine.hooks import DatasetInfoHook, EvaluateChatHook
from xtuner.engine.runner import TrainLoop

from xtuner_mamba.dataset import (
    BucketBatchSampler,
    document_map_fn,
    padded_collate_fn,
    process_document_dataset,
)
from xtuner_mamba.engine import MambaOptimWrapperConstructor
from xtuner_mamba.engine.hooks import PackedLayoutHook
from xtuner_mamba.model import PackedSupervisedFinetune

# PART 1  Settings
# Model
pretrained_model_name_or_path = "./demo/model"
use_varlen_attn = True  # batches run without their padding

# Data
data_files = "demo/corpus/*.jsonl"
boundaries = [64, 128, 256, 512, 1024, 2048]
max_length = boundaries[-1]  # longer documents are split
tokens_per_batch = 2048  # places of a batch: 32 documents of 64 tokens, or one of 2,048
batch_sizes = None  # or "batch_sizes.yaml": what `xtuner-mamba probe-batch` found to fit here
sampling = "natural"  # or "sqrt_tokens": long and short ones seen more evenly; or "stratified"

# Scheduler & Optimizer
batch_size = 1  # has no say; raise tokens_per_batch instead
accumulative_counts = 1
dataloader_num_workers = 0
max_epochs = 1
optim_type = AdamW
lr = 4e-3  # high: the model is small and starts from random weights
betas = (0.9, 0.95)
weight_decay = 0.1  # not on A_log, D, biases and norms
max_norm = 1  # grad clip
warmup_ratio = 0.1

# Save
save_steps = 1000
save_total_limit = 1  # Maximum checkpoints to keep (-1 means unlimited)

# Evaluate the generation performance during the training
evaluation_freq = 100
evaluation_inputs = ["def __init__(self", "class "]

# PART 2  Model & Tokenizer
tokenizer = dict(
    type=AutoTokenizer.from_pretrained,
    pretrained_model_name_or_path=pretrained_model_name_or_path,
    padding_side="right",
)

model = dict(
    type=PackedSupervisedFinetune,
    use_varlen_attn=use_varlen_attn,
    use_activation_checkpointing=False,  # so small a model has memory to spare
    llm=dict(
        type=AutoModelForCausalLM.from_pretrained,
        pretrained_model_name_or_path=pretrained_model_name_or_path,
    ),
)

# PART 3  Dataset & Dataloader
train_dataset = dict(
    type=process_document_dataset,
    dataset=dict(type=load_dataset, path="json", data_files=data_files),
    tokenizer=tokenizer,
    max_length=max_length,
    dataset_map_fn=document_map_fn,
    remove_unused_columns=True,
    use_varlen_attn=use_varlen_attn,
    too_long="split",
)

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=dataloader_num_workers,
    dataset=train_dataset,
    sampler=dict(type=DefaultSampler, shuffle=True),
    batch_sampler=dict(
        type=BucketBatchSampler,
        boundaries=boundaries,
        tokens_per_batch=tokens_per_batch,
        batch_sizes=batch_sizes,
        sampling=sampling,
    ),
    collate_fn=dict(type=padded_collate_fn, use_varlen_attn=use_varlen_attn),
)

# PART 4  Scheduler & Optimizer
# AmpOptimWrapper asks for a GPU
optim_wrapper = dict(
    type=OptimWrapper,
    constructor=MambaOptimWrapperConstructor,
    optimizer=dict(type=optim_type, lr=lr, betas=betas, weight_decay=weight_decay),
    clip_grad=dict(max_norm=max_norm, error_if_nonfinite=True),
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
custom_hooks = [
    dict(type=PackedLayoutHook),
    dict(type=DatasetInfoHook, tokenizer=tokenizer),
    dict(
        type=EvaluateChatHook,
        tokenizer=tokenizer,
        every_n_iters=evaluation_freq,
        evaluation_inputs=evaluation_inputs,
        max_new_tokens=32,
    ),
]

default_hooks = dict(
    timer=dict(type=IterTimerHook),
    logger=dict(type=LoggerHook, log_metric_by_epoch=False, interval=5),
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
    dist_cfg=dict(backend="gloo"),
)

visualizer = None
log_level = "INFO"
load_from = None
resume = False
randomness = dict(seed=0, deterministic=False)
# five losses a line, none of them on two lines
log_processor = dict(by_epoch=False, window_size=5)
