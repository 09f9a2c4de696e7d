"""The page on lengths and its benchmark: examples give what it says, the commands run."""

import doctest
import importlib
import json
import re
from pathlib import Path

from mmengine.logging import MMLogger

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "lengths.md"


def test_the_examples_of_the_page_are_right(monkeypatch):
    # the log goes to stdout, which is what an example prints
    monkeypatch.setattr(MMLogger, "callHandlers", lambda self, record: None)
    text = re.sub(r"^```.*$", "", PAGE.read_text(), flags=re.MULTILINE)
    page = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(page.examples) > 12
    assert doctest.DocTestRunner().run(page).failed == 0


def test_the_tests_that_the_page_names_are_there():
    named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", PAGE.read_text())
    assert len(named) >= 3
    assert all((ROOT / name).exists() for name in named)


def test_the_benchmark_prints_what_it_measured(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    logger = MMLogger.get_current_instance()
    monkeypatch.setattr(logger, "level", logger.level)
    benchmark = importlib.import_module("bench_lengths")
    assert benchmark.main(["--num-documents", "500", "--repeats", "1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 4
    assert all(row["documents"] == 500 and row["seconds"] > 0 for row in rows)
    assert benchmark.main(["--num-documents", "500", "--repeats", "1"]) == 0
    assert "an epoch of buckets" in capsys.readouterr().out
