"""The tool that writes the table of docs/families.md."""

import json
import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from unittest import mock

import family_proof
import prove_families
import pytest
import torch


@pytest.fixture
def proof():
    return prove_families.prove(prove_families.FAMILIES["Mamba-2"])


@pytest.fixture
def rounded():
    return family_proof.RoundedProof(
        layers={"MixtralAttention": 2},
        backends={"attention": "varlen"},
        logits_error=0.01,
        eager_logits_error=0.011,
        worst="model.norm.weight",
        gradient_error=0.02,
        eager_gradient_error=0.012,
        excess=1.7,
        leak=0.25,
        changed=0.0,
        has_experts=True,
    )


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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--device", "cuda"], "--dtype must be bfloat16 or float16 on cuda, got float64"),
        (["--dtype", "bfloat16", "--write"], "which the page has, got bfloat16 on cpu"),
        (["--device", "cuda", "--dtype", "float16", "--write"], "got float16 on cuda"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_or_has_no_table_is_refused(capsys, arguments, told):
    with pytest.raises(SystemExit):
        prove_families.main(arguments)
    assert told in capsys.readouterr().err


# -- in 16 bits -----------------------------------------------------------------------------------


def test_measures_16_bits_beside_transformers(capsys):
    assert prove_families.main(["--dtype", "bfloat16", "--family", "Bamba", "--json"]) == 0
    (proof,) = json.loads(capsys.readouterr().out).values()
    assert proof["backends"] == {"ssd": "reference", "attention": "blocked"}
    assert proof["layers"] == {"BambaMixer": 2, "BambaAttention": 1}
    # what rounding makes, in both
    for error in ("logits_error", "eager_logits_error", "gradient_error", "eager_gradient_error"):
        assert 1e-3 < proof[error] < 0.1, error
    assert proof["leak"] > 0.1
    assert proof["changed"] == 0


@pytest.mark.parametrize("wrong", ["logits", "model.final_layernorm.weight"])
def test_an_error_beside_transformers_is_noticed(monkeypatch, wrong):
    def run(*arguments):
        logits, gradients = family_proof_run(*arguments)
        if wrong == "logits":
            return 1.05 * logits, gradients
        return logits, gradients | {wrong: 1.05 * gradients[wrong]}

    family_proof_run = family_proof.run_packed
    monkeypatch.setattr(family_proof, "run_packed", run)
    proof = family_proof.prove_rounded(prove_families.FAMILIES["Bamba"], torch.bfloat16, "cpu")
    assert proof.excess > prove_families.MOST_EXCESS
    assert wrong in ("logits", proof.worst)


@pytest.mark.parametrize(
    "fault",
    [
        dict(excess=3.1),
        dict(excess=math.nan),
        dict(logits_error=0.07),
        dict(changed=1e-9, has_experts=False),
        dict(changed=math.inf),
    ],
    ids=str,
)
def test_a_promise_broken_in_16_bits_fails(monkeypatch, capsys, rounded, fault):
    monkeypatch.setattr(prove_families, "FAMILIES", {"Mixtral": None})
    for proof, code in ((rounded, 0), (replace(rounded, **fault), 1)):
        monkeypatch.setattr(prove_families, "prove_rounded", lambda *args, proof=proof: proof)
        assert prove_families.main(["--dtype", "bfloat16"]) == code
    assert "not exact or not isolated: ['Mixtral']" in capsys.readouterr().err


def test_a_family_that_does_not_run_costs_no_other(monkeypatch, capsys, rounded):
    def prove(build, dtype, device):
        if build is None:
            raise RuntimeError("no kernel takes it")
        return rounded

    monkeypatch.setattr(prove_families, "FAMILIES", {"Mamba": None, "Mixtral": 1})
    monkeypatch.setattr(prove_families, "prove_rounded", prove)
    assert prove_families.main(["--dtype", "bfloat16", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out).keys() == {"Mixtral"}
    assert "Mamba does not run:" in captured.err
    assert "RuntimeError: no kernel takes it" in captured.err
    assert "not isolated: ['Mamba']" in captured.err


def test_writes_a_table_of_a_gpu(monkeypatch, tmp_path, rounded):
    page = tmp_path / "families.md"
    page.write_text("<!-- families in bfloat16 -->\n<!-- end of families in bfloat16 -->\n")
    monkeypatch.setattr(prove_families, "PAGE", page)
    monkeypatch.setattr(prove_families, "FAMILIES", {"Mixtral": None})
    monkeypatch.setattr(prove_families, "prove_rounded", lambda *args: rounded)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert prove_families.main(["--device", "cuda", "--dtype", "bfloat16", "--write"]) == 0
    lines = page.read_text().splitlines()
    assert lines[1].startswith("Some GPU, torch ")
    assert lines[5] == (
        "| Mixtral | MixtralAttention | attention: varlen | 1.0e-02 | 1.1e-02 "
        "| 2.0e-02 (model.norm.weight) | 1.2e-02 | 2.5e-01 | to the bit |"
    )


def test_the_page_has_every_family_in_16_bits_or_none_yet():
    table = prove_families.ROUNDED_TABLE.search(prove_families.PAGE.read_text())[0]
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert names[2:] in ([], list(prove_families.FAMILIES))


@pytest.mark.parametrize("name", prove_families.FAMILIES)
def test_sizes_are_those_that_kernels_of_a_gpu_take(name):
    """All but where an op is chosen by its inputs is as on a GPU."""
    seen = set()

    def choose(op, *inputs):
        seen.add(op)
        if op == "selective_scan":
            x, _, A, _ = inputs
            assert x.shape[-1] % 64 == 0
            assert A.shape[1] == 16
            return "cpu"
        assert inputs[0].shape[-1] % 16 == 0
        return {"ssd": "reference", "attention": "blocked"}[op]

    build = partial(family_proof.resized, prove_families.FAMILIES[name])
    model, layers = family_proof.dispatched(family_proof.make(build, torch.bfloat16))
    layout = family_proof.PackedLayout.from_lengths(family_proof.LONGER)
    tokens = family_proof.draw_tokens(model.config.vocab_size, family_proof.LONGER)
    with ExitStack() as stack:
        for op in ("selective_scan", "ssd", "attention"):
            api = import_module(f"xtuner_mamba.ops.{op}.api")
            stack.enter_context(mock.patch.object(api, "_choose_impl", partial(choose, op)))
        stack.enter_context(layout.published())
        model(tokens)
    expected = {
        prove_families.OPS[prove_families.DISPATCH_TABLE[layer].split(":")[0].rpartition(".")[2]]
        for layer in layers
    }
    assert seen == expected
