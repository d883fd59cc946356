"""
Rules of GBNF, written as a Lark grammar for llguidance.

Each character is a terminal of its own, because llguidance takes the longest match of a
terminal where GBNF takes any. Groups and repetitions are rules, so nothing nests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from pyllama_raw.errors import BadGrammar
from pyllama_raw.options.grammar.gbnf import MAX_CHAR, SURROGATES
from pyllama_raw.options.grammar.rules import (
    Chars,
    Group,
    Item,
    Literal,
    Ref,
    Repeat,
    Rules,
    Token,
)

FindToken = Callable[[int | str], int | None]
NOTHING = "/[a&&b]/"


def to_lark(rules: Rules, find_token: FindToken, silent: Collection[int]) -> str:
    """
    The same language.

    Args:
        silent: tokens that write nothing, and those that end an output.

    Raises:
        BadGrammar: the vocabulary lacks a token that it names.
    """
    return _Writer(rules, find_token, silent).text()


class _Writer:
    def __init__(
        self, rules: Rules, find_token: FindToken, silent: Collection[int]
    ) -> None:
        self._rules, self._find_token, self._silent = rules, find_token, silent
        self._names = {name: f"r{index}" for index, name in enumerate(rules.bodies)}
        self._lines: list[str] = []

    def text(self) -> str:
        self._lines = [f"start: {self._names[self._rules.root]}"]
        for name, body in self._rules.bodies.items():
            self._lines.append(f"{self._names[name]}: {self._group(body)}")
        return "\n".join(self._lines)

    def _group(self, group: Group) -> str:
        return " | ".join(
            " ".join(self._item(item) for item in items) or '""'
            for items in group.alternatives
        )

    def _item(self, item: Item) -> str:
        match item:
            case Literal(text):
                return " ".join(f"/{_char(ord(char))}/" for char in text)
            case Chars():
                return _set(item)
            case Token():
                return self._token(item)
            case Ref(name):
                return self._names[name]
            case Group():
                return self._rule(self._group(item))
            case Repeat():
                return self._repeat(item)

    def _repeat(self, repeat: Repeat) -> str:
        inner = self._rule(self._item(repeat.item))
        most = "" if repeat.most is None else repeat.most
        return self._rule(f"{inner}{{{repeat.least},{most}}}")

    def _rule(self, body: str) -> str:
        name = f"a{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _token(self, item: Token) -> str:
        found = self._find_token(item.token)
        if found is None:
            raise BadGrammar(f"{item.token!r} is no single token", item.position)
        if not item.negated:
            return NOTHING if found in self._silent else f"<[{found}]>"
        return f"<[^{','.join(map(str, sorted({found, *self._silent})))}]>"


def _set(chars: Chars) -> str:
    ranges = [_of_text(low, high) for low, high in chars.ranges]
    parts = [f"{_char(low)}-{_char(high)}" for low, high in ranges if low <= high]
    if chars.negated:
        return f"/[^{''.join([_char(0), *parts])}]/"
    return f"/[{''.join(parts)}]/" if parts else NOTHING


def _of_text(low: int, high: int) -> tuple[int, int]:
    """Without NUL, which no token writes, and with ends that are characters."""
    if low in SURROGATES:
        low = SURROGATES.stop
    if high in SURROGATES:
        high = SURROGATES.start - 1
    return max(low, 1), min(high, MAX_CHAR)


def _char(code: int) -> str:
    return f"\\u{{{code:x}}}"
