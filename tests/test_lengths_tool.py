"""``xtuner-mamba lengths``: from a file or a config to tables, a picture and JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, disable_progress_bars
from datasets.exceptions import DatasetGenerationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from xtuner_mamba import cli
from xtuner_mamba.tools import corpus, lengths

disable_progress_bars()
ROOT = Path(__file__).parents[1]
LENGTHS = [3, 4, 4, 9, 30]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    """One token a word, with an end before and after the text."""
    words = Tokenizer(WordLevel({"<unk>": 0, "<end>": 1, "w": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    ends = dict(bos_token="<end>", eos_token="<end>", unk_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=words, **ends).save_pretrained(folder / "tokenizer")
    return "tokenizer"


def write(path, rows):
    Path(path).write_text("\n".join(map(json.dumps, rows)))
    return path


def numbers(capsys, *arguments):
    assert cli.main(["lengths", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("column", ["length", "input_ids", "text"])
def test_a_file_of_lengths_tokens_or_texts(capsys, tokenizer, column):
    made = {
        "length": lambda n: n,
        "input_ids": lambda n: [7] * n,
        # the ends are tokens too
        "text": lambda n: " ".join(["w"] * (n - 2)),
    }
    rows = [{column: made[column](n), "other": "x"} for n in LENGTHS]
    source = write("documents.jsonl", rows)
    found = numbers(capsys, source, "--tokenizer", tokenizer, "--max-length", "16")
    assert found["documents"] == len(LENGTHS)
    assert found["tokens"] == sum(LENGTHS)
    assert found["quantiles"]["max"] == 30
    assert found["long_documents"] == 1
    assert found["max_length"] == 16
    assert found["advice"]["scheme"] in ("packed", "bucket")


def test_whole_numbers_that_were_stored_as_floats(capsys):
    write("documents.jsonl", [{"length": float(n)} for n in LENGTHS])
    assert numbers(capsys, "documents.jsonl")["tokens"] == sum(LENGTHS)


def test_a_parquet_file(capsys):
    Dataset.from_dict({"length": LENGTHS}).to_parquet("documents.parquet")
    assert numbers(capsys, "documents.parquet")["tokens"] == sum(LENGTHS)


CONFIG = """
from datasets import load_dataset
from mmengine.dataset import DefaultSampler
from xtuner_mamba.dataset import BucketBatchSampler, process_document_dataset

train_dataloader = dict(
    dataset=dict(
        type=process_document_dataset,
        dataset=dict(type=load_dataset, path="json", data_files="documents.jsonl"),
        do_dataset_tokenization=False,
        max_length=16,
        too_long="drop",
    ),
    batch_sampler=dict(type=BucketBatchSampler, boundaries=[4, 16], tokens_per_batch=32),
)
"""


def test_a_config_gives_its_documents_row_length_and_boundaries(capsys):
    rows = [{"input_ids": [7] * n, "labels": [7] * n} for n in LENGTHS]
    # as in training, what has no label is not there
    rows.append({"input_ids": [7] * 50, "labels": [-100] * 50})
    write("documents.jsonl", rows)
    Path("config.py").write_text(CONFIG)
    found = numbers(capsys, "config.py")
    assert found["tokens"] == sum(LENGTHS)
    assert found["max_length"] == 16
    assert [bucket["boundary"] for bucket in found["buckets"]] == [4, 16]
    assert [bucket["batch_size"] for bucket in found["buckets"]] == [8, 2]
    # the document of 30 tokens is dropped
    assert [bucket["documents"] for bucket in found["buckets"]] == [3, 1]
    assert found["schemes"][-1]["num_dropped"] == 1
    # the command line has the last word
    found = numbers(capsys, "config.py", "--boundaries", "8", "40", "--max-length", "40")
    assert [bucket["boundary"] for bucket in found["buckets"]] == [8, 40]


def test_measured_batch_sizes_of_a_config(capsys):
    write("documents.jsonl", [{"input_ids": [7] * n, "labels": [7] * n} for n in LENGTHS])
    Path("config.py").write_text(CONFIG.replace("tokens_per_batch=32", "batch_sizes=[3, 1]"))
    found = numbers(capsys, "config.py")
    assert [bucket["batch_size"] for bucket in found["buckets"]] == [3, 1]
    found = numbers(capsys, "config.py", "--tokens-per-batch", "64")
    assert [bucket["batch_size"] for bucket in found["buckets"]] == [16, 4]
    found = numbers(capsys, "config.py", "--boundaries", "6", "8", "16", "--png", "x.png")
    assert [bucket["batch_size"] for bucket in found["buckets"]] == [2666, 1000]
    assert cli.main(["lengths", "config.py"]) == 0
    assert "1 dropped (60.0%)" in capsys.readouterr().out


def test_tables_and_a_picture(capsys, folder):
    write("documents.jsonl", [{"length": n} for n in LENGTHS])
    arguments = ["documents.jsonl", "--max-length", "32", "--boundaries", "8", "32"]
    assert cli.main(["lengths", *arguments]) == 0
    output = capsys.readouterr().out
    assert "5 documents, 50 tokens: min 3" in output
    assert "what they leave unused, the last one included." in output
    for words in ("packed, best fit", "optimal buckets, 4", "powers of two", "your buckets"):
        assert words in output
    assert "Recommended: " in output
    assert "picture in documents_lengths.png" in output
    assert (folder / "documents_lengths.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["lengths", *arguments, "--png", "mine.png"]) == 0
    assert (folder / "mine.png").exists()


def test_boundaries_to_copy_where_buckets_are_recommended(capsys):
    write("documents.jsonl", [{"length": n} for n in range(600, 1000, 5)])
    assert cli.main(["lengths", "documents.jsonl", "--max-length", "1024"]) == 0
    assert "boundaries = [" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("documents.txt", "ends with .json, .jsonl, .parquet, .csv, got 'documents.txt'"),
        ("words.jsonl", r"length, input_ids or text, got ['word']"),
        ("texts.jsonl", "a tokenizer must be given for the column text, got none"),
        ("other.py", "got list; `xtuner-mamba lengths` also takes the data file itself"),
        ("long.jsonl", "got 8 for 9 tokens in document 0"),
        ("empty.jsonl", "a data file must hold documents, got the empty "),
        ("blank.jsonl", "a data file must hold documents, got no row"),
        (
            "half.jsonl",
            "length must tell of a whole number of tokens, from 1 to 1,099,511,627,776, got 4.5",
        ),
        ("none.jsonl", "got 0 in row 2"),
        ("null.jsonl", "got None in row 1"),
        ("hollow.jsonl", "input_ids must tell of a whole number of tokens, from 1 to 1,0"),
        ("hollow.jsonl", "776, got 0 in row 1; mend the row"),
        ("huge.jsonl", "776, got 1e+300 in row 0; mend"),
        ("long_words.jsonl", "length must hold integers, got string"),
        ("nowhere.py", "or the name of a template, got 'nowhere.py' ([Errno 2] No such file or"),
        ("broken.jsonl", "a data file must be whole, got JSON parse error"),
        ("string.jsonl", "input_ids must hold lists of tokens, got string"),
        ("syntax.py", "a config must be Python that runs, got SyntaxError: "),
        ("name.py", "a config must be Python that runs, got NameError: name 'missing'"),
        ("absent.py", "Failed to import nowhere.to_be_found in absent.py, line 1"),
        ("no_data.py", "a config must set train_dataloader, got none"),
        ("data_none.py", "train_dataloader must have a dataset, got none"),
        ("no_dataset.py", "train_dataloader must have a dataset, got none"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, source, message):
    write("words.jsonl", [{"word": "x"}])
    write("texts.jsonl", [{"text": "x"}])
    write("long.jsonl", [{"length": 9}])
    Path("empty.jsonl").touch()
    Path("blank.jsonl").write_text("\n\n")
    write("half.jsonl", [{"length": 3.0}, {"length": 4.5}])
    write("none.jsonl", [{"length": 3}, {"length": 3}, {"length": 0}])
    write("null.jsonl", [{"length": 3}, {"length": None}])
    write("hollow.jsonl", [{"input_ids": [7]}, {"input_ids": []}])
    write("long_words.jsonl", [{"length": "long"}])
    Path("broken.jsonl").write_text('{"length": 5}\n{broken\n')
    write("huge.jsonl", [{"length": 1e300}])
    write("string.jsonl", [{"input_ids": "abc"}])
    Path("syntax.py").write_text("x = (\n")
    Path("name.py").write_text("x = missing\n")
    Path("absent.py").write_text(
        "from nowhere.to_be_found import rows\n"
        "from xtuner_mamba.dataset import process_packed_dataset\n\n"
        "train_dataloader = dict(dataset=dict(type=process_packed_dataset, dataset=rows))\n"
    )
    Path("no_data.py").write_text("x = 1\n")
    Path("data_none.py").write_text("train_dataloader = None\n")
    Path("no_dataset.py").write_text("train_dataloader = dict(batch_size=1)\n")
    Path("other.py").write_text("train_dataloader = dict(dataset=dict(type=list))\n")
    assert cli.main(["lengths", source, "--boundaries", "8"]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith(f"{source}: ")


@pytest.mark.parametrize("num_proc", [1, 2])
def test_texts_in_another_encoding_are_refused(capsys, tokenizer, monkeypatch, num_proc):
    # an error that a process which maps hands on has another cause
    monkeypatch.setattr("os.cpu_count", lambda: num_proc)
    Path("latin.jsonl").write_text('{"text": "w"}\n{"text": "caf\xe9"}\n', encoding="latin1")
    assert cli.main(["lengths", "latin.jsonl", "--tokenizer", tokenizer]) == 1
    message = "latin.jsonl: a data file must be text in UTF-8, got the byte 0xe9 (unexpected end"
    assert message in capsys.readouterr().err


def test_an_encoding_that_the_reader_of_a_file_stumbles_over(capsys, monkeypatch):
    # stands for the reader of .csv, which leaves such a file open
    def read(reader, **options):
        try:
            b"caf\xe9".decode()
        except UnicodeDecodeError as error:
            raise DatasetGenerationError("while generating the dataset") from error

    monkeypatch.setattr(corpus, "load_dataset", read)
    Path("latin.csv").write_text("text\n")
    assert cli.main(["lengths", "latin.csv"]) == 1
    message = "must be text in UTF-8, got the byte 0xe9 (unexpected end of data); convert it, with"
    assert message in capsys.readouterr().err


def test_a_tokenizer_that_is_not_there(capsys):
    write("texts.jsonl", [{"text": "x"}])
    assert cli.main(["lengths", "texts.jsonl", "--tokenizer", "./nowhere"]) == 1
    error = capsys.readouterr().err
    assert "texts.jsonl: --tokenizer must name a folder with a tokenizer, or one" in error
    assert "got './nowhere' (" in error
    assert error.endswith("); check the name, or save one with save_pretrained\n")


def test_a_document_of_more_rows_than_can_be_planned(capsys):
    write("documents.jsonl", [{"length": 5}, {"length": 2**40}])
    assert cli.main(["lengths", "documents.jsonl"]) == 1
    error = capsys.readouterr().err
    assert (
        "every max_length=8,192 tokens must add at most 16,777,216 rows, got 134,217,727" in error
    )
    assert "(document 1 has 1,099,511,627,776 tokens); mend that" in error
    assert cli.main(["lengths", "documents.jsonl", "--max-length", str(2**22 + 1)]) == 1
    assert "at most 4,194,304 to be planned, got 4,194,305; lower" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-length", "0"], "--max-length must be at least 1, got 0"),
        (["--max-length", "-5"], "--max-length must be at least 1, got -5"),
        (["--tokens-per-batch", "-1"], "--tokens-per-batch must be at least 1, got -1"),
        (["--png", "x.foo"], "got x.foo; the ending"),
        (["--png", "nowhere/x.png"], "can be written, got nowhere/x.png: No such file"),
        (["--png", "folder.png"], "can be written, got folder.png: Is a directory"),
    ],
)
def test_options_that_cannot_be_met_are_refused_at_once(monkeypatch, capsys, options, message):
    monkeypatch.setattr(lengths, "read_corpus", lambda *_: pytest.fail("the corpus was read"))
    Path("folder.png").mkdir()
    with pytest.raises(SystemExit) as stop:
        cli.main(["lengths", "documents.jsonl", *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_json_is_all_that_stdout_gets(folder):
    write("documents.jsonl", [{"length": n} for n in LENGTHS])
    command = [sys.executable, str(ROOT / "tools" / "lengths.py"), "documents.jsonl", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["documents"] == len(LENGTHS)
