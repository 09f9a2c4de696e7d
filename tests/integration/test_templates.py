"""Every template is read, built and trained for a step, without a network."""

import argparse
import copy
import re
from pathlib import Path

import attention_families
import datasets
import mixer_families
import pytest
import torch
import transformers
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from transformers import MambaForCausalLM, PreTrainedModel
from xtuner.tools.train import register_function

from xtuner_mamba.integration.config_checks import check_packed_training
from xtuner_mamba.integration.config_rewrites import fit_cpu, train_exactly
from xtuner_mamba.integration.templates import templates

DOCS = Path(__file__).parents[2] / "docs"
NAMES = sorted(templates())
FINE_TUNE = [name for name in NAMES if re.fullmatch("mamba_.*_full_alpaca_.*_varlen", name)]


def tiny_model(template: str, path: Path) -> PreTrainedModel:
    """Build what a template trains, or a Mamba."""
    for folder, model_type in (("llama", "llama"), ("qwen", "qwen2")):
        if f"/{folder}/" in templates()[template]:
            torch.manual_seed(0)
            return attention_families.make(model_type, "sdpa", vocab_size=264)
    for folder in ("falcon_mamba", "jamba", "zamba", "mamba2", "bamba"):
        if f"/{folder}/" in templates()[template]:
            torch.manual_seed(0)
            # the limits of the tests of a family would stop the gradient of many a step size
            no_limit = {"time_step_limit": (0.0, float("inf"))} if folder == "mamba2" else {}
            return getattr(mixer_families, f"make_{folder}")(vocab_size=264, **no_limit)
    return MambaForCausalLM.from_pretrained(path)


def make_pair(row: dict) -> dict:
    """Prefer an answer to itself backwards."""
    asked = {"role": "user", "content": row["instruction"]}
    answers = {"chosen": row["output"], "rejected": row["output"][::-1]}
    return {
        name: [asked, {"role": "assistant", "content": answer}] for name, answer in answers.items()
    }


def learns_at_once(name: str, template: str) -> bool:
    """Tell whether a parameter has a gradient in the first step: behind a zero it has none."""
    if "_reward_" in template:
        return name.startswith("v_head.")
    return "lora_A" not in name


@pytest.fixture
def offline(monkeypatch, tiny, tmp_path, request):
    """Give a tiny model, its tokenizer and a few rows for whatever a template names."""
    name = request.node.callspec.params["name"]
    monkeypatch.chdir(tmp_path)
    for folder in ("data", "demo/corpus"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "found.jsonl").write_text("not read")
    # here, since XTuner initialises nothing while it loads a model
    model = tiny_model(name, tiny / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny / "model")
    rows = datasets.load_dataset("json", data_dir=str(tiny / "data"), split="train")
    texts = datasets.Dataset.from_dict({"text": [4 * text for text in rows["output"]]})
    results = {
        transformers.AutoConfig: lambda: model.config,
        transformers.AutoTokenizer: lambda: tokenizer,
        transformers.AutoModelForCausalLM: lambda: copy.deepcopy(model),
    }
    for cls, result in results.items():
        method = classmethod(lambda cls, *_, result=result, **__: result())
        monkeypatch.setattr(cls, "from_pretrained", method)
    pairs = rows.map(make_pair, remove_columns=rows.column_names)
    by_path = {"json": texts, "tatsu-lab/alpaca": rows, "mlabonne/orpo-dpo-mix-40k": pairs}
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **_: by_path[path])


@pytest.mark.parametrize("name", NAMES)
def test_template_trains_a_step(offline, tmp_path, name):
    cfg = Config.fromfile(templates()[name])
    assert Path(cfg.filename).stem == name
    args = argparse.Namespace(config=name, work_dir=None, deepspeed=None, launcher="none")
    assert check_packed_training(cfg, args)
    before = cfg.to_dict()
    train_exactly(cfg)
    assert cfg.to_dict() == before, "a template of ours needs no change"

    fit_cpu(cfg, args)
    cfg.work_dir = str(tmp_path)
    # rows as short as the corpus is small, and one optimizer step
    if cfg.train_dataloader.dataset.type.__name__ == "process_preference_dataset":
        cfg.train_dataloader.dataset.update(max_packed_length=600, num_proc=1)
    else:
        cfg.train_dataloader.dataset.update(max_length=64, map_num_proc=1)
    if "batch_sampler" in cfg.train_dataloader:
        cfg.train_dataloader.batch_sampler.update(tokens_per_batch=256)
        if "max_length" in cfg.train_dataloader.batch_sampler:
            cfg.train_dataloader.batch_sampler.update(max_length=64)
    cfg.train_dataloader.update(num_workers=0)
    cfg.train_dataloader.pop("persistent_workers")
    cfg.train_cfg.update(max_epochs=None, max_iters=cfg.accumulative_counts)
    for hook in cfg.custom_hooks:
        if hook.type.__name__ == "EvaluateChatHook":
            hook.max_new_tokens = 2
    register_function(cfg._cfg_dict)
    runner = Runner.from_cfg(cfg)
    runner.train()

    assert isinstance(runner.optim_wrapper, OptimWrapper)
    assert runner.iter == cfg.accumulative_counts
    names = {parameter: name for name, parameter in runner.model.named_parameters()}
    for parameter, state in runner.optim_wrapper.optimizer.state.items():
        assert state["step"] == 1
        assert torch.isfinite(state["exp_avg"]).all()
        moves = bool(state["exp_avg"].abs().max() > 0)
        assert moves == learns_at_once(names[parameter], name), names[parameter]
    decays = {group["weight_decay"] for group in runner.optim_wrapper.optimizer.param_groups}
    assert decays == {0.0, cfg.weight_decay}
    assert runner.message_hub.get_scalar("train/loss").current() > 0


def test_sizes_differ_in_their_settings_alone():
    rests = {Path(templates()[name]).read_text().partition("# PART 2")[2] for name in FINE_TUNE}
    assert len(FINE_TUNE) == 6
    assert len(rests) == 1
    assert rests != {""}


@pytest.mark.parametrize("name", NAMES)
def test_docstring_names_the_command(name):
    text = Path(templates()[name]).read_text()
    assert f"xtuner train {name}\n" in text.split('"""')[1]


AIDS = {
    "mamba_130m_full_alpaca_e3_bucket": dict(
        log_throughput=True, exposure_freq=1, curriculum=[(0, 64), (1, 2048)]
    ),
    "mamba_130m_pretrain_jsonl_varlen": dict(
        log_throughput=True, exposure_freq=1, extrapolation_freq=2, held_out_files="data/*.jsonl"
    ),
}


@pytest.mark.parametrize("name", AIDS)
def test_training_aids_work_where_a_template_has_them(offline, write_config, tmp_path, name):
    cfg = Config.fromfile(write_config(name, max_length=64, accumulative_counts=1, **AIDS[name]))
    if "boundaries" in cfg:
        cfg.train_dataloader.batch_sampler.boundaries = [64]
    args = argparse.Namespace(config=name, work_dir=None, deepspeed=None, launcher="none")
    assert check_packed_training(cfg, args)
    fit_cpu(cfg, args)
    cfg.work_dir = str(tmp_path)
    cfg.train_dataloader.update(num_workers=0)
    cfg.train_dataloader.pop("persistent_workers")
    cfg.train_cfg.update(max_epochs=None, max_iters=2)
    cfg.param_scheduler = None
    cfg.custom_hooks = [hook for hook in cfg.custom_hooks if "Chat" not in hook.type.__name__]
    register_function(cfg._cfg_dict)
    runner = Runner.from_cfg(cfg)
    runner.train()
    for scalar in ("tokens_per_sec", "tflops", "packing_percent"):
        assert runner.message_hub.get_scalar(f"train/{scalar}").current() > 0
    assert list(runner.message_hub.get_info("exposure_history")) == [1, 2]
    pictures = {path.name for path in tmp_path.glob("*.png")}
    expected = {"exposure.png"}
    if "extrapolation_freq" in AIDS[name]:
        expected.add("length_extrapolation.png")
    assert pictures == expected


OF_PACKS = "mamba_130m_pretrain_jsonl_varlen"
OF_BUCKETS = "mamba_130m_full_alpaca_e3_bucket"
# what pages show besides examples, and the template that it goes with
BLOCKS = [
    (OF_BUCKETS if "LengthCurriculumHook" in block else OF_PACKS, block)
    for page in ("lengths.md", "data.md")
    for block in re.findall(r"```python\n(?!>>>)(.*?)```", (DOCS / page).read_text(), re.DOTALL)
]


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_what_the_pages_show_can_be_put_at_the_end_of_a_template(offline, tmp_path, name, block):
    (tmp_path / "held_out").mkdir()
    (tmp_path / "held_out" / "found.jsonl").write_text("not read")
    path = tmp_path / "copy.py"
    path.write_text(Path(templates()[name]).read_text() + block)
    cfg = Config.fromfile(path)
    args = argparse.Namespace(config=str(path), work_dir=None, deepspeed=None, launcher="none")
    assert check_packed_training(cfg, args)
    assert cfg.to_dict() != Config.fromfile(templates()[name]).to_dict()
    if "TokenStepLoop" in block:
        fit_cpu(cfg, args)
        cfg.work_dir = str(tmp_path)
        cfg.train_dataloader.dataset.update(max_length=64, map_num_proc=1)
        cfg.train_dataloader.update(num_workers=0)
        cfg.train_dataloader.pop("persistent_workers")
        cfg.optim_wrapper.tokens_per_step = 100
        cfg.train_cfg.max_iters = 2
        cfg.custom_hooks = cfg.custom_hooks[:1]
        register_function(cfg._cfg_dict)
        runner = Runner.from_cfg(cfg)
        runner.train()
        assert runner.message_hub.get_scalar("train/tokens_per_step").current() >= 100


def test_the_pages_show_what_can_be_put_there():
    assert len(BLOCKS) == 5


DIFFS = re.findall(r"```diff\n(.*?)```", (DOCS / "lengths.md").read_text(), re.DOTALL)


def apply_diff(diff: str, text: str) -> str:
    """Change what a page shows of a config; what stands for other lines ends in three dots."""
    for hunk in re.split(r"^ +\.\.\.\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(("name", "diff"), [(OF_PACKS, diff) for diff in DIFFS])
def test_the_pages_show_all_that_another_scheme_takes(offline, tmp_path, name, diff):
    path = tmp_path / "copy.py"
    text = Path(templates()[name]).read_text()
    path.write_text(apply_diff(diff, text.replace("max_length = 8192", "max_length = 2048")))
    args = argparse.Namespace(config=str(path), work_dir=None, deepspeed=None, launcher="none")
    assert check_packed_training(Config.fromfile(path), args)


def test_the_pages_show_two_changes_of_scheme():
    assert len(DIFFS) == 2
