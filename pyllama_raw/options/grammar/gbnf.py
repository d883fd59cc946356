"""
A text in GBNF, read into rules; what is wrong with it has a place and a reason.

The language is that of llama.cpp's grammars. Read from left to right, without recursion;
what one item may contain is limited, so that what walks it later may recurse.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pyllama_raw.errors import BadGrammar
from pyllama_raw.options.grammar.rules import (
    Chars,
    Group,
    Item,
    Literal,
    Ranges,
    Ref,
    Repeat,
    Rules,
    Token,
)

MAX_CHAR = 0x10FFFF
MAX_DEPTH = 100  # of parentheses and repetitions in each other
MAX_ITEMS = 2**15  # of a text, and again once repetitions are written out
MAX_WRITTEN = 2**14  # characters of one string or set: no other thread runs meanwhile
SURROGATES = range(0xD800, 0xE000)

_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_CHAR = (
    r"(?:\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}"
    r'|\\[trn\\"\[\]-]|[^\\%s])'
)
_LITERAL = re.compile('"' + _CHAR % '"' + '*"')
_CLASS = re.compile(r"\[\^?" + _CHAR % r"\]" + r"*\]")
_ONE_CHAR = re.compile(_CHAR % "", re.DOTALL)
_TOKEN = re.compile(r"!?<(?:\[[0-9]{1,9}\]|[^>]+)>")
_TOKEN_ID = re.compile(r"\[([0-9]{1,9})\]")
_REPEAT = re.compile(r"\{[ \t]*([0-9]+)[ \t]*(?:(,)[ \t]*([0-9]+)?[ \t]*)?\}", re.ASCII)
_ITEMS = {'"': (_LITERAL, "string"), "[": (_CLASS, "set"), "<": (_TOKEN, "token")}
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n"}


_REPEATS: dict[str, tuple[int, int | None]] = {
    "*": (0, None),
    "+": (1, None),
    "?": (0, 1),
}


def parse(text: str, root: str = "root") -> Rules:
    """Read *text*. Raises BadGrammar, with an index into it where there is one place."""
    return _Parser(text).run(root)


@dataclass(slots=True)
class _Open:
    """A parenthesis, or a rule, that is being read."""

    position: int
    alternatives: list[list[Item]] = field(default_factory=lambda: [[]])

    def close(self) -> Group:
        depths = (item.depth for items in self.alternatives for item in items)
        return Group(self.alternatives, 1 + max(depths, default=0))


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0
        self._open: list[_Open] = []
        self._used: dict[str, int] = {}  # first position
        self._has_item = False  # a repetition can follow
        self._n_items = 0

    def run(self, root: str) -> Rules:
        if wrong := _NO_TEXT.search(self._text):
            raise BadGrammar("NUL and surrogates are not allowed", wrong.start())
        bodies: dict[str, Group] = {}
        self._skip(lines=True)
        while self._pos < len(self._text):
            name, body = self._rule()
            bodies[name] = body
        for name, position in self._used.items():
            if name not in bodies:
                raise BadGrammar(f"no rule is named {name!r}", position)
        if root not in bodies:
            raise BadGrammar(f"no rule is named {root!r}", None)
        return Rules(bodies, root)

    def _rule(self) -> tuple[str, Group]:
        name = self._take(_NAME, "the name of a rule")
        self._skip()
        if not self._text.startswith("::=", self._pos):
            raise BadGrammar("expected ::=", self._pos)
        self._pos += 3
        self._skip(lines=True)
        self._has_item = False
        self._open = [_Open(self._pos)]
        self._count(1)
        while self._element():
            self._skip(lines=len(self._open) > 1)
        if len(self._open) > 1:
            raise BadGrammar("this parenthesis is not closed", self._open[-1].position)
        if self._pos < len(self._text) and self._text[self._pos] not in "\r\n":
            raise BadGrammar("expected a new line or the end", self._pos)
        self._skip(lines=True)
        return name, self._open[0].close()

    def _element(self) -> bool:
        """Take one part of a rule; False at its end."""
        char = self._text[self._pos : self._pos + 1]
        if char in _ITEMS or char == "!":
            self._terminal("<" if char == "!" else char)
        elif char == ".":
            self._pos += 1
            self._add(Chars((), negated=True))
        elif char in ("*", "+", "?", "{"):
            self._repetition(char)
        elif char in ("(", ")", "|"):
            return self._group(char)
        elif char and _NAME.match(char):
            position = self._pos
            name = self._take(_NAME, "a name")
            self._used.setdefault(name, position)
            self._add(Ref(name))
        else:
            return False
        return True

    def _terminal(self, kind: str) -> None:
        position = self._pos
        pattern, name = _ITEMS[kind]
        taken = self._take(pattern, f"a {name}, closed and with known escapes")
        self._has_item = False
        if kind == "<":
            negated, named = taken[0] == "!", taken.lstrip("!")[1:-1]
            found = _TOKEN_ID.fullmatch(named)
            self._add(Token(int(found[1]) if found else named, negated, position))
        elif kind == '"' and len(taken) > 2:
            self._count(len(taken) - 2)
            self._add(Literal(_literal(taken[1:-1], position)))
        elif kind == "[" and taken not in ("[]", "[^]"):
            self._count(len(taken) - 2)
            negated = taken[1] == "^"
            self._add(Chars(_ranges(taken[1 + negated : -1]), negated))

    def _add(self, item: Item) -> None:
        self._count(1)
        self._has_item = True
        self._open[-1].alternatives[-1].append(item)

    def _count(self, n_items: int) -> None:
        self._n_items += n_items
        if self._n_items > MAX_ITEMS:
            raise BadGrammar(f"more than {MAX_ITEMS} items", self._pos)

    def _group(self, char: str) -> bool:
        if char == ")" and len(self._open) == 1:
            return False
        position = self._pos
        self._pos += 1
        self._count(1)
        if char == ")":
            self._add(self._limited(self._open.pop().close(), position))
            return True
        self._has_item = False
        if char == "(":
            self._open.append(_Open(position))
        else:
            self._open[-1].alternatives.append([])
        if len(self._open) > MAX_DEPTH + 1:
            raise BadGrammar(f"more than {MAX_DEPTH} open parentheses", position)
        self._skip(lines=True)
        return True

    def _repetition(self, char: str) -> None:
        start = self._pos
        if not self._has_item:
            raise BadGrammar(f"nothing before {char} to repeat", start)
        if char == "{":
            least, most = self._counts()
        else:
            self._pos += 1
            least, most = _REPEATS[char]
        items = self._open[-1].alternatives[-1]
        repeat = Repeat(items[-1], least, most, items[-1].depth + 1)
        items[-1] = self._limited(repeat, start)

    def _counts(self) -> tuple[int, int | None]:
        start = self._pos
        found = _REPEAT.match(self._text, start)
        if found is None:
            raise BadGrammar("expected {n}, {n,} or {n,m}", start)
        least, most = found[1], found[3] or found[1]
        if max(len(least), len(most)) > 6 or int(least) > MAX_ITEMS:
            raise BadGrammar(f"more than {MAX_ITEMS} repetitions", start)
        if int(most) < int(least):
            raise BadGrammar(f"at most {most} is less than at least {least}", start)
        self._pos = found.end()
        return int(least), None if found[2] and not found[3] else int(most)

    @staticmethod
    def _limited(item: Group | Repeat, position: int) -> Group | Repeat:
        if item.depth > MAX_DEPTH:
            text = f"more than {MAX_DEPTH} parentheses and repetitions in each other"
            raise BadGrammar(text, position)
        return item

    def _take(self, pattern: re.Pattern[str], expected: str) -> str:
        end = self._pos + MAX_WRITTEN
        found = pattern.match(self._text, self._pos, end)
        if found is None:
            if end < len(self._text):
                expected += f", of at most {MAX_WRITTEN} characters"
            raise BadGrammar(f"expected {expected}", self._pos)
        self._pos = found.end()
        return found[0]

    def _skip(self, *, lines: bool = False) -> None:
        found = (_SPACE_AND_LINES if lines else _SPACE).match(self._text, self._pos)
        assert found is not None
        self._pos = found.end()


def _code(char: str) -> int:
    """The code point of a character or of an escape."""
    if len(char) > 2:
        return int(char[2:], 16)  # noqa: FURB166 - int() knows no \\u
    return ord(_ESCAPED.get(char[1], char[1]) if len(char) == 2 else char)


def _literal(inside: str, position: int) -> str:
    codes = [_code(char[0]) for char in _ONE_CHAR.finditer(inside)]
    for code in codes:
        if not 0 < code <= MAX_CHAR or code in SURROGATES:
            raise BadGrammar(f"no text has the character {code:#x}", position)
    return "".join(map(chr, codes))


def _ranges(inside: str) -> Ranges:
    found: list[tuple[int, int]] = []
    chars = [char[0] for char in _ONE_CHAR.finditer(inside)]
    place = 0
    while place < len(chars):
        is_range = chars[place + 1 : place + 2] == ["-"] and place + 2 < len(chars)
        last = place + 2 if is_range else place
        found.append((_code(chars[place]), _code(chars[last])))
        place = last + 1
    return tuple(found)
