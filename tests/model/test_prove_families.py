"""The tool that writes the table of docs/families.md."""

import json
import math
from dataclasses import replace

import prove_families
import pytest


@pytest.fixture
def proof():
    return prove_families.prove(prove_families.FAMILIES["Mamba-2"])


def test_prints_the_numbers(capsys):
    assert prove_families.main(["--family", "Mamba-2", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers.keys() == {"Mamba-2"}
    assert numbers["Mamba-2"]["layers"] == {"Mamba2Mixer": 2}
    assert prove_families.main(["--family", "Mamba-2"]) == 0
    assert "Mamba2Mixer" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fault",
    [
        dict(logits_error=2e-12),
        dict(gradient_error=math.nan),
        dict(changed=1e-9),
        dict(changed=1e-5, has_experts=True),
        dict(changed=math.inf, has_experts=True),
    ],
    ids=str,
)
def test_a_broken_promise_fails_and_is_not_written(monkeypatch, capsys, tmp_path, proof, fault):
    page = tmp_path / "families.md"
    page.write_text("<!-- families -->\n<!-- end of families -->")
    before = page.read_text()
    monkeypatch.setattr(prove_families, "PAGE", page)
    monkeypatch.setattr(prove_families, "FAMILIES", {"Mamba-2": None})
    monkeypatch.setattr(prove_families, "prove", lambda build: replace(proof, **fault))
    assert prove_families.main(["--write"]) == 1
    assert "not exact or not isolated: ['Mamba-2']" in capsys.readouterr().err
    assert page.read_text() == before


def test_writes_between_the_marks(monkeypatch, tmp_path, proof):
    page = tmp_path / "families.md"
    page.write_text("before\n<!-- families -->\nold\n<!-- end of families -->\nafter\n")
    monkeypatch.setattr(prove_families, "PAGE", page)
    monkeypatch.setattr(prove_families, "FAMILIES", {"Mamba-2": None})
    monkeypatch.setattr(prove_families, "prove", lambda build: proof)
    assert prove_families.main(["--write"]) == 0
    lines = page.read_text().splitlines()
    assert lines[:2] == ["before", "<!-- families -->"]
    assert lines[4].startswith("| Mamba-2 | Mamba2Mixer |  | ssd | ")
    assert lines[4].endswith("| to the bit |")
    assert lines[5:] == ["<!-- end of families -->", "after"]


def test_the_page_has_every_family_and_no_other():
    table = prove_families.TABLE.search(prove_families.PAGE.read_text())[0]
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert names[2:] == list(prove_families.FAMILIES)


def test_a_part_of_the_table_is_not_written(capsys):
    with pytest.raises(SystemExit):
        prove_families.main(["--write", "--family", "Mamba-2"])
    assert "--write must come without --family" in capsys.readouterr().err
