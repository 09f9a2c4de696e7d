"""LoRA and DPO through ``xtuner train`` and ``xtuner convert``, on a machine without a GPU."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaForCausalLM

from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.testing import relative_rms

STEPS = 3


@pytest.fixture(scope="module")
def run(xtuner):
    def run(*arguments: object) -> str:
        done = xtuner(*map(str, arguments))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def train(run, tmp_path_factory):
    """Run ``xtuner train`` for a few steps; its checkpoint and its log."""

    def train(config: Path) -> tuple[Path, str]:
        config.write_text(config.read_text() + "\nparam_scheduler = None\n")
        work_dir = tmp_path_factory.mktemp("work_dir")
        log = run(
            *("train", config, "--work-dir", work_dir, "--seed", 0, "--cfg-options"),
            *("train_cfg.max_epochs=None", f"train_cfg.max_iters={STEPS}"),
            *("custom_hooks.2.max_new_tokens=2", "default_hooks.logger.interval=1"),
        )
        return work_dir / f"iter_{STEPS}.pth", log

    return train


def logits_of(model, folder) -> torch.Tensor:
    input_ids = AutoTokenizer.from_pretrained(folder)("the cat sat on a mat", return_tensors="pt")
    with torch.no_grad():
        return model(input_ids.input_ids).logits


def test_lora_trains_converts_and_merges(run, train, write_config, tiny, tmp_path):
    targets = ["in_proj", "x_proj", "dt_proj", "out_proj", "embeddings"]
    config = write_config(
        "mamba_1_4b_lora_alpaca_e3_varlen",
        pretrained_model_name_or_path=str(tiny / "model"),
        data_path=str(tiny / "data"),
        max_length=512,
        accumulative_counts=1,
        dataloader_num_workers=0,
        lora_r=4,
        lora_dropout=0.0,
        lr=1e-1,
        save_steps=STEPS,
    )
    config.write_text(config.read_text() + f'\nmodel["lora"]["target_modules"] = {targets}\n')
    checkpoint, _ = train(config)
    saved = torch.load(checkpoint, weights_only=False)["state_dict"]
    # of two layers, and the embeddings
    assert len(saved) == 2 * (2 * (len(targets) - 1) + 1)
    assert all("lora_" in name for name in saved)

    run("convert", "pth_to_hf", config, checkpoint, tmp_path / "adapter", "--fp32")
    run("convert", "merge", tiny / "model", tmp_path / "adapter", tmp_path / "merged")
    base = MambaForCausalLM.from_pretrained(tiny / "model")
    before = logits_of(base, tiny / "model")
    dispatch_packed(base)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    exact = logits_of(adapted, tiny / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", torch_dtype=torch.float32)
    # XTuner merges and saves in float16
    assert relative_rms(logits_of(merged, tmp_path / "merged"), exact) < 5e-3
    assert relative_rms(before, exact) > 0.1


def test_dpo_learns_to_prefer(train, write_config, tiny, tmp_path):
    rows = json.loads((tiny / "data" / "train.json").read_text())
    pairs = [
        {
            name: [
                {"role": "user", "content": row["instruction"]},
                {"role": "assistant", "content": answer},
            ]
            for name, answer in (("chosen", row["output"]), ("rejected", row["output"][::-1]))
        }
        for row in rows
    ]
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "train.json").write_text(json.dumps(pairs))
    config = write_config(
        "mamba_1_4b_dpo_full_varlen",
        pretrained_model_name_or_path=str(tiny / "model"),
        data_path=str(tmp_path / "pairs"),
        max_length=512,
        max_packed_length=2048,
        accumulative_counts=1,
        dataloader_num_workers=0,
        lr=1e-2,
        save_steps=STEPS,
    )
    _, log = train(config)
    losses = [float(loss) for loss in re.findall(r"\bloss: (\S+)", log)]
    margins = [float(margin) for margin in re.findall(r"reward_margin: (\S+)", log)]
    # the policy begins as the reference
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert margins[0] == pytest.approx(0, abs=1e-3)
    assert losses[-1] < losses[0] - 0.05
    assert margins[-1] > 0.1
    assert "0 pairs dropped as too long" in log
