"""What ``xtuner train`` refuses before building, and what it changes in a config."""

import argparse
import copy
import importlib

import pytest
import torch
from mmengine.config import Config
from transformers import (
    FalconMambaConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    T5Config,
)
from xtuner.dataset import process_hf_dataset
from xtuner.engine.hooks import ThroughputHook as XTunersThroughputHook
from xtuner.engine.hooks import VarlenAttnArgsToMessageHubHook

from xtuner_mamba.dataset import process_document_dataset, process_packed_dataset
from xtuner_mamba.engine import TokenAccumulationOptimWrapper, TokenStepLoop
from xtuner_mamba.engine.hooks import (
    CarriedStateHook,
    ExposureHook,
    LengthCurriculumHook,
    LengthExtrapolationHook,
    PackedLayoutHook,
    ThroughputHook,
)
from xtuner_mamba.integration import config_rewrites, deepspeed
from xtuner_mamba.integration.config_checks import check_packed_training
from xtuner_mamba.integration.config_parts import ConfigError, type_name
from xtuner_mamba.integration.convert import build_what_was_trained
from xtuner_mamba.integration.train import CheckCfg
from xtuner_mamba.model.dispatch import DISPATCH_TABLE

TEMPLATE = "mamba_130m_full_alpaca_e3_varlen"
STOCK = "llama3_8b_full_alpaca_e3"


@pytest.fixture
def args(tmp_path):
    return argparse.Namespace(
        config="copy.py", work_dir=str(tmp_path / "work"), deepspeed=None, launcher="none"
    )


@pytest.fixture
def template(write_config, tiny):
    path = write_config(TEMPLATE, pretrained_model_name_or_path=str(tiny / "model"))
    return Config.fromfile(path)


@pytest.fixture
def stock(write_config, tiny):
    path = write_config(
        STOCK, pretrained_model_name_or_path=str(tiny / "model"), use_varlen_attn=True
    )
    return Config.fromfile(path)


@pytest.fixture
def logged(monkeypatch):
    lines = []
    for module in (config_rewrites, deepspeed):
        monkeypatch.setattr(module, "print_log", lambda message, **kwargs: lines.append(message))
    return lines


def test_template_is_covered(template, args):
    assert check_packed_training(template, args) is True


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"train_dataloader.batch_size": 2}, r"batch_size must be 1 .* got 2; .*max_length"),
        (
            {"train_dataloader.dataset.pack_to_max_length": False},
            r"pack_to_max_length must be True .* got False; ",
        ),
        ({"pack_to_max_length": False}, r"pack_to_max_length must be True .* got False; "),
        (
            {"model.use_varlen_attn": False},
            r"be the same .*'model.use_varlen_attn': False.*; ",
        ),
        ({"custom_hooks": []}, r"custom_hooks must hold PackedLayoutHook .* got \[\]; add dict"),
        ({"sequence_parallel_size": 3}, r"divisible .* got 8192 and 3 in \S+dataset; .*of 3"),
        ({"sequence_parallel_size": 2}, r"sequence_parallel_size must be 1 .* got 2; "),
        (
            {"train_cfg.type": "EpochBasedTrainLoop"},
            r"train_cfg must use an iteration.*, got EpochBasedTrainLoop; use dict\(type=TrainLoop",
        ),
        (
            {"train_dataloader.dataset.packing": "bestfit"},
            r"^train_dataloader.dataset: packing must be 'best_fit' or .*, got 'bestfit'; ",
        ),
        (
            {"train_dataloader.dataset.max_length": "8k"},
            r"^train_dataloader.dataset: max_length must be an integer .*, got '8k'; ",
        ),
        (
            {"train_dataloader.dataset.to_long": "drop"},
            r"^train_dataloader.dataset: .* an unexpected keyword argument 'to_long'; they are ",
        ),
        (
            {"train_dataloader.dataset.dataset.path": "./nowhere"},
            r"^train_dataloader.dataset: path must be on this machine, got './nowhere'; ",
        ),
        (
            {
                "train_dataloader.dataset.dataset.path": "json",
                "train_dataloader.dataset.dataset.data_files": "nowhere/*.jsonl",
            },
            r"^train_dataloader.dataset: data_files must .*, got none for 'nowhere/\*.jsonl' in /",
        ),
        (
            {"train_dataloader.dataset.dataset.streaming": True},
            r"^train_dataloader.dataset: streaming must be False .*, got True; ",
        ),
        (
            {"model.llm.pretrained_model_name_or_path": "/nowhere"},
            r"transformers can read, got '/nowhere'; ",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_train_is_refused(template, args, option, message):
    template.merge_from_dict(option)
    with pytest.raises(ConfigError, match=message):
        check_packed_training(template, args)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"too_long": "cut"}, r"too_long must be .* or 'error', got 'cut'"),
        ({"max_length": 1}, r"max_length must be an integer of at least 2, got 1; "),
        ({"to_long": "drop"}, r".* an unexpected keyword argument 'to_long'; they are "),
        ({"dataset.path": "./nowhere"}, r"path must be on this machine, got './nowhere'; "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_documents_in_buckets_are_checked_like_packs(write_config, tiny, args, option, message):
    model = str(tiny / "model")
    path = write_config("mamba_130m_full_alpaca_e3_bucket", pretrained_model_name_or_path=model)
    bucket = Config.fromfile(path)
    bucket.train_dataloader.dataset.too_long = "truncate"
    assert check_packed_training(bucket, args)
    bucket.merge_from_dict({f"train_dataloader.dataset.{key}": v for key, v in option.items()})
    with pytest.raises(ConfigError, match=rf"^train_dataloader.dataset: {message}"):
        check_packed_training(bucket, args)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"batch_sampler.boundaries": [512, 128]},
            r"^train_dataloader.batch_sampler: boundaries must .* got \[512, 128\]; ",
        ),
        (
            {"batch_sampler.tokens_per_batch": "16k"},
            r"^train_dataloader.batch_sampler: tokens_per_batch .* got '16k'",
        ),
        (
            {"batch_sampler.boundries": [512]},
            r"^train_dataloader.batch_sampler: .* got 'boundries'; write 'boundaries'",
        ),
        (
            {"batch_sampler.type": "TokenBudgetBatchSampler"},
            r"^train_dataloader.batch_sampler: TokenBudgetBatchSampler .* got 'boundaries'; it has",
        ),
        ({"dataset.max_length": 4096}, "the dataset's max_length, got 2048 and 4096; set max"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_batch_samplers_are_checked_before_anything_is_built(
    write_config, tiny, args, option, message
):
    model = str(tiny / "model")
    path = write_config("mamba_130m_full_alpaca_e3_bucket", pretrained_model_name_or_path=model)
    bucket = Config.fromfile(path)
    bucket.merge_from_dict({f"train_dataloader.{key}": value for key, value in option.items()})
    with pytest.raises(ConfigError, match=message):
        check_packed_training(bucket, args)


def test_misspelt_arguments_of_model_and_hooks_are_refused_with_the_right_ones(template, args):
    template.model.fuse_nrom = False
    message = r"^model: PackedSupervisedFinetune .* got 'fuse_nrom'; write 'fuse_norm'$"
    with pytest.raises(ConfigError, match=message):
        check_packed_training(template, args)
    del template.model["fuse_nrom"]
    # handed on to XTuner's constructor
    template.model.use_activation_checkpointing = False
    assert check_packed_training(template, args)
    template.custom_hooks.append(dict(type=ExposureHook, boundary=[8]))
    with pytest.raises(ConfigError, match=r"^custom_hooks\[3\]: .* got 'boundary'; write 'boundar"):
        check_packed_training(template, args)


@pytest.mark.parametrize("switch", ["fuse_norm", "fuse_loss", "recompute"])
@pytest.mark.parametrize("value", ["yes", 1])
def test_switches_of_the_model_are_no_other_values(template, args, switch, value):
    template.model[switch] = value
    message = f"^model: {switch} must be None, True or False, got {value!r}; leave it out"
    with pytest.raises(ConfigError, match=message):
        check_packed_training(template, args)
    template.model[switch] = False
    assert check_packed_training(template, args)


@pytest.mark.parametrize("kind", ["PackedDPO", "PackedRewardModel"])
def test_options_of_every_model_are_checked(write_config, tiny, args, kind):
    name = {"PackedDPO": "dpo", "PackedRewardModel": "reward"}[kind]
    path = write_config(
        f"mamba_1_4b_{name}_full_varlen", pretrained_model_name_or_path=str(tiny / "model")
    )
    pairs = Config.fromfile(path)
    # as in a config that a run has dumped
    pairs.model.type = f"xtuner_mamba.model.{kind}"
    pairs.model.autocast_dtype = "int8"
    with pytest.raises(ConfigError, match=r"^model: autocast_dtype must be .*, got 'int8'; leave"):
        check_packed_training(pairs, args)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (dict(type=ExposureHook, interval=0), "interval must be .* at least 1, got 0$"),
        (dict(type=ExposureHook, boundaries=[8, 4]), r"boundaries must .*, got \[8, 4\]; "),
        (dict(type=ExposureHook, boundaries=8), "boundaries must .*, got 8; "),
        (dict(type=ThroughputHook, tokens_per_batch="8k"), "tokens_per_batch must .*, got '8k'$"),
        # as in a config that a run has dumped
        (
            dict(type="xtuner_mamba.engine.hooks.ThroughputHook", tokens_per_batch=0),
            "tokens_per_batch must .*, got 0$",
        ),
        (
            dict(type=LengthExtrapolationHook, dataset=None, max_length=0),
            "max_length must be .* at least 1, got 0$",
        ),
        (
            dict(type=LengthExtrapolationHook, dataset=None),
            r"LengthExtrapolationHook must .* max_length, got \['dataset'\]; add max_length",
        ),
    ],
    ids=str,
)
def test_hooks_are_checked_before_anything_is_built(template, args, hook, message):
    template.custom_hooks.append(hook)
    with pytest.raises(ConfigError, match=rf"^custom_hooks\[3\]: {message}"):
        check_packed_training(template, args)


def test_hooks_of_xtuner_are_its_business(template, args):
    # of the same name as one of ours
    template.custom_hooks.append(dict(type=XTunersThroughputHook, hidden_size="?"))
    assert check_packed_training(template, args)


@pytest.mark.parametrize("second", [PackedLayoutHook, VarlenAttnArgsToMessageHubHook])
def test_boundaries_are_published_once(template, args, second):
    template.custom_hooks.append(dict(type=second))
    message = (
        rf"must hold PackedLayoutHook once, got \['PackedLayoutHook', '{second.__name__}'\]; leave"
    )
    with pytest.raises(ConfigError, match=message):
        check_packed_training(template, args)


def test_held_out_documents_are_checked_like_those_of_training(template, args):
    held_out = dict(template.train_dataloader.dataset, type=process_document_dataset, max_length=1)
    hook = dict(type=LengthExtrapolationHook, dataset=held_out, max_length=8192)
    template.custom_hooks.append(hook)
    with pytest.raises(ConfigError, match=r"^custom_hooks\[3\].dataset: max_length .* got 1; "):
        check_packed_training(template, args)


def test_parts_that_need_each_other_are_asked_for(template, args):
    template.custom_hooks.append(dict(type=CarriedStateHook))
    message = (
        r"together, got dataset process_packed_dataset, batch_sampler None, .*StateHook'\]; see"
    )
    with pytest.raises(ConfigError, match=message):
        check_packed_training(template, args)
    template.custom_hooks[-1] = dict(type=LengthCurriculumHook, schedule=[(0, 8), (1, 9)])
    with pytest.raises(ConfigError, match="with LengthCurriculumHook, got None; use a mamba_"):
        check_packed_training(template, args)
    template.custom_hooks[-1] = dict(type=LengthCurriculumHook, schedule=[(0, 9), (1, 8)])
    message = r"^custom_hooks\[3\]: schedule must be .*, got \[\(0, 9\), \(1, 8\)\]; such as"
    with pytest.raises(ConfigError, match=message):
        check_packed_training(template, args)


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("dataset", "process_packed_dataset"),
        ("dataset", "process_document_dataset"),
        ("collate_fn", "packed_collate_fn"),
        ("collate_fn", "padded_collate_fn"),
        ("batch_sampler", "None"),
    ],
)
def test_carried_chunks_that_a_config_has_half_of_are_refused(
    write_config, tiny, args, monkeypatch, part, other
):
    monkeypatch.chdir(tiny)
    name = "mamba_130m_pretrain_jsonl_fixed_chunk_carried"
    settings = dict(pretrained_model_name_or_path=str(tiny / "model"), data_files="data/*.json")
    carried = Config.fromfile(write_config(name, **settings))
    assert check_packed_training(carried, args)
    if other == "None":
        carried.train_dataloader[part] = None
    else:
        carried.train_dataloader[part].type = f"xtuner_mamba.dataset.{other}"
    with pytest.raises(ConfigError, match=f"must come together, got .*{part} {other}[, ].*; see "):
        check_packed_training(carried, args)


@pytest.mark.parametrize(
    ("loader", "dataset", "packing"),
    [
        ("train_dataloader", process_packed_dataset, "'best_fit'"),
        ("val_dataloader", process_packed_dataset, "'best_fit'"),
        ("train_dataloader", process_hf_dataset, "None"),
    ],
)
def test_packs_are_not_taken_for_documents(write_config, tiny, args, loader, dataset, packing):
    path = write_config(
        "mamba_130m_full_alpaca_e3_bucket", pretrained_model_name_or_path=str(tiny / "model")
    )
    bucket = Config.fromfile(path)
    bucket[loader] = copy.deepcopy(bucket.train_dataloader)
    bucket[loader].dataset.type = dataset
    bucket[loader].dataset.pop("too_long")
    message = (
        f"^packing must be 'wrap', .* with padded_collate_fn, got {packing} in the "
        f"{dataset.__name__} of {loader}: .*; use packed_collate_fn"
    )
    with pytest.raises(ConfigError, match=message):
        check_packed_training(bucket, args)
    bucket[loader].dataset.type = process_packed_dataset
    bucket[loader].dataset.packing = "wrap"
    assert check_packed_training(bucket, args)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"train_dataloader.collate_fn.type": "packed_collate_fn"},
            "^model, .* got PackedDPO, process_preference_dataset, packed_collate_fn; DPO, ORPO",
        ),
        (
            {"model.type": "PackedSupervisedFinetune"},
            "got PackedSupervisedFinetune, process_preference_dataset, preference_packed_co.*; DPO",
        ),
        (
            {"train_dataloader.dataset.is_dpo": False, "train_dataloader.dataset.is_reward": True}
            | {"train_dataloader.dataset.reward_token_id": 0},
            "^is_reward must .*, got True with PackedDPO; set it",
        ),
        ({"model.type": "PackedRewardModel"}, "^is_reward .*, got False with PackedRewardModel; "),
    ],
)
def test_pairs_and_what_compares_them_come_together(write_config, tiny, args, option, message):
    path = write_config(
        "mamba_1_4b_dpo_full_varlen", pretrained_model_name_or_path=str(tiny / "model")
    )
    pairs = Config.fromfile(path)
    assert check_packed_training(pairs, args)
    pairs.merge_from_dict(option)
    with pytest.raises(ConfigError, match=message):
        check_packed_training(pairs, args)


def count_tokens(cfg):
    """Have a config step after so many tokens, as docs/lengths.md shows."""
    for name in ("accumulative_counts", "loss_scale"):
        del cfg.optim_wrapper[name]
    cfg.optim_wrapper.merge(
        dict(type=TokenAccumulationOptimWrapper, tokens_per_step=4096, dtype="bfloat16")
    )
    cfg.train_cfg = dict(type=TokenStepLoop, max_iters=10)
    cfg.param_scheduler = [dict(type="LinearLR", by_epoch=False, end=5)]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"optim_wrapper.accumulative_counts": 4},
            "^optim_wrapper: accumulative_counts must be left out .*, got 4; tokens_per_step",
        ),
        (
            {"optim_wrapper.tokens_per_step": 0},
            "^optim_wrapper: tokens_per_step must be an integer of at least 1, got 0$",
        ),
        ({"optim_wrapper.dtype": "float16"}, "^optim_wrapper: dtype must .*, got 'float16'; "),
        (
            {"optim_wrapper.loss_scale": 1.0},
            "^optim_wrapper: TokenAccumulationOptimWrapper .* got 'loss_scale'; it has optimizer",
        ),
        (
            {"optim_wrapper.type": "AmpOptimWrapper"},
            "together, got optim_wrapper AmpOptimWrapper and train_cfg TokenStepLoop; set both",
        ),
        ({"train_cfg.max_iters": None}, "^train_cfg: max_iters must .*, got None and {}; an epoch"),
        ({"train_cfg.max_iters": "2k"}, "^train_cfg: max_iters must .* at least 1, got '2k'$"),
        ({"train_cfg.val_intervall": 9}, "^train_cfg: .*, got 'val_intervall'; write 'val_interv"),
        (
            {"param_scheduler.0.by_epoch": True},
            r"^train_cfg: param_scheduler must .*, got epochs in {.*'end': 5.*}; set by_epoch",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_steps_of_tokens_are_checked_before_anything_is_built(template, args, option, message):
    count_tokens(template)
    assert check_packed_training(template, args)
    template.merge_from_dict(option)
    with pytest.raises(ConfigError, match=message):
        check_packed_training(template, args)


def test_wrapper_that_counts_tokens_needs_the_loop_that_tells_it(template, args):
    train_cfg = template.train_cfg
    count_tokens(template)
    template.train_cfg = train_cfg
    message = "got optim_wrapper TokenAccumulationOptimWrapper and train_cfg TrainLoop; set both"
    with pytest.raises(ConfigError, match=message):
        check_packed_training(template, args)


def test_tokens_are_not_counted_for_a_loss_over_pairs(write_config, tiny, args):
    path = write_config(
        "mamba_1_4b_dpo_full_varlen", pretrained_model_name_or_path=str(tiny / "model")
    )
    pairs = Config.fromfile(path)
    count_tokens(pairs)
    with pytest.raises(ConfigError, match=r"pairs, got TokenAcc.*Wrapper with PackedDPO; use Amp"):
        check_packed_training(pairs, args)


def test_token_accumulation_is_refused_with_deepspeed(template, args):
    count_tokens(template)
    assert check_packed_training(template, args)
    args.deepspeed = "deepspeed_zero2"
    with pytest.raises(ConfigError, match=r"--deepspeed, got deepspeed_zero2, which .*; train"):
        check_packed_training(template, args)


def test_epochs_counted_by_mmengine_are_refused(template, args):
    template.train_cfg = dict(by_epoch=True, max_epochs=1)
    with pytest.raises(ConfigError, match=r"iteration.*, got EpochBasedTrainLoop; use"):
        check_packed_training(template, args)
    template.train_cfg = dict(by_epoch=False, max_iters=1)
    assert check_packed_training(template, args)


def test_dataset_of_xtuner_is_checked_like_ours_that_it_becomes(stock, args):
    assert type_name(stock.train_dataloader.dataset) == "process_hf_dataset"
    assert check_packed_training(stock, args)
    several = dict(type="ConcatDataset", datasets=[stock.train_dataloader.dataset])
    several["datasets"][0]["max_dataset_length"] = -1
    stock.train_dataloader.dataset = several
    message = r"^train_dataloader.dataset.datasets\[0\]: max_dataset_length must be .*, got -1; "
    with pytest.raises(ConfigError, match=message):
        check_packed_training(stock, args)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(n_layer=1, n_embd=8, n_head=2), r"GPT2LMHeadModel .* none for \['GPT2\w+'\]; "),
        (
            LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2),
            r"flash-attn must .* \['LlamaAttention'\] in LlamaForCausalLM, got none; ",
        ),
        (
            MistralConfig(
                num_hidden_layers=1,
                hidden_size=8,
                num_attention_heads=2,
                num_key_value_heads=1,
                attention_dropout=0.1,
            ),
            r"attention_dropout of MistralAttention must be 0 .* got 0.1; load",
        ),
    ],
    ids=["nobody", "flash-attn", "dropout"],
)
def test_model_without_a_varlen_path_is_named(
    template, args, tmp_path, monkeypatch, config, message
):
    monkeypatch.setattr("xtuner.model.modules.dispatch.SUPPORT_FLASH2", False)
    # stands for a model that XTuner alone has a path for
    monkeypatch.delitem(DISPATCH_TABLE, "LlamaAttention")
    config.save_pretrained(tmp_path / "other")
    template.model.llm.pretrained_model_name_or_path = str(tmp_path / "other")
    with pytest.raises(ConfigError, match=message):
        check_packed_training(template, args)
    # the weights were never looked for
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["config.json"]


def test_model_of_xtuner_with_flash_attn_is_its_business(template, args, tmp_path, monkeypatch):
    monkeypatch.setattr("xtuner.model.modules.dispatch.SUPPORT_FLASH2", True)
    monkeypatch.delitem(DISPATCH_TABLE, "LlamaAttention")
    config = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2)
    config.save_pretrained(tmp_path / "other")
    template.model.llm.pretrained_model_name_or_path = str(tmp_path / "other")
    assert check_packed_training(template, args) is False
    # so is a dataset of XTuner's, but not one of ours
    template.train_dataloader.dataset.shuffel = True
    with pytest.raises(ConfigError, match="unexpected keyword argument 'shuffel'"):
        check_packed_training(template, args)
    template.train_dataloader.dataset.type = "process_hf_dataset"
    assert check_packed_training(template, args) is False


def test_model_of_a_size_that_fits_nowhere_is_looked_at(template, args, tmp_path):
    config = MambaConfig(hidden_size=2**17, num_hidden_layers=2, state_size=16)
    config.save_pretrained(tmp_path / "huge")
    template.model.llm.pretrained_model_name_or_path = str(tmp_path / "huge")
    assert check_packed_training(template, args) is True


@pytest.mark.parametrize("with_deepspeed", [True, False], ids=["deepspeed", "plain"])
def test_checkpoints_of_the_other_kind_are_told(template, args, tmp_path, with_deepspeed):
    args.deepspeed = "deepspeed_zero2" if with_deepspeed else None
    work_dir = tmp_path / "work"
    (work_dir / "iter_4.pth").mkdir(parents=True)
    (work_dir / "iter_8.pth").touch()
    wrong = "iter_8.pth" if with_deepspeed else "iter_4.pth"
    with pytest.raises(ConfigError, match=rf"work_dir must not .* got \['{wrong}'\] in .*/work, "):
        check_packed_training(template, args)
    template.work_dir, args.work_dir = str(work_dir), str(tmp_path / "another")
    assert check_packed_training(template, args)


def test_run_without_varlen_is_plain_xtuner(write_config, args, logged, monkeypatch):
    monkeypatch.setattr("xtuner.utils.device.get_device_name", lambda: "cuda")
    cfg = Config.fromfile(write_config(STOCK, batch_size=4, pack_to_max_length=False))
    before = cfg.to_dict()
    run_check(cfg, args)
    assert cfg.to_dict() == before
    assert logged == []


def run_check(cfg, args, **script):
    """Call XTuner's check_cfg as ``xtuner train`` does, with ours before it."""
    train = importlib.import_module("xtuner.tools.train")
    script = {**vars(train), "SUPPORT_FLASH2": False, **script}
    check_xtuner = type(train.check_cfg)(train.check_cfg.__code__, script)
    CheckCfg(check_xtuner, script)(cfg, args)
    assert script["SUPPORT_FLASH2"] is False
    return script


def test_stock_config_is_made_exact(stock, args, logged, monkeypatch):
    monkeypatch.setattr("xtuner.utils.device.get_device_name", lambda: "cuda")
    run_check(stock, args)
    assert type_name(stock.model) == "PackedSupervisedFinetune"
    assert type_name(stock.train_dataloader.dataset) == "process_packed_dataset"
    assert stock.train_dataloader.dataset.packing == "wrap"
    assert dict(stock.train_dataloader.collate_fn).keys() == {"type"}
    assert type_name(stock.train_dataloader.collate_fn) == "packed_collate_fn"
    hooks = [type_name(hook) for hook in stock.custom_hooks]
    assert "PackedLayoutHook" in hooks
    assert "VarlenAttnArgsToMessageHubHook" not in hooks
    constructor = stock.optim_wrapper.constructor
    assert constructor.__name__ == "MambaOptimWrapperConstructor"
    # nothing else, each told, and the result can be dumped and read
    assert type_name(stock.optim_wrapper) == "AmpOptimWrapper"
    assert len(logged) == 5
    assert Config.fromstring(stock.pretty_text, ".py").model.type.endswith(
        ".PackedSupervisedFinetune"
    )


def test_config_of_ours_is_left_as_it_is(template, args, logged, monkeypatch):
    monkeypatch.setattr("xtuner.utils.device.get_device_name", lambda: "cuda")
    before = template.to_dict()
    run_check(template, args)
    assert template.to_dict() == before
    assert logged == []


def test_config_that_a_run_has_dumped_trains_again(template, args, logged, monkeypatch):
    monkeypatch.setattr("xtuner.utils.device.get_device_name", lambda: "cuda")
    dumped = Config.fromstring(template.pretty_text, ".py")
    assert isinstance(dumped.model.llm.type, str)
    run_check(dumped, args)
    assert logged == []


def test_other_trainings_than_sft_are_left_as_they_are(stock, args, logged, monkeypatch):
    monkeypatch.setattr("xtuner.utils.device.get_device_name", lambda: "cuda")
    stock.model.type = "xtuner.model.LLaVAModel"
    before = stock.to_dict()
    run_check(stock, args)
    assert stock.to_dict() == before
    assert logged == []


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ("internlm2_chat_1_8b_dpo_full_varlenattn", "PackedDPO"),
        ("internlm2_chat_1_8b_orpo_full_varlenattn", "PackedORPO"),
        ("internlm2_chat_1_8b_reward_full_varlenattn_ultrafeedback", "PackedRewardModel"),
    ],
)
def test_preference_config_of_xtuner_gets_our_parts(
    write_config, tiny, args, monkeypatch, config, model
):
    monkeypatch.setattr("xtuner.utils.device.get_device_name", lambda: "cuda")
    cfg = Config.fromfile(write_config(config, pretrained_model_name_or_path=str(tiny / "model")))
    run_check(cfg, args)
    loader = cfg.train_dataloader
    parts = [cfg.model, loader.dataset, loader.collate_fn]
    assert [type_name(part) for part in parts] == [
        model,
        "process_preference_dataset",
        "preference_packed_collate_fn",
    ]
    assert "PackedLayoutHook" in map(type_name, cfg.custom_hooks)
    assert loader.dataset.too_long == "drop"
    # and now its arguments are ours to check
    loader.dataset.is_reference = True
    with pytest.raises(SystemExit, match="unexpected keyword argument 'is_reference'; they are"):
        run_check(cfg, args)


REWARD = "internlm2_chat_1_8b_reward_full_varlenattn_ultrafeedback"


def test_reward_model_that_nothing_can_save_is_refused(write_config, args, tmp_path):
    config = FalconMambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=8)
    config.save_pretrained(tmp_path / "other")
    path = write_config(REWARD, pretrained_model_name_or_path=str(tmp_path / "other"))
    with pytest.raises(SystemExit, match="classification, got FalconMambaForCausalLM, for which"):
        run_check(Config.fromfile(path), args)


def test_reward_token_that_the_model_does_not_have_is_refused(write_config, tiny, args):
    cfg = Config.fromfile(write_config(REWARD, pretrained_model_name_or_path=str(tiny / "model")))
    size = MambaConfig.from_pretrained(tiny / "model").vocab_size
    cfg.model.reward_token_id = size
    with pytest.raises(SystemExit, match=f"below the model's vocabulary of {size}, got {size}; "):
        run_check(cfg, args)
    dataset = cfg.train_dataloader.dataset
    cfg.model.reward_token_id = dataset.reward_token_id = size - 1
    run_check(cfg, args)
    dataset.reward_token_id = 1
    message = rf"the same in the model and in train_dataloader.dataset, got {size - 1} and 1; set"
    with pytest.raises(SystemExit, match=message):
        run_check(cfg, args)
    # nothing is saved with the model then
    del cfg.model["reward_token_id"]
    run_check(cfg, args)


def test_model_that_is_no_causal_lm_is_refused(template, args, tmp_path):
    T5Config(d_model=8, num_layers=1, num_heads=2).save_pretrained(tmp_path / "other")
    template.model.llm.pretrained_model_name_or_path = str(tmp_path / "other")
    with pytest.raises(SystemExit, match=r"causal language model, .* model_type 't5'") as info:
        run_check(template, args)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("script", "varlen", "model"),
    [
        ("pth_to_hf.py", True, "PackedRewardModel"),
        ("pth_to_hf.py", False, "RewardModel"),
        ("train.py", True, "RewardModel"),
    ],
)
def test_converter_builds_what_was_trained(
    pristine, write_config, tiny, monkeypatch, script, varlen, model
):
    path = write_config(REWARD, pretrained_model_name_or_path=str(tiny / "model"))
    cfg = Config.fromfile(path)
    cfg.model.use_varlen_attn = varlen
    registry = pristine("xtuner.registry")
    monkeypatch.setattr(registry.BUILDER, "build", type_name)
    build_what_was_trained(registry)
    monkeypatch.setattr("sys.argv", [f"folder/{script}"])
    assert registry.BUILDER.build(cfg.model) == model


def test_converter_leaves_a_model_that_cannot_train_here_to_xtuner(
    write_config, tmp_path, monkeypatch
):
    GPT2Config(n_layer=1, n_embd=8, n_head=2).save_pretrained(tmp_path / "other")
    path = write_config(STOCK, pretrained_model_name_or_path=str(tmp_path / "other"))
    cfg = Config.fromfile(path)
    cfg.model.use_varlen_attn = True
    config_rewrites.build_exactly(cfg.model)
    assert type_name(cfg.model) == "SupervisedFinetune"


def test_converter_is_what_the_patch_was_written_for(pristine):
    names = pristine("xtuner.tools.model_converters.pth_to_hf").main.__code__.co_names
    order = ["fromfile", "merge_from_dict", "BUILDER", "build", "to_hf"]
    assert [name for name in names if name in order] == order


def test_groups_that_the_user_chose_are_kept(stock, args, logged, monkeypatch):
    monkeypatch.setattr("xtuner.utils.device.get_device_name", lambda: "cuda")
    stock.optim_wrapper.paramwise_cfg = dict(norm_decay_mult=0.0)
    run_check(stock, args)
    assert "constructor" not in stock.optim_wrapper


def test_refusal_is_one_paragraph(template, args):
    template.train_dataloader.batch_size = 3
    with pytest.raises(SystemExit, match=r"^copy.py: batch_size must be 1 .*, got 3; ") as info:
        run_check(template, args)
    assert info.value.__suppress_context__
    assert "\n" not in str(info.value)


def test_rules_of_xtuner_hold_after_ours(template, args):
    template.model.llm.attn_implementation = "eager"
    with pytest.raises(AssertionError, match="attn_implementation"):
        run_check(template, args)


def test_flash_attn_is_asked_for_where_we_have_no_forward(template, args):
    # built by something else than from_pretrained, so nobody knows its layers before
    template.model.llm = dict(type=torch.nn.Linear, in_features=1, out_features=1)
    with pytest.raises(AssertionError, match="flash_attn"):
        run_check(template, args)


def test_train_script_gets_our_check(pristine):
    from xtuner_mamba.integration.train import check_before_building

    utils = pristine("xtuner.tools.utils")
    check_before_building(utils)
    script = {"check_cfg": print, "set_model_resource": utils.set_model_resource}
    exec("def main(cfg):\n    set_model_resource(cfg)\n    return check_cfg", script)
    ours = script["main"](Config())
    assert isinstance(ours, CheckCfg)
    assert script["main"](Config()) is ours


def test_train_script_is_what_the_patch_was_written_for(pristine):
    names = pristine("xtuner.tools.train").main.__code__.co_names
    order = ["fromfile", "set_model_resource", "merge_from_dict", "check_cfg", "from_cfg"]
    assert [name for name in names if name in order] == order
    assert {"auto_dtype_of_deepspeed_config", "optim_wrapper"} <= set(names)


@pytest.mark.parametrize("launcher", ["none", "pytorch"])
def test_machine_without_a_gpu_is_fitted(stock, args, logged, monkeypatch, launcher):
    monkeypatch.setattr("xtuner.utils.device.get_device_name", lambda: "cpu")
    args.launcher = launcher
    config_rewrites.fit_cpu(stock, args)
    assert type_name(stock.optim_wrapper) == "OptimWrapper"
    assert {"dtype", "loss_scale"}.isdisjoint(stock.optim_wrapper)
    assert stock.optim_wrapper.accumulative_counts == 16
    several = launcher == "pytorch"
    assert stock.env_cfg.dist_cfg.backend == ("gloo" if several else "nccl")
    assert ("model_wrapper_cfg" in stock) is several
    if several:
        assert stock.model_wrapper_cfg.device_ids is None
    assert len(logged) == (3 if several else 1)


def test_wrapper_of_deepspeed_is_left_to_it(stock, args, logged, monkeypatch):
    monkeypatch.setattr("xtuner.utils.device.get_device_name", lambda: "cpu")
    args.launcher, args.deepspeed = "pytorch", "deepspeed_zero2"
    stock.pop("env_cfg")
    config_rewrites.fit_cpu(stock, args)
    assert "model_wrapper_cfg" not in stock
    assert stock.env_cfg.dist_cfg.backend == "gloo"
