"""``xtuner-mamba doctor``: every check finds its fault, and nothing in what is healthy."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from mmengine.runner import Runner, loops

from xtuner_mamba import cli
from xtuner_mamba.demo.checks import LeakTest
from xtuner_mamba.tools import label_checks, model_checks
from xtuner_mamba.tools.checkup import Finding, NotApplicable
from xtuner_mamba.tools.doctor import SYMPTOMS, find_line
from xtuner_mamba.tools.training import Training

CHECKS = {symptom.name: symptom.check for symptom in SYMPTOMS}
WITHOUT_HOOK = {"[dict(type=PackedLayoutHook)]": "[]"}


def examine(name, config, work_dir=None):
    return CHECKS[name](Training(config, work_dir))


def write_log(folder, losses, memory=None, name="20260101_000000", **columns):
    path = folder / "work_dir" / name / "vis_data"
    path.mkdir(parents=True)
    entries = [
        dict(lr=1e-3, loss=loss, iter=step, step=step, **columns)
        for step, loss in enumerate(losses, start=1)
    ]
    for entry, peak in zip(entries, memory or []):
        entry["memory"] = peak
    (path / "scalars.json").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder / "work_dir"


# -- the whole of it


def falling(steps=16):
    return [5 * 0.9**step for step in range(steps)]


@pytest.mark.parametrize("change", ["packs", "buckets", "carried", "conversations"])
def test_nothing_is_found_in_what_is_healthy(folder, write_config, capsys, change):
    work_dir = write_log(folder, falling(), memory=[100, 900, *[1000] * 14])
    assert cli.main(["doctor", write_config(change), "--work-dir", str(work_dir), "--json"]) == 0
    results = {result["check"]: result for result in json.loads(capsys.readouterr().out)["checks"]}
    assert list(results) == list(CHECKS)
    assert {result["status"] for result in results.values()} <= {"PASS", "SKIP"}
    assert all(result["symptom"] and result["detail"] for result in results.values())
    skipped = {name for name, result in results.items() if result["status"] == "SKIP"}
    assert skipped == (set() if change == "buckets" else {"bucket padding"})


def test_what_is_found_comes_with_its_remedy_and_the_line_to_change(write_config, capsys):
    config = write_config(WITHOUT_HOOK)
    assert cli.main(["doctor", config]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "boundary hook FAIL use_varlen_attn is True, and no hook of custom_hooks" in output
    assert "do: add dict(type=PackedLayoutHook) from xtuner_mamba.engine.hooks" in output
    number = 1 + Path(config).read_text().splitlines().index("custom_hooks = []")
    assert f"line: config.py:{number}: custom_hooks = []" in output
    # the model refuses to run without boundaries: that is no pass
    assert "state leak NOT RUN RuntimeError: " in output
    assert "1 failed, 1 could not run, 3 had nothing to check" in output


def test_a_check_that_could_not_run_is_no_pass(write_config, capsys):
    config = write_config("padded", {"type=process_document_dataset": "type=list"})
    assert cli.main(["doctor", config, "--json"]) == 2
    results = {result["check"]: result for result in json.loads(capsys.readouterr().out)["checks"]}
    assert results["label places"]["status"] == "NOT RUN"
    assert "must be built by process_packed_dataset" in results["label places"]["detail"]
    assert cli.main(["doctor", config]) == 2
    output = " ".join(capsys.readouterr().out.split())
    assert "padding labels NOT RUN as label places" in output


def test_a_config_that_is_not_there(folder, capsys):
    assert cli.main(["doctor", "nowhere.py"]) == 2
    assert "nowhere.py: " in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["doctor", "smoke"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model", "a config must set model, got none"),
        ("train_dataloader", "a config must set train_dataloader, got none"),
        ("optim_wrapper", "a config must set optim_wrapper, got none"),
        (None, "a config must be Python that runs, got SyntaxError: "),
    ],
)
def test_a_config_that_lacks_a_part(write_config, capsys, verb, name, message):
    config = write_config()
    rest = "x = (\n" if name is None else f"del {name}\n"
    Path(config).write_text(f"{Path(config).read_text()}\n{rest}")
    assert cli.main([verb, config]) == 2
    output = capsys.readouterr()
    assert f"config.py: {message}" in output.err
    assert not output.out


@pytest.mark.parametrize("verb", ["doctor", "smoke"])
def test_a_config_that_imports_what_is_not_there(write_config, capsys, verb):
    config = write_config("faulty packs")
    assert cli.main([verb, config]) == 2
    assert "config.py: Failed to import faulty in config.py, line " in capsys.readouterr().err


def test_a_line_is_found_by_the_name_of_its_setting(write_config):
    config = write_config()
    assert find_line(config, "lr").endswith(
        "optimizer=dict(type=AdamW, lr=1e-2, weight_decay=0.1),"
    )
    assert find_line(config, "boundaries") is None
    assert find_line(config, None) is None


# -- the log


def test_a_log_that_mmengine_wrote(folder, write_config, monkeypatch):
    monkeypatch.setattr(loops.time, "sleep", lambda seconds: None)
    config = write_config()
    training = Training(config)
    cfg = training.cfg
    cfg.work_dir = str(folder / "work_dir")
    cfg.log_level = "WARNING"
    Runner.from_cfg(cfg).train()
    assert isinstance(examine("loss falls", config, folder / "work_dir"), str)
    with pytest.raises(NotApplicable, match="the log has no memory"):
        examine("memory", config, folder / "work_dir")


def test_a_loss_that_does_not_fall(folder, write_config):
    draw = np.random.default_rng(0)
    work_dir = write_log(folder, (2 + 0.1 * draw.standard_normal(40)).tolist())
    found = examine("loss falls", write_config(), work_dir)
    assert isinstance(found, Finding)
    assert found.what.startswith("from 2.0")


def test_a_loss_that_is_no_number(folder, write_config):
    work_dir = write_log(folder, [3.0, 2.0, math.nan, math.nan])
    assert examine("loss falls", write_config(), work_dir).what == "the loss of step 3 is nan"


def test_the_newest_log_counts_and_half_a_line_at_its_end_does_not(folder, write_config):
    write_log(folder, [2.0] * 16, name="20260101_000000")
    work_dir = write_log(folder, falling(), name="20260102_000000")
    with next(work_dir.glob("20260102*/vis_data/scalars.json")).open("a") as file:
        file.write('{"val_loss": 3.0, "step": 16}\n{"lr": 0.001, "lo')
    assert examine("loss falls", write_config(), work_dir).startswith("from 4.")


def test_a_broken_line_of_a_log_is_named(folder, write_config):
    work_dir = write_log(folder, falling())
    (path,) = work_dir.glob("*/vis_data/scalars.json")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], '{"loss": 3.0, "st', *lines[4:]]))
    with pytest.raises(ValueError, match=r"JSON in every line, got .* in line 4 of .*scalars.json"):
        examine("loss falls", write_config(), work_dir)


def test_logs_that_tell_nothing(folder, write_config):
    config = write_config()
    with pytest.raises(NotApplicable, match="give --work-dir"):
        examine("loss falls", config)
    with pytest.raises(ValueError, match=r"scalars.json, which a training writes, got\s+none in"):
        examine("loss falls", config, folder / "empty")
    work_dir = write_log(folder, [3.0, 2.0, 1.0])
    with pytest.raises(ValueError, match="at least 8 losses, got 3"):
        examine("loss falls", config, work_dir)


def test_memory_that_rises_and_falls(folder, write_config):
    work_dir = write_log(folder, falling(6), memory=[9000, 600, 1000, 990, 700, 600])
    found = examine("memory", write_config(), work_dir)
    assert found.what == "peaks of 600 to 1,000 MB"
    assert "probe-batch" in found.remedy
    work_dir = write_log(folder, falling(4), memory=[9000, 990, 1000, 980], name="20260102_000000")
    assert examine("memory", write_config(), work_dir) == "peaks of 980 to 1,000 MB"


# -- the config


def test_a_config_that_xtuner_train_refuses(write_config):
    found = examine("xtuner train", write_config({"batch_size=1": "batch_size=2"}))
    assert "batch_size must be 1 with use_varlen_attn, got 2" in found.remedy
    assert examine("xtuner train", write_config()) == "it takes the config"
    with pytest.raises(NotApplicable, match="nothing is asked of such a config"):
        examine("xtuner train", write_config("padded"))


# -- labels


@pytest.fixture
def write_tokenized(folder):
    """Write documents of tokens, with labels that a function makes of them."""

    def write(labels_of=list, lengths=range(30, 110, 2), end=()):
        draw = np.random.default_rng(0)
        documents = [[*draw.integers(2, 250, n).tolist(), *end] for n in lengths]
        rows = [dict(input_ids=ids, labels=labels_of(ids)) for ids in documents]
        (folder / "tokenized.jsonl").write_text("\n".join(map(json.dumps, rows)))

    return write


def test_labels_of_the_next_token(write_config, write_tokenized):
    config = write_config("tokenized")
    write_tokenized()
    assert examine("label places", config).endswith(
        " labels, each of the token at its place, as in a collated batch"
    )
    write_tokenized(lambda ids: [*ids[1:], -100])
    assert "labels are of the next token" in examine("label places", config).what
    write_tokenized(lambda ids: [ids[0], *ids[:-1]])
    assert "labels are of another token" in examine("label places", config).what


@pytest.mark.parametrize(
    ("change", "ours"),
    [("faulty packs", "packed_collate_fn"), ("faulty padding", "padded_collate_fn")],
)
@pytest.mark.parametrize(("by", "whose"), [(-1, "the next token"), (1, "another token")])
def test_labels_that_the_collate_function_shifts(
    write_config, write_collate, change, ours, by, whose
):
    write_collate(f"data['labels'] = data['labels'].roll({by}, 1)", ours=ours)
    found = examine("label places", write_config(change))
    assert re.fullmatch(rf"as collated, \d+ of \d+ labels are of {whose}", found.what)
    assert found.setting == "collate_fn"


def test_padding_with_labels(write_config, write_collate):
    # as in many a first attempt, which clones the padded tokens
    write_collate("data['labels'] = data['input_ids'].clone()", ours="padded_collate_fn")
    found = examine("padding labels", write_config("faulty padding"))
    wrong, padding = found.what.split(" places")[0].split(" of ")
    assert wrong == padding
    assert int(padding) > 100
    assert found.setting == "collate_fn"
    healthy = examine("padding labels", write_config("padded"))
    assert healthy == f"{padding} places of padding, none with a label"


def test_documents_that_were_padded_when_they_were_tokenized(write_config, write_tokenized):
    config = write_config("tokenized")
    # 1 is the tokenizer's padding
    write_tokenized(end=[1] * 4)
    # too short to tell
    short = json.dumps(dict(input_ids=[5, 6], labels=[5, 6]))
    Path("tokenized.jsonl").write_text(f"{short}\n{Path('tokenized.jsonl').read_text()}")
    found = examine("padding labels", config)
    assert found.what == "40 of 41 documents end in padding with labels"
    write_tokenized(lengths=range(2, 42))
    assert isinstance(examine("padding labels", config), str)
    write_tokenized(lambda ids: [*ids[:-20], *[-100] * 20], end=[1] * 20)
    assert isinstance(examine("padding labels", config), str)


def test_prompts_with_labels_and_answers_without(write_config, write_collate):
    healthy = examine("prompt labels", write_config("conversations"))
    prompts, answers = int(healthy.split()[0]), int(healthy.split()[7])
    assert 30 < prompts < answers
    config = write_config("conversations", "faulty packs")
    write_collate("data['labels'] = data['input_ids'].clone()", ours="packed_collate_fn")
    found = examine("prompt labels", config)
    assert f"{prompts} of {prompts} tokens of prompts have a label, 0 of {answers}" in found.what
    write_collate("data['labels'][:] = -100", ours="packed_collate_fn")
    found = examine("prompt labels", config)
    assert f"0 of {prompts} tokens of prompts have a label, {answers} of {answers}" in found.what


def test_an_answer_may_begin_with_the_documents_first_token(write_config, monkeypatch):
    # as with tokenizers that put nothing in front
    training = Training(write_config())
    texts = map(training.tokenizer.decode, training.batch.documents)
    turns = [[dict(input="", output=text)] for text in texts]
    monkeypatch.setattr(label_checks, "_conversations", lambda _: turns)
    num_targets = sum(training.batch.lengths) - 3
    assert CHECKS["prompt labels"](training).endswith(f"{num_targets} of answers with theirs")


def test_prompts_that_cannot_be_told_from_answers(write_config, write_tokenized):
    write_tokenized()
    with pytest.raises(NotApplicable, match="the data comes tokenized"):
        examine("prompt labels", write_config("tokenized"))
    sampled = {"max_length=256": "max_length=256,\n    max_dataset_length=30"}
    with pytest.raises(NotApplicable, match="not every row is a document"):
        examine("prompt labels", write_config(sampled))
    with pytest.raises(NotApplicable, match="documents are cut to fit"):
        examine("prompt labels", write_config({"max_length=256": "max_length=64"}))


def test_first_tokens_as_targets_of_another_document(write_config, write_tokenized, write_collate):
    write_tokenized()
    found = examine("first tokens", write_config("tokenized", "unmarked packs"))
    assert "are targets of the documents before them: the loss is 5." in found.what
    assert examine("first tokens", write_config("tokenized")).startswith("the first tokens of 3")
    # labels that the model masks by itself do no harm
    write_collate("data['labels'] = data['input_ids'].clone()", ours="packed_collate_fn")
    assert isinstance(examine("first tokens", write_config("tokenized", "faulty packs")), str)


# -- the state


def test_a_hook_that_is_missing(write_config):
    found = examine("boundary hook", write_config(WITHOUT_HOOK))
    assert found.setting == "custom_hooks"
    assert examine("boundary hook", write_config()) == "PackedLayoutHook publishes boundaries"
    with pytest.raises(NotApplicable, match="use_varlen_attn is False"):
        examine("boundary hook", write_config("padded"))
    # of rows that have none to publish
    idle = {"custom_hooks = []": "custom_hooks = [dict(type=PackedLayoutHook)]"}
    assert "has none to publish" in examine("boundary hook", write_config("padded", idle)).what


@pytest.mark.parametrize("change", ["packs", "buckets", "padded"])
def test_documents_that_stay_apart(write_config, change):
    said = examine("state leak", write_config(change))
    assert said == "no document changed another one (6 changed when run as a single one)"


@pytest.mark.parametrize(
    ("change", "setting"), [("unmarked packs", "use_varlen_attn"), ("chunks", "collate_fn")]
)
def test_documents_that_leak_into_the_next(write_config, change, setting):
    found = examine("state leak", write_config(change))
    # the first reaches two others, the second one, with each of two values
    assert found.what.startswith("in 6 of 12 trials a document changed")
    assert found.setting == setting


def test_a_boundary_that_is_off_by_one(write_config, write_collate):
    write_collate("data['cumulative_len'][0][1] += 1", ours="packed_collate_fn")
    found = examine("state leak", write_config("faulty packs"))
    # the first token of the second document is taken for one of the first
    assert found.what.startswith("in 2 of 12 trials")


def test_a_leak_test_that_shows_nothing_is_no_pass(write_config, monkeypatch):
    training = Training(write_config())
    with monkeypatch.context() as patch:
        patch.setattr(model_checks, "run_leak_test", lambda *_: LeakTest(0, 0))
        with pytest.raises(RuntimeError, match="got none; the test shows nothing"):
            CHECKS["state leak"](training)
    training.model.llm.get_output_embeddings().weight.data[0] = math.nan
    with pytest.raises(ValueError, match=r"logits must be finite, got \d+ that are not"):
        CHECKS["state leak"](training)


# -- lengths


def test_buckets_that_are_too_coarse(write_config):
    coarse = {"boundaries=[64, 96, 128, 176, 256]": "boundaries=[64, 256]"}
    found = examine("bucket padding", write_config("padded", coarse))
    assert re.fullmatch(r"padding is \d\d% up to 256", found.what)
    assert re.match(r"boundaries = \[64, 1\d\d, 256\], with \[1\d\d\] added", found.remedy)
    assert "not computed" in examine("bucket padding", write_config("buckets", coarse)).what
    assert examine("bucket padding", write_config("buckets")).startswith("at most ")
    with pytest.raises(NotApplicable, match="no buckets"):
        examine("bucket padding", write_config())


def test_lengths_that_are_seldom_seen(write_config, write_tokenized):
    write_tokenized(lengths=[*[200] * 200, *[20] * 4])
    bucketed = ("tokenized", "buckets")
    found = examine("exposure", write_config(*bucketed))
    assert "documents of 1 to 64 tokens are 0." in found.what
    drawn = {"tokens_per_batch=512": "tokens_per_batch=512, sampling='sqrt_tokens'"}
    assert isinstance(examine("exposure", write_config(*bucketed, drawn)), str)
    assert isinstance(examine("exposure", write_config("buckets")), str)


def test_sequences_that_all_have_one_length(write_config):
    chunks = write_config("chunks", {"max_length=256": "max_length=1024"})
    found = examine("trained lengths", chunks)
    assert "of the tokens are in sequences of 1,024, where documents have " in found.what
    assert re.fullmatch(
        r"sequences of \d+ to \d+ tokens", examine("trained lengths", write_config())
    )
    assert isinstance(examine("trained lengths", write_config("padded")), str)


def test_documents_that_are_longer_than_anything_trained_on(write_config):
    found = examine("trained lengths", write_config({"max_length=256": "max_length=100"}))
    assert "of the tokens are beyond max_length=100, up to " in found.what
    assert found.setting == "max_length"


def test_lengths_are_those_that_the_config_trains_on(write_config, write_tokenized):
    write_tokenized(lengths=[*[60] * 20, *[200] * 5, *[260] * 2])
    drop = {"max_length=256": "max_length=256,\n    too_long='drop'"}
    sized = {"tokens_per_batch=512": "batch_sizes=[7, 5, 4, 3, 2]"}
    config = write_config("tokenized", "buckets", drop, sized)
    buckets = Training(config).length_report.buckets
    assert [(bucket.documents, bucket.batch_size) for bucket in buckets] == [(20, 7), (5, 2)]
    # the whole of a document that is dropped, and not 8 of its tokens
    found = examine("trained lengths", config)
    assert found.what.startswith("19% of the tokens are beyond max_length=256, up to 260")


UNEQUAL = [
    "tokenized",
    {
        "type=process_packed_dataset": "type=process_document_dataset",
        "type=packed_collate_fn": "type=padded_collate_fn",
    },
]


def test_steps_of_unequal_size(write_config, write_tokenized):
    write_tokenized(lengths=[10, 200] * 30)
    found = examine("tokens a step", write_config(*UNEQUAL))
    assert found.what == "104 target tokens a step, 91% more or less (9 to 199)"
    assert "tokens_per_step=104" in found.remedy
    many = {"accumulative_counts=1": "accumulative_counts=20"}
    assert isinstance(examine("tokens a step", write_config(*UNEQUAL, many)), str)
    too_many = {"accumulative_counts=1": "accumulative_counts=31"}
    with pytest.raises(NotApplicable, match="60 batches make no two optimizer steps"):
        examine("tokens a step", write_config(*UNEQUAL, too_many))


def test_steps_that_are_counted_in_tokens(folder, write_config, write_tokenized):
    write_tokenized(lengths=[10, 200] * 30)
    counted = {
        "type=OptimWrapper": "type='TokenAccumulationOptimWrapper',\n    tokens_per_step=150",
        "    accumulative_counts=1,\n": "",
        "type=TrainLoop, max_epochs=1": "type='TokenStepLoop', max_iters=10",
    }
    config = write_config(*UNEQUAL, counted)
    assert examine("tokens a step", config) == "every step has at least 150 target tokens"
    work_dir = write_log(folder, falling(2), tokens_per_step=200.0, tokens_per_step_std=80.0)
    found = examine("tokens a step", config, work_dir)
    assert found.what == "200 target tokens a step, 40% more or less, says the log"
    assert found.setting == "tokens_per_step"


# -- the model


def test_weight_decay_on_the_dynamics(write_config):
    ours = "constructor=MambaOptimWrapperConstructor"
    theirs = {ours: "paramwise_cfg=dict(bypass_duplicate=True)"}
    found = examine("weight decay", write_config(theirs))
    assert found.what.startswith("weight decay of 0.1 on 2 of 2 parameters of the dynamics, such")
    assert found.setting == "optim_wrapper"
    assert examine("weight decay", write_config()) == "none on 2 parameters A_log and D"
    # without paramwise_cfg `xtuner train` puts ours in
    assert isinstance(examine("weight decay", write_config({f"    {ours},\n": ""})), str)
    lora = {
        "import AdamW\n": "import AdamW\n\nfrom peft import LoraConfig\n",
        "    llm=": "    lora=dict(type=LoraConfig, r=2, target_modules=['in_proj']),\n    llm=",
    }
    with pytest.raises(NotApplicable, match="no A_log or D trains"):
        examine("weight decay", write_config(lora))


def test_the_page_tells_of_every_check():
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    for symptom in SYMPTOMS:
        assert symptom.name in page
