"""The benchmark of the schemes: its inputs, its page, and what it calls wrong."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from mmengine.config import Config
from transformers import AutoModelForCausalLM, AutoTokenizer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CHECK = dict(check="label places", status="PASS", detail="2 labels")
LEAK = dict(check="leak test", status="FAIL", detail="it leaks")
NOT_RUN = dict(check="leak test", status="NOT RUN", detail="out of memory")
RUN = dict(
    scheme="packed",
    tokens_per_second=1234.5,
    padding=0.25,
    peak_bytes=2**30,
    loss=5.0,
    held_out=[6.0, 5.5],
)
FOUND = dict(shape=dict(length=64), fits=9, fails=10, peak_bytes=2**31, advised=7, num_tries=5)


@pytest.fixture
def bench_schemes(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("bench_schemes", BENCHMARKS / "bench_schemes.py")
    module = importlib.util.module_from_spec(spec)
    # its dataclasses look for their module
    monkeypatch.setitem(sys.modules, "bench_schemes", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def answers():
    """What each command prints, as JSON, by its name."""
    smoke = dict(checks=[CHECK], losses=[6.0, 4.0])
    return dict(
        compare=[RUN, RUN | dict(scheme="bucket")],
        probe=[FOUND],
        doctor=dict(checks=[CHECK]),
        smoke_packed=smoke,
        smoke_bucket=smoke,
        smoke_carried=smoke,
        smoke_fixed_chunk=dict(checks=[CHECK, LEAK], losses=[6.0, 4.0]),
        log=[dict(loss=6.0, time=0.5, memory=2048), dict(loss=5.0, time=0.3, memory=1024)] * 2,
        after_sigterm=0,
    )


@pytest.fixture
def run(bench_schemes, answers, monkeypatch, tmp_path):
    """Run the benchmark with commands that print these answers; its exit code and its page."""
    ended = sys.modules["process_session"].Ended

    def tool(self, name, *arguments, codes=(0,)):
        if isinstance(answers[name], Exception):
            raise answers[name]
        if "--out" in arguments:
            Path(arguments[arguments.index("--out") + 1]).write_text("batch_sizes:\n  64: 7\n")
        return answers[name]

    monkeypatch.setattr(bench_schemes.Bench, "tool", tool)
    monkeypatch.setattr(bench_schemes.Bench, "run", lambda self, name, *command: "")
    monkeypatch.setattr(bench_schemes.subprocess, "Popen", lambda *args, **kwargs: None)
    monkeypatch.setattr(bench_schemes, "make_inputs", lambda bench: None)
    monkeypatch.setattr(bench_schemes, "read_scalars", lambda work_dir: answers["log"])
    monkeypatch.setattr(
        bench_schemes, "end_session", lambda *args: ended(3, 1, answers["after_sigterm"], 2.0)
    )

    def run(*arguments):
        argv = ["--out", str(tmp_path / "out"), "--commit", "abc", "--small", *arguments]
        code = bench_schemes.main(argv)
        return code, (tmp_path / "out" / "schemes.md").read_text()

    return run


def test_the_page_has_what_every_command_found(run):
    code, page = run("--steps", "7")
    assert code == 0, page
    for part in (
        "- commit: abc",
        "bench_schemes.py --steps 7 --small`",
        "| packed | 1,234 | 25.0% | 1.00 | 5.000 | 6.000 -> 5.500 |",
        "| 64 tokens | 9 | 10 | 2.00 | 7 | 5 |",
        "  64: 7\n```",
        "| fixed_chunk | 1 | leak test | - | 6.000 -> 4.000 |",
        "loss 6.000 -> 5.000, peak 2.00 GiB of a GPU, 0.50 s each",
        "had 3 processes, 1 of them with the GPU open. 2.0 s after SIGTERM",
        "| label places | PASS | 2 labels |",
        "- wrong: nothing",
    ):
        assert part in page, part


@pytest.mark.parametrize(
    ("name", "answer", "told"),
    [
        ("compare", [RUN | dict(held_out=[6.0, 6.5])], "held-out loss of packed must fall"),
        ("smoke_packed", dict(checks=[LEAK], losses=[1, 1]), r"find [] in packed, got ['leak test"),
        ("smoke_fixed_chunk", dict(checks=[CHECK], losses=[1, 1]), "find ['leak test'] in fixed_"),
        ("smoke_bucket", dict(checks=[NOT_RUN], losses=[]), "not run ['leak test']"),
        ("doctor", dict(checks=[CHECK, NOT_RUN]), "every check, got ['leak test'] not run"),
        ("log", [dict(loss=float("nan"), time=0.5)] * 4, "loss of carried chunks must fall: [nan"),
        ("after_sigterm", 2, "SIGTERM must end all processes, got 2 left"),
        ("probe", RuntimeError("probe must exit with 0\nmore"), "RuntimeError: probe must exit"),
    ],
)
def test_a_fault_is_told_and_costs_no_other_part(run, answers, name, answer, told):
    answers[name] = answer
    code, page = run()
    assert code == 1
    assert told in page.partition("- wrong: ")[2].splitlines()[0]
    assert page.count("\n## ") == 5
    assert "| label places | PASS |" in page


def test_some_parts_alone(run):
    code, page = run("--parts", "carried chunks")
    assert code == 0
    assert "--parts 'carried chunks'`" in page
    assert page.count("\n## ") == 1


def test_configs_are_templates_that_read_what_was_made(bench_schemes, tmp_path):
    bench = bench_schemes.Bench(tmp_path, tmp_path, bench_schemes.SMALL, steps=2)
    bench_schemes.make_inputs(bench)
    vocab = len(AutoTokenizer.from_pretrained(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert vocab <= model.get_input_embeddings().num_embeddings == 512
    rows = (tmp_path / "data" / "stdlib.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["text"] == json.loads(rows[0])["output"]
    datasets = {
        scheme: Config.fromfile(tmp_path / f"{scheme}.py").train_dataloader.dataset
        for scheme in bench_schemes.TEMPLATES
    }
    lengths = {scheme: dataset.max_length for scheme, dataset in datasets.items()}
    assert lengths == dict(packed=512, bucket=512, fixed_chunk=128, carried=64)
    for dataset in datasets.values():
        source = dataset.dataset
        assert str(tmp_path / "data") in (source.get("data_files") or source.path)
        assert dataset.tokenizer.pretrained_model_name_or_path == str(tmp_path / "model")


def test_a_command_that_fails_says_how(bench_schemes, tmp_path):
    bench = bench_schemes.Bench(tmp_path, tmp_path, bench_schemes.SMALL, steps=2)
    command = [sys.executable, "-c", "import sys; print('[1]'); sys.exit('no GPU')"]
    with pytest.raises(RuntimeError, match=r"(?s)try must exit with one of \(0,\), got 1.*no GPU"):
        bench.run("try", *command)
    assert (tmp_path / "try.log").read_text() == "no GPU\n"
    assert bench.run("try", *command, codes=(0, 1)) == "[1]\n"


CHILD = "import subprocess, time; subprocess.Popen(['sleep', '60'])"
FORWARDS = f"import signal, os; signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, 9)); {CHILD}"


@pytest.mark.parametrize(("script", "left"), [(CHILD, 1), (FORWARDS, 0)])
def test_what_outlives_a_signal_is_counted_and_ended(bench_schemes, script, left):
    leader = start(f"{script}; time.sleep(60)")
    session = sys.modules["process_session"]
    found = session.end_session(leader, lambda: len(session.session_of(leader)) == 2, 30, 0.5)
    assert (found.before, found.with_gpu, found.after) == (2, 0, left)
    session.wait_until(lambda: not session.session_of(leader), 5)
    assert session.session_of(leader) == []


def test_a_training_that_does_not_begin_is_told(bench_schemes):
    with pytest.raises(RuntimeError, match="begin within 30 s, got exit code 3"):
        bench_schemes.end_session(start("raise SystemExit(3)"), lambda: False, 30, 1)


def test_a_log_is_read_while_it_is_written(bench_schemes, tmp_path):
    assert bench_schemes.read_scalars(tmp_path) == []
    (tmp_path / "run" / "vis_data").mkdir(parents=True)
    lines = '{"loss": 2.0}\n{"lr": 1.0}\n{"loss": 1.0}\n{"loss": 0'
    (tmp_path / "run" / "vis_data" / "scalars.json").write_text(lines)
    assert bench_schemes.read_scalars(tmp_path) == [{"loss": 2.0}, {"loss": 1.0}]


def start(script):
    return subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
