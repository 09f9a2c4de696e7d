"""QLoRA fine-tune of Bamba-9B on alpaca, packed rows of 8,192 tokens, three epochs.

Mamba-2 and attention layers; both keep to their document. With mamba-ssm 2.3.0 or newer installed
its kernels are used, without it plain PyTorch.

Hardware: one GPU of 24 GB (7 GB of frozen weights, most in 4 bits, the rest is activations).
Run:      xtuner train xtuner_mamba_bamba_9b_qlora_alpaca_e3_varlen
Merge:    xtuner convert pth_to_hf xtuner_mamba_bamba_9b_qlora_alpaca_e3_varlen PTH ADAPTER
          xtuner convert merge ibm-fms/Bamba-9B ADAPTER FOLDER
"""

import torch
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
from peft import LoraConfig
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from xtuner.dataset.map_fns import alpaca_map_fn, template_map_fn_factory
from xtuner.engine.hooks import DatasetInfoHook, EvaluateChatHook
from xtuner.engine.runner import TrainLoop
from xtuner.utils import PROMPT_TEMPLATE, SYSTEM_TEMPLATE

from xtuner_mamba.dataset import packed_collate_fn, process_packed_dataset
from xtuner_mamba.engine import MambaOptimWrapperConstructor
from xtuner_mamba.engine.hooks import PackedLayoutHook
from xtuner_mamba.model import PackedSupervisedFinetune

# PART 1  Settings
# Model
pretrained_model_name_or_path = "ibm-fms/Bamba-9B"
use_varlen_attn = True
lora_r = 64
lora_alpha = 16
lora_dropout = 0.1

# Data
data_path = "tatsu-lab/alpaca"
prompt_template = PROMPT_TEMPLATE.default
max_length = 8192  # tokens of a row, which holds many conversations
pack_to_max_length = True

# Scheduler & Optimizer
batch_size = 1  # rows per device; raise max_length instead
accumulative_counts = 4  # 4 x 8192 tokens per device = 32,768 a step
dataloader_num_workers = 4
max_epochs = 3
optim_type = AdamW
lr = 2e-4
betas = (0.9, 0.95)
weight_decay = 0
max_norm = 1  # grad clip
warmup_ratio = 0.03

# Save
save_steps = 500
save_total_limit = 2  # Maximum checkpoints to keep (-1 means unlimited)

# Evaluate the generation performance during the training
evaluation_freq = 500
SYSTEM = SYSTEM_TEMPLATE.alpaca
evaluation_inputs = [
    "Please tell me five scenic spots in Shanghai",
    "Explain in one sentence why the sky is blue",
]

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
        quantization_config=dict(
            type=BitsAndBytesConfig,
            load_in_4bit=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_type="nf4",
        ),
    ),
    lora=dict(
        type=LoraConfig,
        r=lora_r,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        # without target_modules: every linear layer but the head
        bias="none",
        task_type="CAUSAL_LM",
    ),
)

# PART 3  Dataset & Dataloader
train_dataset = dict(
    type=process_packed_dataset,
    dataset=dict(type=load_dataset, path=data_path),
    tokenizer=tokenizer,
    max_length=max_length,
    dataset_map_fn=alpaca_map_fn,
    template_map_fn=dict(type=template_map_fn_factory, template=prompt_template),
    remove_unused_columns=True,
    shuffle_before_pack=True,
    pack_to_max_length=pack_to_max_length,
    use_varlen_attn=use_varlen_attn,
    packing="best_fit",  # no conversation is cut that fits in a row
    too_long="split",
)

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=dataloader_num_workers,
    dataset=train_dataset,
    sampler=dict(type=DefaultSampler, shuffle=True),
    collate_fn=dict(type=packed_collate_fn),
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
        eta_min=0.0,
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
    dict(type=DatasetInfoHook, tokenizer=tokenizer),
    dict(
        type=EvaluateChatHook,
        tokenizer=tokenizer,
        every_n_iters=evaluation_freq,
        evaluation_inputs=evaluation_inputs,
        system=SYSTEM,
        prompt_template=prompt_template,
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
