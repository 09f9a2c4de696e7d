"""The benchmark of LoRA, QLoRA and DPO: small on the CPU, and what it calls wrong."""

import csv
import importlib.util
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_families.py"
SMALL = ["--small", "--tokens", "400", "--steps", "8", "--commit", "abc"]


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    # transformers tells that its own kernels are not installed, and prints where stderr was
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def bench(monkeypatch):
    spec = importlib.util.spec_from_file_location(BENCHMARK.stem, BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    # its dataclasses look for their module
    monkeypatch.setitem(sys.modules, BENCHMARK.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def row(bench):
    return bench.Row(
        "Jamba, LoRA",
        "jamba",
        trained=8,
        first_loss=2.0,
        last_loss=1.0,
        seconds=0.5,
        change=0.0,
        change_without_boundaries=0.2,
    )


def run(bench, folder, *arguments):
    code = bench.main([*SMALL, "--out", str(folder), *arguments])
    with (folder / "families.csv").open() as file:
        return code, list(csv.DictReader(file)), (folder / "families.md").read_text()


def test_every_case_learns_and_keeps_documents_apart(bench, tmp_path):
    code, rows, page = run(bench, tmp_path)
    assert code == 0, page
    assert [row["case"] for row in rows] == [case.name for case in bench.CASES]
    for case, row in zip(bench.CASES, rows):
        assert row["commit"] == "abc"
        if case.quantized and not bench.quantizes():
            assert row["not_run"] == "bitsandbytes finds no CUDA here"
            assert f"| {case.name} | not run: bitsandbytes finds no CUDA here | - |" in page
            continue
        assert int(row["trained"]) > 0 == int(row["without_gradient"])
        assert float(row["last_loss"]) < float(row["first_loss"])
        assert float(row["change"]) == 0 < float(row["change_without_boundaries"])


def test_a_leak_is_noticed(bench, tmp_path, monkeypatch):
    of_lengths = bench.PackedLayout.from_lengths
    monkeypatch.setattr(
        bench.PackedLayout, "from_lengths", lambda lengths: of_lengths([sum(lengths)])
    )
    # the row is then one document for the loss, too
    monkeypatch.setattr(bench, "make_batch", with_boundaries(bench.make_batch))
    code, rows, _ = run(bench, tmp_path, "--case", "Falcon-Mamba, LoRA")
    assert code == 1
    assert float(rows[0]["change"]) > 0


def with_boundaries(make_batch):
    def make(tokens, *arguments):
        return make_batch(tokens, *arguments) | {"cumulative_len": [0, tokens // 2, tokens]}

    return make


def test_what_stops_a_case_stops_no_other(bench, tmp_path, monkeypatch):
    def build(case, folder):
        raise RuntimeError(f"no {case.name}\nmore")

    monkeypatch.setattr(bench, "build", build)
    cases = "--case", "Mamba, DPO", "--case", "Jamba, LoRA"
    code, rows, page = run(bench, tmp_path, *cases)
    assert code == 1
    assert [row["failure"] for row in rows] == [
        "RuntimeError: no Jamba, LoRA",
        "RuntimeError: no Mamba, DPO",
    ]
    assert "| Mamba, DPO | failed: RuntimeError: no Mamba, DPO | - |" in page


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (dict(without_gradient=3), "3 of 8 tensors have no gradient"),
        (dict(last_loss=2.5), "the loss goes from 2.0 to 2.5"),
        (dict(last_loss=math.nan), "the loss goes from 2.0 to nan"),
        (dict(change=1e-9), "other documents change by 1e-09"),
        (dict(change=math.inf, has_experts=True), "other documents change by inf"),
        (dict(change=0.1, has_experts=True), "other documents change by 0.1"),
        (dict(change_without_boundaries=0.0), "other documents change by 0.0"),
        (dict(failure="out of memory"), "out of memory"),
    ],
    ids=str,
)
def test_faults(row, fault, told):
    assert row.faults() == []
    assert replace(row, **fault).faults() == [told]


def test_experts_may_round(row):
    assert replace(row, change=0.01, has_experts=True).faults() == []


@pytest.mark.parametrize(
    ("gradient", "learns"), [(None, False), ([0, 0], False), ([1, math.nan], False), ([0, 1], True)]
)
def test_gradients_that_teach_nothing(bench, gradient, learns):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = None if gradient is None else torch.tensor(gradient, dtype=torch.float32)
    assert bench.has_gradient(parameter) == learns


def test_a_change_to_nan_is_the_largest(bench):
    numbers = torch.tensor([1.0, 2.0])
    assert bench.change_of(numbers.clone(), numbers) == 0
    assert bench.change_of(torch.tensor([1.0, math.nan]), numbers) == math.inf
    assert 0 < bench.change_of(numbers + 1e-3, numbers) < 1e-2
