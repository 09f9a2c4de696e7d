"""``xtuner-mamba smoke``: what passes, and what must not."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset

from xtuner_mamba import cli
from xtuner_mamba.dataset.documents import TokenizedDocuments
from xtuner_mamba.tools.sample_batch import choose_pieces, find_documents
from xtuner_mamba.tools.training import Training

CHECKS = [
    "padding",
    "label places",
    "padding labels",
    "prompt labels",
    "first tokens",
    "leak test",
    "loss falls",
    "gradients finite",
]
TOKEN_STEPS = {
    "type=OptimWrapper": "type='TokenAccumulationOptimWrapper',\n    tokens_per_step=9999",
    "    accumulative_counts=1,\n": "",
    "type=TrainLoop, max_epochs=1": "type='TokenStepLoop', max_iters=10",
}
# a GPU runs it in bfloat16; where there is none it becomes what can run there
AUTOCAST = {
    "import OptimWrapper": "import AmpOptimWrapper",
    "type=OptimWrapper": "type=AmpOptimWrapper,\n    dtype='bfloat16'",
}


def smoke(capsys, config, *options, code):
    assert cli.main(["smoke", config, "--json", *options]) == code
    report = json.loads(capsys.readouterr().out)
    return {check["check"]: check for check in report["checks"]}, report["losses"]


@pytest.mark.parametrize(
    "changes",
    [
        ["packs"],
        ["buckets"],
        ["padded"],
        ["carried"],
        ["conversations"],
        [TOKEN_STEPS],
        [AUTOCAST],
    ],
    ids=["packs", "buckets", "padded", "carried", "conversations", "token steps", "autocast"],
)
def test_what_is_healthy_passes(write_config, capsys, changes):
    checks, losses = smoke(capsys, write_config(*changes), "--steps", "12", code=0)
    assert list(checks) == CHECKS
    assert {check["status"] for check in checks.values()} == {"PASS"}
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.1
    share = float(checks["padding"]["detail"].split("%")[0])
    assert share > 20 if changes == ["padded"] else share == 0


def test_steps_are_those_of_training_without_accumulation(write_config, capsys):
    training = Training(write_config())
    losses = []
    for _ in range(4):
        with training.fed(training.batch.collated) as fed:
            logged = training.model.train_step(fed, training.optim_wrapper)
        losses.append(logged["loss"].item())
    config = write_config({"accumulative_counts=1": "accumulative_counts=4"})
    assert smoke(capsys, config, "--steps", "4", code=0)[1] == losses


def test_a_table_for_the_terminal(write_config, capsys):
    assert cli.main(["smoke", write_config("chunks"), "--steps", "2"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "leak test FAIL in 6 of 12 trials a document changed" in output
    assert "leak test: tell the model the boundaries" in output
    assert "7 passed, 1 failed, 0 could not run, 0 had nothing to check" in output


PAD_FURTHER = (
    "from torch.nn.functional import pad; "
    "data |= {name: pad(data[name], (0, 200)) for name in ('input_ids', 'attention_mask')}; "
    "data['labels'] = pad(data['labels'], (0, 200), value=VALUE)"
)


def test_rows_that_are_padded_too_far_or_trained_to_predict_it(write_config, write_collate, capsys):
    config = write_config("faulty padding")
    write_collate(PAD_FURTHER.replace("VALUE", "-100"), ours="padded_collate_fn")
    checks, _ = smoke(capsys, config, "--steps", "2", code=1)
    assert checks["padding"]["status"] == "FAIL"
    assert " would do for documents of [" in checks["padding"]["detail"]
    assert checks["padding labels"]["status"] == "PASS"
    write_collate(PAD_FURTHER.replace("VALUE", "1"), ours="padded_collate_fn")
    checks, _ = smoke(capsys, config, "--steps", "2", code=1)
    assert checks["padding labels"]["status"] == "FAIL"
    assert checks["padding labels"]["detail"].startswith("600 of ")


def test_labels_that_the_collate_function_shifts(write_config, write_collate, capsys):
    write_collate("data['labels'] = data['labels'].roll(-1, 1)", ours="packed_collate_fn")
    checks, _ = smoke(capsys, write_config("faulty packs"), "--steps", "1", code=1)
    assert checks["label places"]["status"] == "FAIL"
    assert checks["label places"]["setting"] == "collate_fn"


def test_json_is_all_that_stdout_gets(write_config, write_collate, capsys):
    write_collate("print('said by the config')", ours="packed_collate_fn")
    smoke(capsys, write_config("faulty packs"), "--steps", "4", code=0)


def test_a_learning_rate_that_teaches_nothing(write_config, capsys):
    checks, losses = smoke(capsys, write_config({"lr=1e-2": "lr=0.0"}), "--steps", "4", code=1)
    assert checks["loss falls"]["status"] == "FAIL"
    assert "the learning rate, which is 0" in checks["loss falls"]["remedy"]
    assert checks["gradients finite"]["detail"] == "in 4 of 4 steps"
    assert len(set(losses)) == 1


def test_gradients_that_are_no_numbers(write_config, capsys):
    checks, losses = smoke(capsys, write_config({"lr=1e-2": "lr=1e30"}), "--steps", "9", code=1)
    assert checks["loss falls"]["status"] == "FAIL"
    assert checks["gradients finite"]["status"] == "FAIL"
    # the step after the first; none is taken with it
    assert checks["gradients finite"]["detail"] == "gradients are not finite in step 2 of 2"
    assert len(losses) == 2


def test_steps_that_cannot_be_taken_are_no_pass(write_config, capsys):
    config = write_config({"[dict(type=PackedLayoutHook)]": "[]"})
    checks, losses = smoke(capsys, config, code=2)
    for name in ("leak test", "loss falls", "gradients finite"):
        assert checks[name]["status"] == "NOT RUN"
    assert losses == []


def test_a_model_that_is_fetched_from_elsewhere(write_config, folder):
    (folder / "fetching.py").write_text("def fetch(name):\n    return 'model'\n")
    config = write_config(
        {
            "import AdamW\n": "import AdamW\n\nfrom fetching import fetch\n",
            'path = "model"': 'path = "far/away"\nmodel_resource = dict(fn=fetch)\n'
            "pretrained_model_name_or_path = path",
        }
    )
    assert Training(config).tokenizer.name_or_path == "model"


def test_a_config_that_cannot_train_is_refused(write_config, capsys):
    assert cli.main(["smoke", write_config({"batch_size=1": "batch_size=2"})]) == 2
    assert "config.py: batch_size must be 1 with use_varlen_attn" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["smoke", "config.py", "--steps", "0"])
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err


def test_a_config_that_is_not_there_is_told_with_the_way_to_find_one(capsys):
    assert cli.main(["smoke", "nowhere.py"]) == 2
    error = capsys.readouterr().err
    assert "nowhere.py: a config must be a Python file that can be read, or the name of" in error
    assert "got 'nowhere.py' (" in error
    assert error.endswith("); `xtuner list-cfg -p mamba` lists the templates\n")


def documents_of(lengths):
    rows = [[7] * n for n in lengths]
    return TokenizedDocuments(Dataset.from_dict({"input_ids": rows, "labels": rows}))


@pytest.mark.parametrize(
    ("lengths", "max_length", "chosen"),
    [
        ([50, 3, 12, 20, 400], 100, [3, 12, 50]),
        # the longest that leaves room for two
        ([90, 3, 12, 20, 95], 100, [3, 20, 12]),
        # no three of them fit: quarters of a row, and what is left of one
        ([60, 70, 80], 100, [5, 10, 25]),
    ],
)
def test_a_short_a_middle_and_a_long_document_are_chosen(lengths, max_length, chosen):
    pieces = choose_pieces(documents_of(lengths), max_length)
    assert sorted(pieces.lengths.tolist()) == sorted(chosen)
    assert pieces.lengths.sum() <= max_length


def test_too_few_documents_are_refused():
    with pytest.raises(ValueError, match=r"fit in 100 tokens, got \[5, 9\] as the shortest of 2"):
        choose_pieces(documents_of([5, 9]), 100)


def test_documents_are_found_in_rows_and_end_to_end():
    documents = [np.array([5, 6, 7]), np.array([8])]
    rows = torch.tensor([[5, 6, 7], [8, 0, 0]])
    assert find_documents(rows, documents) == [slice(0, 3), slice(3, 4)]
    assert find_documents(torch.tensor([[5, 6, 7, 8]]), documents) == [slice(0, 3), slice(3, 4)]
    # padded on the left
    with pytest.raises(ValueError, match="others than those of document 1 in rows of 3"):
        find_documents(torch.tensor([[5, 6, 7], [0, 0, 8]]), documents)
