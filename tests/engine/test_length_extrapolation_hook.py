"""Perplexity by place in a document, against transformers' own forward."""

import math

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset

from xtuner_mamba.dataset import process_document_dataset
from xtuner_mamba.engine.hooks import LengthExtrapolationHook
from xtuner_mamba.layout import current_layout

HELD_OUT = [30, 3, 64, 17]
LENGTHS = (4, 16, 64)


@pytest.fixture
def documents():
    draw = torch.Generator().manual_seed(7)
    ids = [torch.randint(1, 30, (n,), generator=draw).tolist() for n in HELD_OUT]
    labels = [[-100] * (len(row) // 3) + row[len(row) // 3 :] for row in ids]
    return Dataset.from_dict(dict(input_ids=ids, labels=labels))


def dataset_of(documents) -> dict:
    return dict(
        type=process_document_dataset,
        dataset=documents,
        do_dataset_tokenization=False,
        max_length=64,
    )


def by_hand(llm, rows) -> list[float]:
    losses = [[], [], []]
    for row in rows:
        ids, labels = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        with torch.no_grad():
            logits = llm(ids[None]).logits[0]
        for place in range(1, len(ids)):
            if labels[place] != -100:
                loss = F.cross_entropy(logits[place - 1], labels[place])
                stretch = next(i for i, end in enumerate(LENGTHS) if place + 1 <= end)
                losses[stretch].append(loss.item())
    return [math.exp(sum(stretch) / len(stretch)) for stretch in losses]


@pytest.fixture
def packs(make_pack):
    return [make_pack([9, 2], seed) for seed in range(3)]


def train(runner) -> dict:
    runner.train()
    return runner.message_hub.get_info("length_extrapolation")


def test_perplexities_are_those_of_transformers(tmp_path, make_runner, make_llm, packs, documents):
    hook = dict(
        type=LengthExtrapolationHook,
        dataset=dataset_of(documents),
        max_length=16,
        lengths=LENGTHS,
        every_n_iters=2,
    )
    runner = make_runner(tmp_path, packs, [hook])
    history = train(runner)
    # in the middle, and at the end
    assert list(history) == [2, 3]
    expected = by_hand(make_llm_of(runner, make_llm), documents)
    assert history[3] == pytest.approx(expected, rel=1e-5)
    assert history[2] != pytest.approx(expected, rel=1e-5)
    assert len({round(value, 2) for value in expected}) == 3
    assert current_layout() is None
    assert runner.model.training
    log = next(tmp_path.rglob("*.log")).read_text()
    assert "17 to 64" in log
    assert (tmp_path / "length_extrapolation.png").stat().st_size > 1000


def make_llm_of(runner, make_llm):
    """The trained weights in a model that nothing was dispatched in."""
    llm = make_llm()
    llm.load_state_dict(runner.model.llm.state_dict())
    return llm


def test_training_is_the_same_with_it_and_curves_outlive_a_resume(
    tmp_path, make_runner, packs, documents
):
    hook = dict(
        type=LengthExtrapolationHook, dataset=dataset_of(documents), max_length=8, every_n_iters=1
    )
    runners = [
        make_runner(tmp_path / "with", packs, [hook]),
        make_runner(tmp_path / "without", packs, []),
    ]
    history = train(runners[0])
    train(runners[1])
    weights = [torch.cat([p.detach().flatten() for p in r.model.parameters()]) for r in runners]
    assert torch.equal(*weights)
    resumed = make_runner(
        tmp_path / "resumed",
        packs,
        [hook],
        load_from=str(tmp_path / "with" / "iter_2.pth"),
        resume=True,
    )
    assert train(resumed) == history


def test_the_longest_documents_are_measured(documents):
    hook = LengthExtrapolationHook(
        dataset_of(documents), max_length=16, lengths=LENGTHS, num_documents=2
    )
    hook.before_train(None)
    assert [len(ids) for ids, _ in hook._documents] == [64, 30]
    cut = LengthExtrapolationHook(dataset_of(documents), 16, lengths=[4, 20], num_documents=2)
    cut.before_train(None)
    assert [len(ids) for ids, _ in cut._documents] == [20, 20]


def test_joined_documents_reach_the_longest_length(documents):
    hook = LengthExtrapolationHook(
        dataset_of(documents), max_length=8, lengths=[8, 50], num_documents=2, join=True
    )
    hook.before_train(None)
    assert [len(ids) for ids, _ in hook._documents] == [50, 50]
    tokens = [token for n in (2, 0, 3) for token in documents[n]["input_ids"]]
    assert torch.cat([ids for ids, _ in hook._documents]).tolist() == tokens[:100]
    labels = torch.cat([labels for _, labels in hook._documents])
    # where a document starts, whatever its labels are
    assert labels[[0, 64, 94]].tolist() == [-100] * 3


def test_lengths_are_those_of_the_rule():
    hook = LengthExtrapolationHook(None, max_length=2048)
    assert hook._lengths == [50, 512, 1024, 2048, 4096, 8192, 16384]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lengths=[64, 64]), r"that rise from 2 or more, got \[64, 64\]; leave"),
        (dict(lengths=[2.5]), r"lengths must be integers .*, got \[2.5\]; leave"),
        (dict(lengths=[]), r"lengths must be integers .*, got \[\]; leave"),
        (dict(lengths=64), "lengths must be integers .*, got 64; leave"),
        (dict(num_documents=0), "num_documents must be an integer of at least 1, got 0"),
        (dict(max_length=0), "max_length must be an integer of at least 1, got 0"),
        (dict(every_n_iters=-1), "every_n_iters must be an integer of at least 1, got -1"),
        (dict(every_n_iters=1.5), "every_n_iters must be an integer of at least 1, got 1.5"),
        (dict(dtype="float32"), "None, 'bfloat16' or 'float16', got 'float32'"),
    ],
)
def test_what_it_cannot_measure_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LengthExtrapolationHook(None, **dict(max_length=2048) | options)
