"""The CPU benchmark checks before it measures, and prints what it measured."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_cpu_scan.py"


@pytest.fixture(scope="module")
def bench():
    spec = spec_from_file_location(BENCHMARK.stem, BENCHMARK)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_prints_json(bench, capsys):
    sizes = ["--tokens", "48", "--backward-tokens", "24", "--repeats", "1"]
    threads = str(torch.get_num_threads())
    assert bench.main([*sizes, "--threads", threads, "--json"]) == 0
    slow, packed = map(json.loads, capsys.readouterr().out.splitlines())
    assert (slow["way"], packed["way"]) == ("slow_forward", "packed")
    assert slow["backward_ms"] is None
    assert all(row["forward_ms"] > row["mixers_forward_ms"] > 0 for row in (slow, packed))
    assert all(row["forward_ms"] > 0 < row["short_backward_ms"] for row in (slow, packed))


def test_wrong_results_are_not_timed(bench):
    slow, packed = bench.make_model(), bench.make_model()
    # not dispatched: the documents of the pack see each other
    with pytest.raises(RuntimeError, match=r"must equal documents alone, got \d.* in "):
        bench.check(slow, packed)
