"""The demo, small: XTuner's commands one after the other, and what is said about the result."""

import dataclasses
import doctest
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaConfig, MambaForCausalLM

from xtuner_mamba.demo import inputs
from xtuner_mamba.demo.checks import LeakTest, changed_documents, run_leak_test
from xtuner_mamba.demo.report import DemoReport
from xtuner_mamba.model import dispatch_packed

RUN_DEMO = Path(__file__).parents[1] / "tools" / "run_demo.py"
SIZES = ["--chars=240000", "--vocab-size=400", "--hidden-size=32", "--layers=1"]
GOOD = DemoReport(
    documents=9,
    tokens=90,
    packs=2,
    num_split=1,
    utilisation=0.9,
    padding=0.5,
    tokens_per_second=1.0,
    loss_start=8.0,
    loss_end=5.0,
    difference=1e-6,
    difference_without_boundaries=1.0,
    leaks=0,
    leaks_without_boundaries=3,
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("workdir")
    command = [sys.executable, str(RUN_DEMO), "--workdir", str(workdir), *SIZES]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return workdir / "demo", result.stdout


def test_every_fact_of_the_table_is_as_promised(demo):
    folder, output = demo
    report = DemoReport(**json.loads((folder / "report.json").read_text()))
    assert report.failures() == []
    assert report.documents == len((folder / "corpus" / "stdlib.jsonl").read_text().splitlines())
    assert report.utilisation > 0.95
    assert 0.3 < report.padding < 1
    assert report.loss_end < 0.9 * report.loss_start
    assert report.leaks == 0 < report.leaks_without_boundaries
    assert f"{report.tokens:,}" in output
    assert "PASS" in output
    assert "mamba_demo_stdlib_varlen" in output


def test_the_converted_folder_is_a_plain_model_that_has_learnt(demo):
    folder, _ = demo
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    untrained = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.dtype == torch.float32
    ids = tokenizer("def __init__(self, name):\n    self.name = name\n", return_tensors="pt")
    losses = [m(ids.input_ids, labels=ids.input_ids).loss.item() for m in (model, untrained)]
    assert losses[0] < losses[1] - 0.5


def test_the_plots_are_a_picture(demo):
    folder, _ = demo
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("x")
    command = [sys.executable, str(RUN_DEMO), "--workdir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert f"{tmp_path}/demo must come from this demo" in result.stdout
    assert (tmp_path / "demo" / "thesis.tex").exists()


def test_a_command_that_fails_stops_the_demo_with_the_end_of_its_log(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("run_demo", RUN_DEMO)
    run_demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run_demo)
    monkeypatch.chdir(tmp_path)
    run_demo.DEMO.mkdir()
    with pytest.raises(RuntimeError, match=r"(?s)must exit with 0, got 3; .*1_-c.log .*the end"):
        run_demo.run(sys.executable, "-c", "print('the end'); raise SystemExit(3)")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_end": 7.5}, "must fall by 10%, got 8.000 at the start and 7.500 at the end"),
        ({"loss_end": float("nan")}, "got 8.000 at the start and nan"),
        ({"difference": 0.01}, r"got a difference of 1.0e-02 \(1.0e\+00 without boundaries\)"),
        ({"difference": float("nan")}, "got a difference of nan"),
        ({"leaks": 2}, "got 2 changed"),
        ({"leaks_without_boundaries": 0}, "got no leak without boundaries"),
    ],
    ids=str,
)
def test_what_is_not_as_it_must_be_is_said(change, message):
    assert GOOD.failures() == []
    (failure,) = dataclasses.replace(GOOD, **change).failures()
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(failure)


def make_model():
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2))
    dispatch_packed(model)
    return model.eval()


def test_the_leak_test_passes_only_with_all_boundaries():
    model, lengths = make_model(), [4, 3, 9, 2]
    input_ids = torch.randint(20, (1, 18), generator=torch.Generator().manual_seed(0))
    assert run_leak_test(model, lengths, input_ids).passed
    # the second boundary is missing: document 1 reaches 2, and nothing else
    assert changed_documents(model, [4, 12, 2], lengths, input_ids, 1, float("nan")) == [2]
    assert changed_documents(model, [4, 12, 2], lengths, input_ids, 0, float("nan")) == []
    assert not LeakTest(changed=1, changed_without_boundaries=5).passed
    assert not LeakTest(changed=0, changed_without_boundaries=0).passed


def test_the_corpus_is_the_same_every_time_and_has_a_long_tail():
    documents = inputs.stdlib_documents(200_000)
    assert documents == inputs.stdlib_documents(200_000)
    lengths = sorted(len(document.text) for document in documents)
    assert 190_000 < sum(lengths) <= 200_000
    assert lengths[-1] > 10 * lengths[len(lengths) // 2]


def test_a_module_is_cut_at_its_top_level():
    source = (
        'X = 1\n@wraps\ndef f():\n    """a\n    b"""\n\nclass C:\n    def m(self): pass\nY = 2\n'
    )
    assert [tuple(document) for document in inputs.cut_module("m", source)] == [
        ("m.f", '@wraps\ndef f():\n    """a\n    b"""'),
        ("m.C", "class C:\n    def m(self): pass"),
        ("m", "X = 1\n\nY = 2"),
    ]
    assert list(inputs.cut_module("m", "def f(:")) == []
    assert doctest.testmod(inputs) == doctest.TestResults(failed=0, attempted=1)


def test_the_tokenizer_gives_back_every_character():
    documents = [inputs.Document("d", "def f():\n\treturn 'naïve 日本'\n" * 3)]
    tokenizer = inputs.train_tokenizer(documents, vocab_size=300)
    ids = tokenizer(documents[0].text)["input_ids"]
    assert tokenizer.decode(ids) == documents[0].text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
