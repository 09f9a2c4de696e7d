"""``xtuner-mamba compare``: the same documents, weights and steps for every scheme."""

import json
import re
import signal
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from itertools import accumulate, chain, count, cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, disable_progress_bars, load_from_disk
from mmengine.config import Config
from mmengine.runner import Runner, loops
from transformers import MambaConfig, MambaForCausalLM

from xtuner_mamba import cli
from xtuner_mamba.dataset import process_packed_dataset
from xtuner_mamba.integration.templates import templates
from xtuner_mamba.model import PackedSupervisedFinetune
from xtuner_mamba.tools import compare, compare_documents, compare_run
from xtuner_mamba.tools.compare_documents import Settings, choose_documents, read_settings
from xtuner_mamba.tools.corpus import read_config

disable_progress_bars()
PACKED, BUCKET, CHUNKS = (
    f"mamba_demo_stdlib_{scheme}" for scheme in ("varlen", "bucket", "fixed_chunk")
)
VOCAB = 30
numbers = count()
# documents that are tokens already
TOKENIZED = """
train_dataset.update(do_dataset_tokenization=False, tokenizer=None, dataset_map_fn=None)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A corpus in which a token is followed by the next one, and a small model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    draw = torch.Generator().manual_seed(0)
    rows = []
    for length in torch.randint(2, 90, (60,), generator=draw).tolist():
        start = int(torch.randint(VOCAB, (), generator=draw))
        tokens = [(start + place) % VOCAB for place in range(length)]
        prompt = length // 3
        labels = [tokens[0]] + [-100] * prompt + tokens[1 + prompt :]
        rows.append(dict(input_ids=tokens, labels=labels))
    Path("demo/corpus").mkdir(parents=True)
    Path("demo/corpus/some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    torch.manual_seed(0)
    MambaForCausalLM(model_config()).save_pretrained("demo/model")
    return tmp_path


def model_config():
    return MambaConfig(
        vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=1, use_cache=False
    )


def write_config(template=PACKED, appended="", **settings):
    text = Path(templates()[template]).read_text()
    for name, value in settings.items():
        text, found = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", text, flags=re.M)
        assert found == 1, name
    # MMEngine names a run by its config and the second
    path = f"config_{next(numbers)}.py"
    Path(path).write_text(f"{text}\n{TOKENIZED}\n{appended}\n")
    return path


def in_this_process(function, config, *arguments):
    copy = f"config_{next(numbers)}.py"
    Path(copy).write_text(Path(config).read_text())
    # MMEngine logs to where the table goes
    with redirect_stdout(StringIO()):
        return function(copy, *arguments)


def targets_of(labels):
    return sum(label != -100 for label in labels[1:])


def test_every_config_has_the_same_settings():
    packed, bucket, chunks = (read_settings(read_config(name)) for name in (PACKED, BUCKET, CHUNKS))
    assert packed == chunks == Settings(2048, 2048, 512, None, 1)
    assert bucket == Settings(2048, 2048, 512, [64, 128, 256, 512, 1024, 2048], 1)
    # documents of a bucket are shorter than its batch
    settings = read_settings(read_config("mamba_130m_full_alpaca_e3_bucket"), chunk_length=1000)
    assert (settings.max_length, settings.tokens_per_batch) == (2048, 16_000)
    assert (settings.chunk_length, settings.accumulative_counts) == (1000, 2)


@pytest.mark.parametrize("sample", [2, 256])
def test_documents_are_enough_for_the_steps(monkeypatch, sample):
    monkeypatch.setattr(compare_documents, "_SAMPLE", sample)
    cfg = read_config(write_config(max_length=64))
    documents = choose_documents(cfg, read_settings(cfg), steps=4)
    train = documents.train["input_ids"][:]
    assert max(map(len, train)) <= 64
    targets = sum(map(targets_of, documents.train["labels"][:]))
    assert 0 <= targets - 4 * documents.tokens_per_step < 64
    # the boundaries hold what is trained on
    assert documents.boundaries[-1] == max(map(len, train))
    assert documents.boundaries == sorted(set(documents.boundaries))
    corpus = map(json.loads, Path("demo/corpus/some.jsonl").read_text().splitlines())
    pieces = [
        (row["input_ids"][start : start + 64], targets_of(row["labels"][start : start + 64]))
        for row in corpus
        for start in range(0, len(row["input_ids"]), 64)
    ]
    pieces = [(ids, num_targets) for ids, num_targets in pieces if num_targets]
    share = sum(n for _, n in pieces) / sum(len(ids) for ids, _ in pieces)
    # of four micro-batches, nearly full; two documents are no good sample
    wanted = pytest.approx(0.9 * 4 * 64 * share, rel=0.2 if sample == 2 else 0.01)
    assert documents.tokens_per_step == wanted
    # none is drawn twice
    left = [ids for ids, _ in pieces]
    for row in train:
        left.remove(row)


def test_held_out_documents_are_whole_and_nothing_of_them_is_trained_on():
    # every label tells the document, every token its place
    lengths = [20 + 7 * number for number in range(40)]
    rows = [dict(input_ids=[*range(n)], labels=[i] * n) for i, n in enumerate(lengths)]
    Path("demo/corpus/some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = read_config(write_config(max_length=64))
    documents = choose_documents(cfg, read_settings(cfg), steps=12)
    train = {row["labels"][0] for row in documents.train}
    held_out = {row["labels"][0] for row in documents.held_out}
    assert len(documents.train) > 2 * len(train)
    assert train.isdisjoint(held_out)
    assert len(held_out) == len(documents.held_out) == len(train) // 4 > 1
    for row in documents.held_out:
        assert row in rows
    assert max(map(len, documents.held_out["input_ids"])) > 64


@pytest.mark.parametrize("lengths", [[100, 100], [2, 500], [500, 2]])
def test_of_two_documents_one_is_held_out(lengths):
    rows = [dict(input_ids=[*range(n)], labels=[i] * n) for i, n in enumerate(lengths)]
    Path("demo/corpus/some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = read_config(write_config(max_length=64))
    documents = choose_documents(cfg, read_settings(cfg), steps=4)
    (held_out,) = documents.held_out
    assert held_out in rows
    assert {row["labels"][0] for row in documents.train} == {1 - held_out["labels"][0]}


def test_all_documents_where_there_are_few():
    cfg = read_config(write_config(max_length=2048, appended="train_dataset['seed'] = 1"))
    documents = choose_documents(cfg, read_settings(cfg), steps=100)
    assert 54 < len(documents.train) + len(documents.held_out) <= 60
    cfg = read_config(write_config(appended="train_dataset['max_dataset_length'] = 10"))
    documents = choose_documents(cfg, read_settings(cfg), steps=100)
    assert len(documents.train) + len(documents.held_out) == 10
    cfg = read_config(write_config(appended="train_dataset['max_dataset_length'] = 1"))
    with pytest.raises(ValueError, match=r"documents to train on and others .*, got 1 with a"):
        choose_documents(cfg, read_settings(cfg), steps=1)


def test_all_schemes_train_on_the_same_documents():
    config = write_config()
    plan = make_plan(read_config(config))
    seen = {}
    for scheme in compare_run.SCHEMES:
        cfg = Config.fromfile(config)
        compare_run.set_up_scheme(cfg, scheme, plan)
        loader = Runner.build_dataloader(cfg.train_dataloader, seed=0)
        batches = [batch["data"] for batch in loader]
        seen[scheme] = sorted(token for data in batches for token in data["input_ids"].flatten())
        batches = [data["cumulative_len"][0].diff().tolist() for data in batches]
        lengths = sorted(chain.from_iterable(batches))
        assert len(batches) > 2
        if scheme == "packed":
            assert max(map(sum, batches)) <= plan["tokens_per_batch"]
        else:
            assert max(max(rows) * len(rows) for rows in batches) <= plan["tokens_per_batch"]
        if scheme == "fixed chunk":
            assert set(lengths[1:]) == {plan["chunk_length"]}
        else:
            assert lengths == sorted(map(len, load_from_disk("train")["input_ids"]))
    assert seen["packed"] == seen["bucket"] == seen["fixed chunk"]


def make_plan(cfg, steps=3):
    documents = choose_documents(cfg, Settings(64, 128, 32, None, 1), steps)
    documents.train.save_to_disk("train")
    documents.held_out.save_to_disk("held_out")
    return dict(
        steps=steps,
        train="train",
        held_out="held_out",
        max_length=64,
        tokens_per_batch=128,
        chunk_length=32,
        tokens_per_step=documents.tokens_per_step,
        boundaries=documents.boundaries,
    )


def test_held_out_loss_is_that_of_each_document_alone():
    torch.manual_seed(0)
    llm = MambaForCausalLM(model_config()).double()
    documents = [[3, 4, 5, 6, 7], [9, 1], [2, 2, 8]]
    labels = [[3, 4, -100, 6, 7], [9, 1], [2, 2, 8]]
    total = sum(
        llm(torch.tensor([ids]), labels=torch.tensor([wanted])).loss.item() * targets_of(wanted)
        for ids, wanted in zip(documents, labels)
    )
    packs = process_packed_dataset(
        Dataset.from_dict(dict(input_ids=documents, labels=labels)),
        do_dataset_tokenization=False,
        max_length=7,
    )
    model = PackedSupervisedFinetune(llm, use_activation_checkpointing=False)
    assert len(packs) == 2
    assert compare_run.mean_loss(model, packs) == pytest.approx(total / 6, rel=1e-6)
    assert model.training


def test_the_rate_counts_no_held_out_token(tmp_path):
    torch.manual_seed(0)
    llm = MambaForCausalLM(model_config()).double()
    rows = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [5, 4, 3]]
    Dataset.from_dict(dict(input_ids=rows, labels=rows)).save_to_disk("held_out")
    with torch.no_grad():
        losses = [llm(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item() for ids in rows]
    model = PackedSupervisedFinetune(llm, use_activation_checkpointing=False)
    loader = SimpleNamespace(dataset=SimpleNamespace(length=[4]), batch_sampler=[[0]])
    iterator = SimpleNamespace(tokens=3)
    runner = SimpleNamespace(
        model=model,
        train_dataloader=loader,
        train_loop=SimpleNamespace(dataloader_iterator=iterator),
        work_dir=tmp_path,
        iter=0,
    )
    # the first document is longer than a row
    hook = compare_run.CompareHook(steps=1, held_out="held_out", max_length=4, row_length=None)
    hook.before_train(runner)
    for runner.iter in range(3):
        hook.before_train_iter(runner, runner.iter)
        model.llm.get_input_embeddings()(torch.tensor([[1, 2, 3, 4]]))
        hook.after_train_iter(runner, runner.iter, outputs=dict(loss=torch.tensor(1.0)))
    hook._seconds = 2.0
    hook.after_train(runner)
    result = json.loads((tmp_path / "result.json").read_text())
    # two steps of four tokens in two seconds
    assert result["tokens_per_second"] == 4
    mean = (9 * losses[0] + 2 * losses[1]) / 11
    assert result["held_out"] == [pytest.approx(mean, rel=1e-6)] * 2


@pytest.mark.parametrize(("row_length", "places"), [(None, 2 * 5 + 9 + 2 * 2), (10, 50)])
def test_padding_is_counted_to_the_longest_row_or_to_the_end_of_a_pack(row_length, places):
    dataset = SimpleNamespace(length=[5, 4, 9, 2, 1])
    loader = SimpleNamespace(dataset=dataset, batch_sampler=[[0, 1], [2], [3, 4]])
    assert compare_run.padding_of(loader, row_length) == pytest.approx(1 - 21 / places)


def test_compare_trains_every_scheme(monkeypatch, capsys):
    # the first steps take a minute each, the others a second
    clock = accumulate(cycle([60] * 2 * 4 + [1] * 2 * 4))
    monkeypatch.setattr(compare, "run_fresh", in_this_process)
    monkeypatch.setattr(compare_run, "_now", lambda: next(clock))
    # MMEngine waits between epochs for worker processes, of which there are none
    monkeypatch.setattr(loops.time, "sleep", lambda seconds: None)
    config = write_config(max_length=128, lr=2e-2)
    assert cli.main(["compare", config, "--steps", "4", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["scheme"] for run in runs] == ["packed", "bucket", "fixed chunk"]
    before, after = zip(*(run["held_out"] for run in runs))
    assert max(before) == pytest.approx(min(before), rel=1e-6)
    for run in runs:
        assert len(run["losses"]) == len(run["targets"]) == 8
        # a step ends with the micro-batch that reaches its tokens
        assert max(run["targets"]) < min(run["targets"]) + 128
        second = run["targets"][4:]
        weighted = sum(loss * n for loss, n in zip(run["losses"][4:], second)) / sum(second)
        assert run["loss"] == pytest.approx(weighted)
        assert run["loss"] < run["losses"][0]
        # the tokens of the second half, a second for every step
        assert sum(second) * 1.3 < 4 * run["tokens_per_second"] < sum(second) * 2
        assert run["peak_bytes"] > 2**20
    assert max(after) < min(before)
    assert Path(f"{Path(config).stem}_compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def results(monkeypatch):
    """What trainings came to, by scheme, in place of trainings."""
    result = dict(
        tokens_per_second=1234.5,
        padding=0.25,
        peak_bytes=3 * 2**30,
        device="Some GPU",
        losses=[4.0, 3.0, 2.0, 1.0],
        targets=[10, 10, 30, 10],
        held_out=[4.0, 2.5],
    )
    results = {scheme: dict(result) for scheme in compare_run.SCHEMES}
    monkeypatch.setattr(
        compare, "run_fresh", lambda function, config, scheme, plan: results[scheme]
    )
    return results


def test_the_table_and_the_picture(results, capsys):
    assert cli.main(["compare", write_config(), "--steps", "2", "--png", "mine.png"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"fixed chunk +1,23[45] +25.0% +3.00 +1.750 +4.000 -> 2.500", output)
    assert "2 optimizer steps after 2 others, Some GPU" in output
    assert "picture in mine.png" in output
    assert Path("mine.png").exists()


def test_other_weights_are_no_comparison(results, capsys):
    results["bucket"]["held_out"] = [4.1, 2.5]
    assert cli.main(["compare", write_config(), "--steps", "2"]) == 1
    assert "the same weights, got held-out losses of [4.0, 4.1, 4.0]" in capsys.readouterr().err


def test_what_cannot_be_compared(capsys):
    assert cli.main(["compare", write_config(), "--steps", "1"]) == 1
    assert "--steps must be at least 2, got 1" in capsys.readouterr().err
    assert cli.main(["compare", write_config(use_varlen_attn=False)]) == 1
    assert "with anything, got 2048 and False; set both" in capsys.readouterr().err
    assert cli.main(["compare", PACKED, "--chunk-length", "-1"]) == 1
    assert "--chunk-length must be at least 2, got -1" in capsys.readouterr().err
    Path("empty.py").write_text("train_dataloader = dict(num_workers=0)\n")
    assert cli.main(["compare", "empty.py"]) == 1
    assert "got one without model, optim_wrapper, train_cfg; give" in capsys.readouterr().err
    config = write_config(appended="train_dataloader.pop('dataset')")
    assert cli.main(["compare", config]) == 1
    assert "got one without train_dataloader.dataset; give" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("png", "message"),
    [
        ("missing/mine.png", "--png must be a file that can be written, got missing/mine.png: No"),
        ("demo.txt", "--png must end with one of .*, .png, .*got demo.txt; the ending"),
        ("mine", "--png must end with one of .*got mine; the ending"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_training(
    monkeypatch, capsys, png, message
):
    monkeypatch.setattr(compare, "compare", None)
    assert cli.main(["compare", PACKED, "--png", png]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not Path(png).exists()


def test_an_interrupted_comparison_leaves_no_file(monkeypatch, capsys):
    def interrupt(*arguments):
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)

    monkeypatch.setattr(tempfile, "tempdir", str(Path("temporary").absolute()))
    Path("temporary").mkdir()
    monkeypatch.setattr(compare, "run_fresh", interrupt)
    config = write_config()
    assert cli.main(["compare", config, "--steps", "2"]) == 130
    assert capsys.readouterr().err.endswith(f"{config}: stopped\n")
    assert not any(Path("temporary").iterdir())
    assert not any(Path().glob("*.png"))
