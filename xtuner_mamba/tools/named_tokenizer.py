"""A tokenizer that a command names."""

from transformers import AutoTokenizer, PreTrainedTokenizerBase


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``--tokenizer``.

    Args:
        name: Of a folder, or on the Hub.

    Raises:
        ValueError: There is none, or it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    # it parses files of others, and calls the Hub, which can fail in any way
    except Exception as error:
        raise ValueError(
            "--tokenizer must name a folder with a tokenizer, or one on the Hub that can be "
            f"reached, got {name!r} ({str(error).partition(chr(10))[0]}); check the name, or save "
            "one with save_pretrained"
        ) from error
