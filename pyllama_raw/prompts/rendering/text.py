"""
Text that knows where each of its characters came from.

A chat template mixes its own text with that of messages. Only its own may become control
tokens, so each character has an origin: TEMPLATE for what is written in the template,
MESSAGE for what came from messages, DOUBT for all else. Whatever this class does not
follow makes a plain `str`, which counts as DOUBT: nothing becomes TEMPLATE by oversight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, SupportsIndex

MESSAGE, TEMPLATE, DOUBT = b"m", b"t", b"d"


def _respelled(method: Callable[[str], str]) -> Callable[[Text], Text]:
    """*method* of str, which writes letters otherwise, with origins."""

    def respelled(self: Text) -> Text:
        # No letter becomes nothing, so texts of one length match letter by letter.
        text = method(self)
        return (
            Text(text, self._origin)
            if len(text) == len(self)
            else derived(text, (self,))
        )

    return respelled


class Text(str):
    """A string with the origin of its characters, one byte for each."""

    __slots__ = ("_origin",)

    _origin: bytes  # the underscore hides it from templates

    def __new__(cls, value: object = "", origin: bytes | None = None) -> Self:
        text = str.__new__(cls, value)
        text._origin = DOUBT * len(text) if origin is None else origin
        return text

    # -- the same characters ----------------------------------------------------

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        for index, character in enumerate(str.__iter__(self)):
            yield Text(character, self._origin[index : index + 1])

    def __getitem__(self, key: SupportsIndex | slice) -> Text:
        if not isinstance(key, slice):
            at = range(len(self))[key]
            key = slice(at, at + 1)
        return Text(str.__getitem__(self, key), self._origin[key])

    def _cut(self, text: str, start: int) -> Text:
        return Text(text, self._origin[start : start + len(text)])

    # -- joining ----------------------------------------------------------------

    def __add__(self, other: object) -> Text:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> Text:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Text:
        return Text(str.__mul__(self, times), self._origin * times)

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> Text:
        texts = [of(part) for part in parts]
        joined = str.join(self, texts)
        return Text(joined, self._origin.join(text._origin for text in texts))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Text:
        if not old:
            return derived(str.replace(self, old, new, count), (self, new))
        return of(new).join(self.split(old, count))

    # -- taking apart -----------------------------------------------------------

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._located(str.splitlines(self, keepends), 0)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return tuple(self._located(str.partition(self, sep), 0))  # type: ignore[return-value]

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return tuple(self._located(str.rpartition(self, sep), 0))  # type: ignore[return-value]

    def _located(self, parts: Iterable[str], gap: int) -> list[str]:
        """*parts* with their origins: in order, with *gap* or white space between."""
        texts: list[str] = []
        at = 0
        for part in parts:
            at = str.index(self, part, at)
            texts.append(self._cut(part, at))
            at += len(part) + gap
        return texts

    def strip(self, chars: str | None = None, /) -> Text:
        return self.rstrip(chars).lstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Text:
        left = str.lstrip(self, chars)
        return self._cut(left, len(self) - len(left))

    def rstrip(self, chars: str | None = None, /) -> Text:
        return self._cut(str.rstrip(self, chars), 0)

    def removeprefix(self, prefix: str, /) -> Text:
        left = str.removeprefix(self, prefix)
        return self._cut(left, len(self) - len(left))

    def removesuffix(self, suffix: str, /) -> Text:
        return self._cut(str.removesuffix(self, suffix), 0)

    # -- other letters ----------------------------------------------------------

    lower = _respelled(str.lower)
    upper = _respelled(str.upper)
    title = _respelled(str.title)
    capitalize = _respelled(str.capitalize)
    swapcase = _respelled(str.swapcase)
    casefold = _respelled(str.casefold)


def of(value: str) -> Text:
    """*value* with an origin; a plain string comes from somewhere not followed."""
    return value if type(value) is Text else Text(value)


def concat(parts: Iterable[Any]) -> Text:
    """All *parts* one after another."""
    return Text("", b"").join(parts)


def from_template(text: str) -> Text:
    """Text that the template's author wrote."""
    return Text(text, TEMPLATE * len(text))


def from_message(text: str) -> Text:
    """Text that came with a message, or is not for sure the template's own."""
    return Text(text, MESSAGE * len(text))


def origins(text: str) -> str:
    """A letter for each character of *text*: m, t or d."""
    return of(text)._origin.decode()


def derived(text: str, inputs: Iterable[object]) -> Text:
    """*text*, made from *inputs* by something that does not tell how."""
    if all(_is_foreign(value) for value in inputs):
        return from_message(text)
    return Text(text)


def is_all_template(text: str) -> bool:
    """Whether the template's author wrote every character."""
    return of(text)._origin.count(TEMPLATE) == len(text)


def _is_foreign(value: object) -> bool:
    """Whether no character of *value* may be the template's."""
    if isinstance(value, str):
        return of(value)._origin.count(MESSAGE) == len(value)
    if isinstance(value, dict):
        return all(map(_is_foreign, value)) and all(map(_is_foreign, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_foreign, value))
    return value is None or isinstance(value, int | float)
