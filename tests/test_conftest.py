"""The fixtures that other tests lean on do what they claim."""

import torch


def test_our_own_code_gets_nan_from_empty():
    ours = {"torch": torch, "like": torch.zeros(3), "__name__": "xtuner_mamba.ops.anything"}
    for call in ("torch.empty(3)", "torch.empty_like(like)", "like.new_empty(3)"):
        assert eval(call, ours).isnan().all(), call
    assert eval("torch.empty(3, dtype=torch.int32)", ours).shape == (3,)
