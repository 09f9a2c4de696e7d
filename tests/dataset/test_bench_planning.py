"""The planning benchmark runs and prints what it measured."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_planning.py"


@pytest.fixture(scope="module")
def main():
    spec = spec_from_file_location(BENCHMARK.stem, BENCHMARK)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_it_prints_json(main, capsys):
    assert main(["--num-documents", "2000", "--repeats", "1", "--json"]) == 0
    rows = {row["packing"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(rows) == {"best_fit", "best_fit, longest first", "wrap"}
    assert rows["best_fit"]["split"] == 0 < rows["wrap"]["split"]
    assert all(row["documents"] == 2000 for row in rows.values())
    assert all(0.98 < row["utilisation"] <= 1 for row in rows.values())


def test_it_prints_a_table(main, capsys):
    assert main(["--num-documents", "100", "--repeats", "1"]) == 0
    assert "utilisation" in capsys.readouterr().out
