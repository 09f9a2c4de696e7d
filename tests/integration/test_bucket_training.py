"""``xtuner train`` on buckets, resumed in the middle of an epoch, by two processes."""

import re
import socket

import torch

SAVED, END = 6, 12


def test_resuming_within_an_epoch_gives_the_same_bits(xtuner, write_config, tiny, tmp_path):
    config = write_config(
        "mamba_130m_full_alpaca_e3_bucket",
        pretrained_model_name_or_path=str(tiny / "model"),
        data_path=str(tiny / "data"),
        boundaries=[128, 192, 256, 512],
        tokens_per_batch=1024,
        sampling="stratified",
        dataloader_num_workers=0,
        accumulative_counts=2,
        max_epochs=1,
        save_steps=SAVED,
        lr=1e-2,
    )
    config.write_text(config.read_text() + "\nparam_scheduler = None\n")

    def train(name, *arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        done = xtuner(
            *("train", str(config), "--work-dir", str(tmp_path / name), "--seed", "0", *arguments),
            *("--cfg-options", "train_cfg.max_epochs=None", f"train_cfg.max_iters={END}"),
            "custom_hooks.2.max_new_tokens=2",
            NPROC_PER_NODE="2",
            PORT=port,
        )
        log = done.stdout + done.stderr
        assert done.returncode == 0, log[-3000:]
        saved = torch.load(tmp_path / name / f"iter_{END}.pth", weights_only=False)
        return saved["state_dict"], log

    whole, log = train("whole")
    steps = int(re.search(r"([\d,]+) steps an epoch, sampling stratified", log)[1])
    assert steps - 1 > SAVED, "the checkpoint is to be within the first epoch"
    assert steps < END, "the end is to be in the second"
    checkpoint = tmp_path / "whole" / f"iter_{SAVED}.pth"
    resumed, log = train("resumed", "--resume", str(checkpoint))
    assert f"Advance dataloader {SAVED} steps" in log
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    saved = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert not torch.equal(saved["llm.lm_head.weight"], whole["llm.lm_head.weight"])
