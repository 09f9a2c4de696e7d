"""XTuner's prompt templates as chat templates, so that preferences speak as fine-tuning did."""

import json
import re
from collections.abc import Mapping


def chat_template_of(prompt_template: Mapping) -> str:
    """Write an entry of XTuner's ``PROMPT_TEMPLATE`` in Jinja.

    Messages give the tokens that ``template_map_fn_factory`` and XTuner's tokenization give for
    the same turns: a BOS where a turn begins that nothing or an EOS comes before, and an EOS after
    an answer unless the template has an ending of its own. What separates turns is left out after
    the last.

    Raises:
        ValueError: The template numbers its turns.
    """
    ending = prompt_template.get("SUFFIX") or ""
    separator = prompt_template.get("SEP") or ""
    # the beginning of a turn, system message included
    is_first = "loop.first"
    if prompt_template.get("SUFFIX_AS_EOS"):
        answer = f"m['content'] ~ {json.dumps(ending)}"
    else:
        is_first += " or messages[loop.index0 - 1]['role'] == 'assistant'"
        answer = f"m['content'] ~ {json.dumps(ending)} ~ eos_token"
    return (
        "{% for m in messages %}"
        "{% if m['role'] == 'assistant' %}"
        "{{ " + answer + " }}{% if not loop.last %}{{ " + json.dumps(separator) + " }}{% endif %}"
        "{% else %}"
        "{% if " + is_first + " %}{{ bos_token }}{% endif %}"
        "{% if m['role'] == 'system' %}"
        "{{ " + _expression(prompt_template.get("SYSTEM") or "{system}", "system") + " }}"
        "{% else %}"
        "{{ " + _expression(prompt_template["INSTRUCTION"], "input") + " }}"
        "{% endif %}{% endif %}{% endfor %}"
    )


def _expression(text: str, field: str) -> str:
    """Return the Jinja expression of a text with a field for the message's content."""
    before, *after = text.split(f"{{{field}}}")
    others = re.findall(r"\{\w*\}", before + "".join(after))
    if len(after) != 1 or others:
        raise ValueError(
            f"prompt_template must have {{{field}}} once and no other field, got {text!r}; pass a "
            "tokenizer with a chat template instead"
        )
    return f"{json.dumps(before)} ~ m['content'] ~ {json.dumps(after[0])}"
