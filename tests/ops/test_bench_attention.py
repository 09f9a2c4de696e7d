"""The benchmark of attention times right results only."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_attention.py"
ARGS = ["--tokens", "1500", "--heads", "2", "--head-dim", "8", "--repeats", "1", "--json"]


@pytest.fixture
def bench():
    spec = spec_from_file_location(BENCHMARK.stem, BENCHMARK)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_prints_json(bench, capsys):
    assert bench.main(ARGS) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["way"] for row in rows] == ["packed", "row", "mask", "padded"]
    assert all(row["forward_ms"] > 0 < row["backward_ms"] for row in rows)


def test_documents_that_see_each_other_are_not_timed(bench, monkeypatch):
    attend = bench.attention
    monkeypatch.setattr(bench, "attention", lambda *qkv, cu_seqlens: attend(*qkv))
    with pytest.raises(RuntimeError, match=r"packed must equal the row under a mask, .* of 0\.\d"):
        bench.main(ARGS)
