"""chat_template_of: the same tokens as XTuner's fine-tuning makes of the same turns."""

import pytest
from mmengine.config import ConfigDict
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from xtuner.dataset.map_fns import template_map_fn_factory
from xtuner.dataset.utils import encode_fn
from xtuner.utils import PROMPT_TEMPLATE

from xtuner_mamba.dataset.chat_template import chat_template_of

SYSTEM = 'say "yes", or {no}'
TURNS = [("why\n\\not?", "so"), ("and {then}", "end"), ("'more'", "no 'more'")]
# those whose turns have no numbers
NAMES = sorted(name for name in PROMPT_TEMPLATE if "{round}" not in str(PROMPT_TEMPLATE[name]))


@pytest.fixture(scope="module")
def characters():
    """A tokenizer of single characters, with a BOS and an EOS of other ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<bos>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<bos>"), AddedToken("<eos>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


def xtuners_ids(tokenizer, template, system):
    conversation = [{"input": i, "output": o, "system": ""} for i, o in TURNS]
    conversation[0]["system"] = system
    example = template_map_fn_factory(ConfigDict(template))({"conversation": conversation})
    # what stands behind the last answer belongs to a turn that nobody asks for
    example["conversation"][-1]["sep"] = ""
    return encode_fn(example, tokenizer, max_length=10_000)["input_ids"]


@pytest.mark.parametrize(
    ("name", "system"),
    [
        *((name, "") for name in NAMES),
        *((name, SYSTEM) for name in NAMES if "SYSTEM" in PROMPT_TEMPLATE[name]),
    ],
)
def test_turns_give_the_tokens_of_fine_tuning(characters, name, system):
    template = PROMPT_TEMPLATE[name]
    messages = [{"role": "system", "content": system}] * bool(system)
    for asked, answered in TURNS:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    text = characters.apply_chat_template(
        messages, chat_template=chat_template_of(template), tokenize=False
    )
    ids = characters.encode(text, add_special_tokens=False)
    assert ids == xtuners_ids(characters, template, system)


def test_template_that_numbers_its_turns_is_refused():
    template = dict(INSTRUCTION="[{round}] {input}")
    with pytest.raises(ValueError, match=r"\{input\} once and no other field, got '\[\{round\}\]"):
        chat_template_of(template)
