"""A row to the tokens of a prompt and of the two answers to it."""

from collections.abc import Callable, Mapping
from typing import Any

PARTS = ("prompt", "chosen", "rejected")
"""Columns of a pair, lists of messages."""


class TokenizePair:
    """Map a row to ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``.

    Args:
        tokenizer: Of the model.
        chat_template: Renders messages.
        map_fn: Makes a pair of a row.
    """

    def __init__(self, tokenizer: Any, chat_template: str, map_fn: Callable | None) -> None:
        self._tokenizer, self._template, self._map_fn = tokenizer, chat_template, map_fn

    def __call__(self, row: Mapping, index: int) -> dict[str, list[int]]:
        """Tokenize a row.

        Raises:
            ValueError: It is no pair.
        """
        try:
            made = row if self._map_fn is None else self._map_fn(row)
        except KeyError as error:
            raise ValueError(
                f"a row must have what dataset_map_fn reads, got no {error} in row {index} with "
                f"the columns {list(row)}; choose another dataset_map_fn"
            ) from error
        missing = [part for part in PARTS if not (isinstance(made.get(part), list) and made[part])]
        if missing:
            raise ValueError(
                f"a pair must have lists of messages, got no {' and no '.join(missing)} in row "
                f"{index} with the columns {list(made)}; make them with dataset_map_fn"
            )
        for part in PARTS:
            _check_messages(made[part], part, index)
        prompt = self._render(made["prompt"], add_generation_prompt=True)
        ids = {"prompt_ids": self._encode(prompt)}
        for part in PARTS[1:]:
            text = self._render(made["prompt"] + made[part], add_generation_prompt=False)
            ids[f"{part}_ids"] = self._encode(text.removeprefix(prompt))
            if not (prompt and text.startswith(prompt) and ids[f"{part}_ids"]):
                raise ValueError(
                    f"the {part} answer must go on after the prompt, got {text[-40:]!r} after "
                    f"{prompt[-40:]!r} in row {index}; mend the row, or a chat template that "
                    "renders a prompt otherwise with an answer behind it"
                )
        return ids

    def _render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )

    def _encode(self, text: str) -> list[int]:
        # the template has the special tokens
        return self._tokenizer.encode(text, add_special_tokens=False)


def _check_messages(messages: list, part: str, index: int) -> None:
    """Refuse what a template would write out as text all the same, such as "None"."""
    for message in messages:
        fields = message if isinstance(message, Mapping) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise ValueError(
                f"a message must have a role and a content, both texts, got {message!r} in "
                f"{part} of row {index}; mend the row, or leave it out with dataset.filter"
            )
    role = messages[-1]["role"]
    if part != "prompt" and role != "assistant":
        raise ValueError(
            f"the {part} answer must end with a message of the role 'assistant', got {role!r} in "
            f"row {index}; mend the row, or make pairs with dataset_map_fn"
        )
