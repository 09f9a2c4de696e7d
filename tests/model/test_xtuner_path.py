"""XTuner 0.2.0's own path on a pack: overwriting a document changes others; here it does not."""

import json
import os
import subprocess
import sys

import pytest
import torch
from attention_families import FAMILIES as ATTENTION_FAMILIES
from family_proof import make
from mixer_families import FAMILIES as MIXER_FAMILIES

FAMILIES = MIXER_FAMILIES | ATTENTION_FAMILIES
NAMES = ["Mamba", "Falcon-Mamba", "Zamba", "Mamba-2", "Bamba", "Llama", "Qwen2"]
LENGTHS = [6, 9, 1, 5]
# model and hook as in a config with use_varlen_attn; prints which documents change with the first
SCRIPT = f"""
import json, sys
from types import SimpleNamespace

import torch
from mmengine import ConfigDict
from transformers import AutoModelForCausalLM

whose, folders = sys.argv[1], json.loads(sys.argv[2])
if whose == "ours":
    from xtuner_mamba.engine.hooks import PackedLayoutHook as Hook
    from xtuner_mamba.model import PackedSupervisedFinetune as Model
else:
    from xtuner.engine.hooks import VarlenAttnArgsToMessageHubHook as Hook
    from xtuner.model import SupervisedFinetune as Model

    assert "xtuner_mamba" not in sys.modules
    # what stops XTuner on a CPU before it builds anything
    torch.cpu.is_bf16_supported = lambda: True
torch.distributed.get_rank = lambda *_: 0
lengths = {LENGTHS}
total = sum(lengths)
ends = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
positions = torch.cat([torch.arange(length) for length in lengths])[None]


def run(model, tokens):
    hook, runner = Hook(), SimpleNamespace(model=model, iter=0)
    data = dict(cumulative_len=[ends], max_seqlen=max(lengths), input_ids=tokens)
    batch = dict(data=data, data_samples=None)
    hook.before_val_iter(runner, 0, batch)
    # attention is told where it is in a document, by XTuner and here
    has_rotary = model.llm.config.model_type in ("llama", "qwen2")
    with torch.no_grad():
        logits = model.llm(tokens, **(dict(position_ids=positions) if has_rotary else {{}})).logits
    hook.after_val_iter(runner, 0, batch)
    return logits.split(lengths, dim=1)


found = {{}}
for name, folder in folders.items():
    llm = ConfigDict(
        type=AutoModelForCausalLM.from_pretrained,
        pretrained_model_name_or_path=folder,
        torch_dtype=torch.float32,
    )
    model = Model(llm, use_varlen_attn=True, use_activation_checkpointing=False).eval()
    tokens = torch.arange(total)[None]
    overwritten = tokens.clone()
    overwritten[:, : lengths[0]] = 40
    pairs = zip(run(model, tokens), run(model, overwritten))
    found[name] = [i for i, (b, a) in enumerate(pairs) if not torch.equal(b, a)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """The changed documents of every family, by XTuner alone and by this package."""
    folders = {name: str(tmp_path_factory.mktemp("model")) for name in NAMES}
    for name, folder in folders.items():
        make(FAMILIES[name], torch.float32).save_pretrained(folder)
    processes = {
        whose: subprocess.Popen(
            [sys.executable, "-c", SCRIPT, whose, json.dumps(folders)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # XTuner's path without flash-attn, everywhere: with it, see test_attention_dispatch.py
            env={**os.environ, "XTUNER_MAMBA_DISABLE": disabled, "CUDA_VISIBLE_DEVICES": ""},
        )
        for whose, disabled in (("xtuner", "1"), ("ours", "0"))
    }
    found = {}
    for whose, process in processes.items():
        printed, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
        found[whose] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_overwritten_document_changes_others_in_xtuner_alone(changed, name):
    assert changed["ours"][name] == [0]
    assert changed["xtuner"][name] == [0, 1, 2, 3]
