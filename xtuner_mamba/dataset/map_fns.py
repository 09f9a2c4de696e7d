"""Rows as they come, into XTuner's conversations."""


def document_map_fn(example: dict) -> dict:
    """Make a document of a row's ``text``, for pre-training.

    XTuner's ``pretrain_map_fn`` leaves out the EOS, and a document would never learn to end.

    >>> document_map_fn({"text": "def f(): ..."})
    {'conversation': [{'input': '', 'output': 'def f(): ...'}]}
    """
    return {"conversation": [{"input": "", "output": example["text"]}]}
