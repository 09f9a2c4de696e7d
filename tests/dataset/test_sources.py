"""Files and datasets that a config names, before anything is read of them."""

import re

import datasets
import pytest
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from mmengine.config import ConfigDict

from xtuner_mamba.dataset.sources import check_source, load_rows


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "w1"}\n')
    (tmp_path / "data" / "b.jsonl").write_text('{"text": "w2"}\n{"text": "w3"}\n')
    (tmp_path / "empty.jsonl").touch()
    return tmp_path


def source(path="json", **arguments):
    return ConfigDict(type=load_dataset, path=path, cache_dir="cache", **arguments)


def name_of(value):
    # without the addresses of functions, which differ between the processes of a run
    return re.sub(r" at 0x\w+", "", str(value))


@pytest.mark.parametrize(
    ("config", "num_rows"),
    [
        (source(data_files="data/*.jsonl"), 3),
        (source(data_files=["data/a.jsonl", "data/b.jsonl"]), 3),
        (source(data_files=dict(train="data/a.jsonl", test="data/b.jsonl")), 1),
        (source(data_files="*.jsonl", data_dir="data"), 3),
        (source(data_dir="data"), 3),
        (source("./data"), 3),
        (source("data", data_files="b.jsonl"), 2),
    ],
    ids=name_of,
)
def test_what_load_dataset_finds_passes(config, num_rows):
    check_source(config)
    assert len(load_rows(config, "train")) == num_rows


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (source(data_files="dta/*.jsonl"), r"got none for 'dta/\*.jsonl' in {folder}; check"),
        (source(data_files=["data/a.jsonl", "c.jsonl"]), r"none for 'c.jsonl' in {folder}; check"),
        (source(data_files=dict(train="/no/c.jsonl")), r"got none for '/no/c.jsonl' in "),
        (source(data_files="c.jsonl", data_dir="data"), r"none for 'c.jsonl' in {folder}/data; "),
        (source("data", data_files="c.jsonl"), r"got none for 'c.jsonl' in {folder}/data; check"),
        (source(data_dir="dta"), r"data_dir must be on this machine, got 'dta'; .* in {folder}$"),
        (source("./dta"), r"path must be on this machine, got './dta'; .* in {folder}$"),
        (source("/no/dta"), r"path must be on this machine, got '/no/dta'; "),
        (
            dict(type=load_from_disk, dataset_path="dta"),
            r"dataset_path must be on this machine, got 'dta'; ",
        ),
        (source(data_files="empty.jsonl"), r"got the empty {folder}/empty.jsonl; remove it"),
        (source(data_files=["data/a.jsonl", "*.jsonl"]), r"got the empty {folder}/empty.jsonl; "),
        (source(data_files="data/*.jsonl", streaming=True), r"streaming must .*, got True; "),
    ],
    ids=name_of,
)
def test_what_it_would_not_find_is_named(config, message, folder):
    message = message.format(folder=folder)
    with pytest.raises(ValueError, match=message):
        check_source(config)
    with pytest.raises(ValueError, match=message):
        load_rows(config, "train")


@pytest.mark.parametrize(
    "config",
    [
        source("tatsu-lab/alpaca"),
        source("tatsu-lab/alpaca", data_files="not/here.json"),
        source(data_files="https://example.org/a.jsonl"),
        source("hf://datasets/a/b"),
        Dataset.from_dict({"text": ["w1"]}),
        DatasetDict(),
        None,
    ],
    ids=name_of,
)
def test_what_is_not_on_this_machine_is_left_to_who_builds_it(config):
    check_source(config)


def test_a_missing_split_is_named():
    rows = Dataset.from_dict({"text": ["w1"]})
    several = DatasetDict(test=rows, validation=rows)
    with pytest.raises(ValueError, match=r"a split 'train', got \['test', 'validation'\]; set"):
        load_rows(several, "train")
    assert len(load_rows(several, None)) == 2
    assert load_rows(rows, "train") is rows


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (IterableDataset.from_generator(lambda: iter([])), "IterableDataset"),
        (datasets.IterableDatasetDict(), "IterableDatasetDict"),
        ("data/a.jsonl", "str"),
        ({"text": ["w1"]}, "dict"),
        (None, "NoneType"),
    ],
    ids=["streamed", "several streamed", "path", "columns", "nothing"],
)
def test_what_is_no_dataset_is_named(dataset, name):
    with pytest.raises(ValueError, match=f"dataset must be .*, got {name}; load it"):
        load_rows(dataset, "train")
