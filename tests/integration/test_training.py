"""``xtuner train`` and ``xtuner convert`` as a user runs them, on processes without a GPU.

One training, six ways: alone, resumed, with two processes under MMEngine, and under DeepSpeed's
three ZeRO stages. All take the same documents in every optimizer step, so all must end at the
same weights.
"""

import re
import socket
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaConfig, MambaForCausalLM
from xtuner.utils.zero_to_any_dtype import get_state_dict_from_zero_checkpoint

NUM_STEPS = 4
# the same documents in a step: two rows, by one process or by two
ALONE = dict(accumulative_counts=2, max_iters=2 * NUM_STEPS)
BY_TWO = dict(accumulative_counts=1, max_iters=NUM_STEPS)
ON_CPU = dict(DS_ACCELERATOR="cpu")


@pytest.fixture(scope="module")
def train(xtuner, write_config, tiny, tmp_path_factory):
    """Run ``xtuner train`` on a copy of a template; its work_dir and what it printed."""
    config = write_config(
        "mamba_130m_full_alpaca_e3_varlen",
        pretrained_model_name_or_path=str(tiny / "model"),
        data_path=str(tiny / "data"),
        max_length=512,
        dataloader_num_workers=0,
        lr=1e-2,
        save_steps=NUM_STEPS,
        weight_decay=0.1,
        save_total_limit=-1,
    )
    # packs drawn anew, from a sampler that is to know its ranks with DeepSpeed and without
    text = config.read_text()
    assert text.count("DefaultSampler") == 2
    text = text.replace(
        "from mmengine.dataset import Default", "from xtuner_mamba.dataset import Redraw"
    )
    text = text.replace("DefaultSampler", "RedrawSampler")
    # a constant rate, since schedules count micro-batches and not optimizer steps
    config.write_text(text + "\nparam_scheduler = None\n")

    def run(*arguments, accumulative_counts, max_iters, model=(), **environment):
        work_dir = tmp_path_factory.mktemp("work_dir")
        done = xtuner(
            *("train", str(config), "--work-dir", str(work_dir), "--seed", "0", *arguments),
            "--cfg-options",
            "train_cfg.max_epochs=None",
            f"train_cfg.max_iters={max_iters}",
            f"optim_wrapper.accumulative_counts={accumulative_counts}",
            "custom_hooks.2.max_new_tokens=2",
            *(f"model.{option}" for option in model),
            **environment,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return work_dir, done.stdout + done.stderr

    run.config = config
    return run


@pytest.fixture(scope="module")
def alone(train):
    return train(**ALONE)[0] / f"iter_{2 * NUM_STEPS}.pth"


@pytest.fixture(scope="module")
def convert(xtuner, train, tmp_path_factory):
    def run(checkpoint: Path) -> Path:
        folder = tmp_path_factory.mktemp("converted")
        done = xtuner(
            "convert", "pth_to_hf", str(train.config), str(checkpoint), str(folder), "--fp32"
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return run


def two_processes() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return dict(NPROC_PER_NODE="2", PORT=str(free.getsockname()[1]))


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, weights_only=False)["state_dict"]


def assert_same_training(actual: dict, expected: dict, initial: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, trained in expected.items():
        moved = (trained - initial[name]).abs().max()
        difference = (actual[name] - trained).abs().max()
        # Adam's steps do not shrink with the gradient, so all parameters moved by about the rate
        assert moved > 1e-2, name
        assert difference < 1e-3 * moved, f"{name}: {difference:.1e} of {moved:.1e}"


@pytest.fixture(scope="module")
def initial(tiny):
    model = MambaForCausalLM.from_pretrained(tiny / "model")
    return {f"llm.{name}": value for name, value in model.state_dict().items()}


def test_converted_model_is_the_trained_one_bit_by_bit(alone, convert, tiny, initial):
    folder = convert(alone)
    model = AutoModelForCausalLM.from_pretrained(folder)
    trained = MambaForCausalLM(MambaConfig.from_pretrained(tiny / "model")).eval()
    trained.load_state_dict({name[4:]: value for name, value in weights(alone).items()})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    input_ids = tokenizer("the cat sat on a mat", return_tensors="pt").input_ids
    assert input_ids.shape == (1, 20)
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, trained(input_ids).logits)
        untrained = MambaForCausalLM.from_pretrained(tiny / "model")
        assert not torch.equal(untrained(input_ids).logits, trained(input_ids).logits)


def test_resumed_training_ends_at_the_same_bits(train, alone):
    work_dir, log = train("--resume", str(alone.with_name(f"iter_{NUM_STEPS}.pth")), **ALONE)
    assert f"Iter(train) [{NUM_STEPS}/" not in log
    resumed, expected = weights(work_dir / alone.name), weights(alone)
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
    assert not torch.equal(
        weights(alone.with_name(f"iter_{NUM_STEPS}.pth"))["llm.lm_head.weight"],
        expected["llm.lm_head.weight"],
    )


def test_two_processes_take_the_same_steps_as_one(train, alone, initial):
    work_dir, _ = train(**BY_TWO, **two_processes())
    assert_same_training(weights(work_dir / f"iter_{NUM_STEPS}.pth"), weights(alone), initial)


def test_fused_training_under_zero3_does_without_what_cannot_work(train, alone, initial):
    fused = ("fuse_norm=True", "fuse_loss=True", "recompute=True")
    work_dir, log = train(
        *("--deepspeed", "deepspeed_zero3"),
        model=(*fused, "use_activation_checkpointing=False"),
        **ALONE,
        **ON_CPU,
    )
    assert log.count("ZeRO-3 gathers the head for its own forward only") == 1
    checkpoint = get_state_dict_from_zero_checkpoint(
        str(work_dir), tag=alone.name, dtype=torch.float32
    )
    assert_same_training(checkpoint, weights(alone), initial)


# ZeRO-3 needs its process group while the model is built, the others after it
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_in_one_process_accumulates_and_resumes(train, alone, initial, stage):
    options = ("--deepspeed", f"deepspeed_zero{stage}")
    half, log = train(*options, accumulative_counts=2, max_iters=NUM_STEPS, **ON_CPU)
    assert "shm_comm" not in log, "a compiler was asked for"
    resume = ("--resume", str(half / f"iter_{NUM_STEPS}.pth"))
    work_dir, log = train(*options, *resume, **ALONE, **ON_CPU)
    assert "Resume checkpoint from" in log
    checkpoint = get_state_dict_from_zero_checkpoint(
        str(work_dir), tag=alone.name, dtype=torch.float32
    )
    assert_same_training(checkpoint, weights(alone), initial)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_takes_the_same_steps_and_converts(train, convert, alone, initial, stage):
    work_dir, log = train(
        "--deepspeed", f"deepspeed_zero{stage}", **BY_TWO, **two_processes(), **ON_CPU
    )
    assert "shm_comm" not in log, "a compiler was asked for"
    checkpoint = work_dir / f"iter_{NUM_STEPS}.pth"
    assert checkpoint.is_dir()
    model = AutoModelForCausalLM.from_pretrained(convert(checkpoint))
    converted = {f"llm.{name}": value for name, value in model.state_dict().items()}
    assert_same_training(converted, weights(alone), initial)


def test_stock_config_trains_with_the_model_and_the_flag_changed(
    xtuner, write_config, tiny, tmp_path, initial
):
    config = write_config(
        "llama3_8b_full_alpaca_e3",
        pretrained_model_name_or_path=str(tiny / "model"),
        use_varlen_attn=True,
        alpaca_en_path=str(tiny / "data"),
    )
    done = xtuner(
        *("train", str(config), "--work-dir", str(tmp_path)),
        # a constant rate, since the warm-up is longer than this training
        *("--cfg-options", "custom_hooks.1.max_new_tokens=2", "param_scheduler=None"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    log = done.stdout + done.stderr
    assert "SupervisedFinetune -> PackedSupervisedFinetune" in log
    assert "VarlenAttnArgsToMessageHubHook -> PackedLayoutHook" in log
    losses = [float(loss) for loss in re.findall(r"loss: (\S+)", log)]
    checkpoint = tmp_path / (tmp_path / "last_checkpoint").read_text().strip().rpartition("/")[2]
    trained = weights(checkpoint)
    assert all(not torch.equal(trained[name], value) for name, value in initial.items())
    assert len(losses) >= 3


def test_refusal_ends_with_a_paragraph_and_a_failure(xtuner, train):
    done = xtuner("train", str(train.config), "--cfg-options", "train_dataloader.batch_size=2")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"{train.config}: batch_size must be 1 ")
