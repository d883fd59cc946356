"""Special tokens among the texts of a specification."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def special_in(text: str, is_special: Callable[[str], bool]) -> Iterator[str]:
    """The special tokens in *text*; where one is within another, the longest."""
    at = 0
    while at < len(text):
        end = next((n for n in range(len(text), at, -1) if is_special(text[at:n])), at)
        if end > at:
            yield text[at:end]
        at = max(end, at + 1)


def strings_of(value: Any) -> Iterator[str]:
    """All strings in *value*, a tree of dicts and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_of(item)
