"""padded_collate_fn: padded rows, and the same step without their padding."""

from functools import partial

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM
from xtuner.dataset.collate_fns import default_collate_fn

from xtuner_mamba.dataset import VarlenPacker, padded_collate_fn
from xtuner_mamba.engine.hooks import PackedLayoutHook
from xtuner_mamba.model import PackedSupervisedFinetune

VOCAB = 30
unpadded_collate_fn = padded_collate_fn
padding_collate_fn = partial(padded_collate_fn, use_varlen_attn=False)


def row(tokens, labels=None):
    return {"input_ids": tokens, "labels": tokens if labels is None else labels}


def test_rows_are_padded_on_the_right():
    data = padding_collate_fn([row([5, 6, 7]), row([8, 9], [-100, 9])], pad_index=3)["data"]
    expected = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 3]]),
        "labels": torch.tensor([[5, 6, 7], [-100, 9, -100]]),
        "attention_mask": torch.tensor([[True, True, True], [True, True, False]]),
        "position_ids": torch.tensor([[0, 1, 2], [0, 1, 2]]),
    }
    assert set(data) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(data[name], tensor, rtol=0, atol=0)


def test_rows_without_padding_are_what_the_hook_takes():
    batch = unpadded_collate_fn([row([5, 6, 7]), row([8]), row([9, 10], [-100, 10])])
    assert batch["data_samples"] is None
    data = batch["data"]
    assert data["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert data["labels"].tolist() == [[-100, 6, 7, -100, -100, 10]]
    assert data["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert [offsets.tolist() for offsets in data["cumulative_len"]] == [[0, 3, 4, 6]]
    assert data["max_seqlen"] == 3
    assert "attention_mask" not in data


def test_the_boundaries_inside_a_fixed_chunk_are_ignored():
    documents = [[5, 6, 7], [8], [9, 10]]
    packs = VarlenPacker(6)({"input_ids": documents, "labels": documents})
    chunk = {name: column[0] for name, column in packs.items()}
    data = unpadded_collate_fn([chunk, row([1, 2])])["data"]
    assert data["cumulative_len"][0].tolist() == [0, 6, 8]
    assert data["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]]
    # nor is a document's first token a target here
    assert data["labels"].tolist() == [[-100, 6, 7, -100, -100, 10, -100, 2]]
    padded = padding_collate_fn([chunk, row([1, 2])])["data"]
    assert set(padded) == {"input_ids", "labels", "attention_mask", "position_ids"}


@pytest.mark.parametrize("collate", [unpadded_collate_fn, padding_collate_fn])
def test_the_inner_dict_alone(collate):
    rows = [row([5, 6, 7]), row([8])]
    assert str(collate(rows, return_hf_format=True)) == str(collate(rows)["data"])


def documents():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (9, 1, 5, 2, 14):
        tokens = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        # a prompt is no target
        labels = [-100] * (length // 3) + tokens[length // 3 :]
        rows.append(row(tokens, labels))
    return rows


def make_llm():
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=8, state_size=4, num_hidden_layers=2, use_cache=False
    )
    return MambaForCausalLM(config).double()


def padded_step(collate):
    """transformers' own step on the padded batch: its mask, and its mean over the targets."""
    llm = make_llm()
    llm(**collate(documents())["data"]).loss.backward()
    return llm


def unpadded_step(break_batch=None):
    model = PackedSupervisedFinetune(make_llm(), use_activation_checkpointing=False)
    batch = unpadded_collate_fn(documents())
    if break_batch is not None:
        break_batch(batch["data"])
    hook = PackedLayoutHook()
    hook.before_train_iter(None, 0, batch)
    loss = model(**batch, mode="loss")["loss"]
    loss.backward()
    hook.after_train_iter(None, 0, batch)
    return loss, model.llm


def largest_difference(llm, other):
    """Between gradients, relative to the largest of each parameter."""
    pairs = zip(llm.parameters(), other.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs)


def test_without_padding_loss_and_gradients_are_the_same():
    expected = padded_step(padding_collate_fn)
    with torch.no_grad():
        expected_loss = expected(**padding_collate_fn(documents())["data"]).loss
    loss, llm = unpadded_step()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert largest_difference(llm, expected) < 1e-5
    # a batch whose rows run into each other, or whose padding is trained on, would be noticed

    def forget_boundaries(data):
        total = data["input_ids"].shape[1]
        data["cumulative_len"] = [torch.tensor([0, total], dtype=torch.int32)]

    def train_on_padding(rows):
        data = default_collate_fn(rows)["data"]
        return {"data": data | {"labels": data["input_ids"]}}

    assert largest_difference(unpadded_step(forget_boundaries)[1], expected) > 1e-2
    assert largest_difference(padded_step(train_on_padding), expected) > 1e-2


@pytest.mark.parametrize("collate", [unpadded_collate_fn, padding_collate_fn])
@pytest.mark.parametrize(
    ("instances", "message"),
    [
        ([], r"a batch must have a document, got \[\]"),
        ([{"input_ids": [1]}], r"input_ids and labels, got \['input_ids'\]; build"),
        ([row([1, 2], [1])], "as many labels, got 2 and 1; set a label to -100"),
        ([row([1]), row([])], "must have tokens and as many labels, got 0 and 0"),
        ([row([1]) | {"pixel_values": [0.5]}], r"text only, got the columns \[.*'pixel_values'"),
    ],
)
def test_what_is_no_document_is_refused(collate, instances, message):
    with pytest.raises(ValueError, match=message):
        collate(instances)
