"""
Chat messages, checked and copied.

A template runs in another process, so messages are what JSON can say. The copy is made
once, so nobody can change what was checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.prompts.rendering.limits import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_MESSAGES,
    MAX_VALUES,
)

Message = Mapping[str, Any]

MAX_INT_BITS = 4096  # Python refuses to write much larger ones
MEDIA = {"image": "images", "audio": "audio", "video": "videos"}


def plain_messages(messages: Sequence[Message]) -> list[Any]:
    """
    A copy of *messages* in dicts, lists, text and numbers.

    Raises:
        InvalidRequest: not messages, parts that are no text, values that JSON does not
            have, or too much of them.
    """
    if len(messages) > MAX_MESSAGES:
        given = f"{len(messages)} messages"
        raise InvalidRequest("messages", given, f"at most {MAX_MESSAGES} messages")
    copier = _Copier()
    plain = []
    for message in messages:
        _check(message)
        plain.append(copier.copy(message, 0))
    return plain


def plain_value(name: str, value: object) -> Any:
    """A copy of the option *name* of a chat. Raises InvalidRequest as plain_messages()."""
    return _Copier(name).copy(value, 0)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether *value* is a list of any kind, and no text."""
    if isinstance(value, str | bytes | bytearray | Mapping):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _check(message: object) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(
            "prompt", message, 'messages with a "role" and a "content"'
        )
    content = message.get("content")
    if is_sequence(content):
        for part in content:
            _check_part(part)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest("content", content, "text, a list of parts, or None")


def _check_part(part: object) -> None:
    """Parts of any kind but media are the template's business."""
    if not isinstance(part, Mapping):
        return
    names = [name for name in (part.get("type"), *part) if isinstance(name, str)]
    for kind, kinds in MEDIA.items():
        if any(name.removeprefix("input_").startswith(kind) for name in names):
            raise InvalidRequest(
                "content",
                f"a part with {kind}",
                f"text: this model takes no {kinds}, or not so",
            )


@dataclass(slots=True)
class _Copier:
    """A copy that is counted while it is made; errors call it *name*."""

    _name: str = "messages"
    _n_characters: int = 0
    _n_values: int = 0

    def copy(self, value: Any, depth: int) -> Any:
        self._count(value, depth)
        if value is None or isinstance(value, str | float | bool):
            return value
        if isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                given = f"a number of {value.bit_length()} bits"
                raise InvalidRequest(self._name, given, f"at most {MAX_INT_BITS} bits")
            return value
        if isinstance(value, Mapping):
            return {
                self._key(key, depth): self.copy(item, depth + 1)
                for key, item in value.items()
            }
        if is_sequence(value):
            return [self.copy(item, depth + 1) for item in value]
        raise InvalidRequest(
            self._name,
            f"a value of type {type(value).__name__}",
            "text, numbers, True, False, None, lists and mappings",
        )

    def _key(self, key: object, depth: int) -> str:
        if not isinstance(key, str):
            given = f"a mapping's key of type {type(key).__name__}"
            raise InvalidRequest(self._name, given, "text as keys of mappings")
        self._count(key, depth)
        return key

    def _count(self, value: object, depth: int) -> None:
        self._n_values += 1
        if isinstance(value, str):
            self._n_characters += len(value)
        if depth > MAX_DEPTH:
            given = "lists or mappings in each other"
            raise InvalidRequest(self._name, given, f"at most {MAX_DEPTH} levels")
        if self._n_values > MAX_VALUES or self._n_characters > MAX_CHARACTERS:
            given = f"{self._n_values} values, {self._n_characters} characters"
            allowed = f"at most {MAX_VALUES} values and {MAX_CHARACTERS} characters"
            raise InvalidRequest(self._name, given, allowed)
