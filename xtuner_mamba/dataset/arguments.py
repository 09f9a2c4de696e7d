"""Arguments of a config, checked by name before anything is built."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from numbers import Integral
from typing import Any


def bind_arguments(function: Callable, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a call would have, by name, those left out as well.

    Raises:
        ValueError: ``function`` has no such argument.
    """
    signature = inspect.signature(function)
    check_names(function.__name__, arguments, signature.parameters)
    bound = signature.bind_partial(**arguments)
    bound.apply_defaults()
    return bound.arguments


def check_names(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check that every name is known, and tell the closest one if not.

    >>> check_names("dispatch", ["fuse_nrom"], ["fuse_loss", "fuse_norm"])
    Traceback (most recent call last):
    ...
    ValueError: dispatch must be given arguments that it has, got 'fuse_nrom'; write 'fuse_norm'
    """
    known = list(known)
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            remedy = f"write {close[0]!r}" if close else f"it has {', '.join(known)}"
            raise ValueError(f"{owner} must be given arguments that it has, got {name!r}; {remedy}")


def check_integer(name: str, value: Any, least: int) -> None:
    """Check a count.

    Raises:
        ValueError: It is no integer, or too small.
    """
    if not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_choice(name: str, value: Any, choices: tuple) -> None:
    """Check that a value is one of a few.

    Raises:
        ValueError: It is another one.
    """
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")
