"""What must hold of labels and padding, in a batch of short and long documents and in the data."""

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from xtuner_mamba.dataset.conversations import map_rows
from xtuner_mamba.dataset.plan import Pieces
from xtuner_mamba.dataset.sources import load_rows
from xtuner_mamba.layout import IGNORE_INDEX
from xtuner_mamba.tools.checkup import Finding, NotApplicable
from xtuner_mamba.tools.training import Training

# documents whose labels are looked at
_NUM_SAMPLED = 1000
# padding tokens at the end of a document that are no accident; some pad with their end of text
_PADDING_RUN = 4
_DO_NOT_SHIFT = "set labels to the input_ids themselves, or to -100; the loss shifts them"


def check_label_places(training: Training) -> Finding | str:
    """Check that every label is that of the token at its place; the loss does the shift.

    In the data, and in a batch, whose labels the collate function may have changed.
    """
    input_ids, labels, _ = _sample(training)
    wrong = _find_wrong_labels(input_ids, labels)
    if wrong:
        return Finding(wrong, _DO_NOT_SHIFT, "train_dataset")
    data, places = training.batch.data, training.batch.places
    input_ids_of_batch, labels_of_batch = (
        np.concatenate([data[name].flatten()[place].numpy() for place in places])
        for name in ("input_ids", "labels")
    )
    wrong = _find_wrong_labels(input_ids_of_batch, labels_of_batch)
    if wrong:
        return Finding(f"as collated, {wrong}", _DO_NOT_SHIFT, "collate_fn")
    count = (labels != IGNORE_INDEX).sum()
    return f"{count:,} labels, each of the token at its place, as in a collated batch"


def _find_wrong_labels(input_ids: np.ndarray, labels: np.ndarray) -> str | None:
    """Say how many labels are not of the token at their place, ``(total,)``, if any."""
    is_label = labels != IGNORE_INDEX
    wrong = int((is_label & (labels != input_ids)).sum())
    if not wrong:
        return None
    of_next = (is_label[:-1] & (labels[:-1] == input_ids[1:])).sum() > is_label.sum() / 2
    which = "the next token" if of_next else "another token"
    return f"{wrong:,} of {is_label.sum():,} labels are of {which}"


def check_padding_labels(training: Training) -> Finding | str:
    """Check that nothing trains the model to predict padding, of a batch or of the data."""
    batch = training.batch
    labels = batch.data["labels"].flatten().clone()
    padding = labels.numel() - sum(batch.lengths)
    for place in batch.places:
        labels[place] = IGNORE_INDEX
    wrong = int((labels != IGNORE_INDEX).sum())
    if wrong:
        return Finding(
            f"{wrong} of {padding} places of padding have a label",
            "set labels to -100 where there is padding, as padded_collate_fn does: "
            "collate_fn=dict(type=padded_collate_fn)",
            "collate_fn",
        )
    input_ids, labels, lengths = _sample(training)
    ends = lengths.cumsum()[lengths >= _PADDING_RUN]
    last = ends[:, None] - 1 - np.arange(_PADDING_RUN)
    is_padding = (input_ids[last] == training.pad_token_id) & (labels[last] == input_ids[last])
    num_padded = int(is_padding.all(axis=1).sum())
    if num_padded:
        return Finding(
            f"{num_padded:,} of {len(lengths):,} documents end in padding with labels",
            "tokenize without padding, or set its labels to -100",
            "train_dataset",
        )
    return f"{padding} places of padding, none with a label"


def check_padding(training: Training) -> Finding | str:
    """Check that a batch is padded to its longest document at most."""
    batch = training.batch
    places = batch.data["input_ids"].numel()
    padded = len(batch.lengths) * max(batch.lengths) if batch.is_padded else sum(batch.lengths)
    share = 1 - sum(batch.lengths) / places
    if places > padded:
        return Finding(
            f"{share:.1%} of {places} places are padding, {1 - sum(batch.lengths) / padded:.1%} "
            f"would do for documents of {batch.lengths}",
            "pad to the longest document of a batch, and not to max_length: "
            "collate_fn=dict(type=padded_collate_fn)",
            "collate_fn",
        )
    return f"{share:.1%} for documents of {', '.join(map(str, batch.lengths))} tokens"


def check_prompts(training: Training) -> Finding | str:
    """Check that prompts have no labels and answers theirs, as the conversations say.

    Raises:
        NotApplicable: The data comes tokenized, so that nothing says what a prompt is.
    """
    seen, wrong = Counter(), Counter()
    for part, has_label, is_label in _parts_of_turns(training):
        seen[part] += len(is_label)
        wrong[part] += int((is_label != has_label).sum())
    if wrong.total():
        return Finding(
            f"{wrong['input']} of {seen['input']} tokens of prompts have a label, "
            f"{wrong['output']} of {seen['output']} of answers have none",
            "let dataset_map_fn put what is given into 'input', what is to be learnt into 'output'",
            "dataset_map_fn",
        )
    return (
        f"{seen['input']} tokens of prompts without a label, {seen['output']} of answers with "
        "theirs"
    )


@torch.no_grad()
def check_first_tokens(training: Training) -> Finding | str:
    """Check that no document's first token is what the one before is trained to predict.

    A label there does no harm to a model that masks it, so the loss itself is asked: whether it
    is the same without such labels.
    """
    batch = training.batch
    labels = batch.data["labels"]
    firsts = torch.tensor([place.start for place in batch.places])
    labelled = firsts[labels.flatten()[firsts] != IGNORE_INDEX]
    without = labels.flatten().index_fill(0, labelled, IGNORE_INDEX).view_as(labels)
    said = f"the first tokens of {len(firsts)} documents are no targets"
    if not len(labelled):
        return said
    loss, loss_without = _loss(training, labels), _loss(training, without)
    if loss == loss_without:
        return said
    return Finding(
        f"the first tokens of documents are targets of the documents before them: the loss is "
        f"{loss:.4f}, and {loss_without:.4f} without them",
        "use_varlen_attn = True and a model of type PackedSupervisedFinetune, or set the label of "
        "every document's first token to -100",
        "use_varlen_attn",
    )


def _loss(training: Training, labels: Tensor) -> float:
    collated = training.batch.collated
    collated = {**collated, "data": {**collated["data"], "labels": labels}}
    with training.fed(collated) as fed, training.optim_wrapper.optim_context(training.model):
        loss = float(training.model(**fed, mode="loss")["loss"])
    if not math.isfinite(loss):
        raise ValueError(f"the loss must be finite, got {loss}; look at the weights")
    return loss


def _sample(training: Training) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return token ids and labels of some documents, ``(total,)``, and the lengths of those."""
    documents = training.documents
    count = len(documents.lengths)
    numbers = np.arange(0, count, -(-count // _NUM_SAMPLED))
    lengths = documents.lengths[numbers]
    return *documents.read(Pieces.whole(numbers, lengths)), lengths


def _parts_of_turns(training: Training) -> Iterator[tuple[str, bool, np.ndarray]]:
    """Find inputs and outputs of the batch's conversations.

    Yields:
        ``"input"`` or ``"output"``, whether its tokens are to have labels, and which of them
        have, bool, ``(length,)``.
    """
    batch = training.batch
    labels = batch.data["labels"].flatten().numpy()
    for place, tokens, turns in zip(batch.places, batch.documents, _conversations(training)):
        end = 0
        for turn in turns:
            for part, has_label in (
                ("input", False),
                ("output", turn.get("output_with_loss", True)),
            ):
                ids = training.tokenizer.encode(turn[part], add_special_tokens=False)
                start = _find(tokens, ids, end)
                end = start + len(ids)
                # a document's first token is no target
                yield part, has_label, labels[place][max(start, 1) : end] != IGNORE_INDEX


def _conversations(training: Training) -> list[list[dict]]:
    """Return the turns that the documents of the batch were made of."""
    node = training.cfg.train_dataloader.dataset
    if not node.get("do_dataset_tokenization", True):
        raise NotApplicable("the data comes tokenized: what a prompt was cannot be seen")
    numbers = training.batch.pieces.documents
    if (training.documents.lengths[numbers] != training.batch.lengths).any():
        raise NotApplicable("documents are cut to fit in a row: where a turn is cannot be seen")
    rows = load_rows(node.dataset, node.get("split", "train"))
    if len(rows) != len(training.documents.lengths):
        raise NotApplicable("not every row is a document: which is which cannot be seen")
    mapped = map_rows(
        rows.select(numbers),
        numbers,
        dataset_map_fn=node.get("dataset_map_fn"),
        template_map_fn=node.get("template_map_fn"),
        rename_maps=node.get("rename_maps", ()),
        num_proc=None,
        tokenized=False,
    )
    return mapped["conversation"]


def _find(tokens: np.ndarray, part: list[int], start: int) -> int:
    for place in range(start, len(tokens) - len(part) + 1):
        if tokens[place : place + len(part)].tolist() == part:
            return place
    raise ValueError(
        f"a document must hold the tokens of its turns in order, got none like {part[:8]} from "
        f"token {start} on; its tokenizer is another one than the config's"
    )
