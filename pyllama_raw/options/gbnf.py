"""
A text in GBNF, written as a Lark grammar; what is wrong with it has a place and a reason.

libllama could follow GBNF, too, but it follows every way to read a token: 200 times `"a"?` never
ends there. llguidance refuses what takes too many of its items.

The language is that of llama.cpp's grammars. Groups and repetitions become rules, so nothing nests
in what is written; their depth is limited, because we and llguidance recurse. Each character is a
terminal of its own, because llguidance takes the longest match of a terminal where GBNF takes any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from pyllama_raw.errors import BadGrammar

FindToken = Callable[[int | str], int | None]
MAX_DEPTH = 100  # of parentheses and repetitions in each other
MAX_ITEMS = 2**15  # of a text; and most repetitions of one
MAX_WRITTEN = 2**14  # characters of one string or set: no other thread runs meanwhile
MAX_EXCLUDED = 2**18  # tokens of all `!<...>`: each excludes the silent ones, too
MAX_CHAR = 0x10FFFF
SURROGATES = range(0xD800, 0xE000)
# A character of GBNF; others than those that %s names stand for themselves.
CHAR = (
    r"(?:\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}"
    r'|\\[trn\\"\[\]-]|[^\\%s])'
)
NOTHING = "/[a&&b]/"
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_LITERAL = re.compile('"' + CHAR % '"' + '*"')
_CLASS = re.compile(r"\[\^?" + CHAR % r"\]" + r"*\]")
_TOKEN = re.compile(r"!?<(?:\[[0-9]{1,9}\]|[^>]+)>")
_TOKEN_ID = re.compile(r"\[([0-9]{1,9})\]")
_REPEAT = re.compile(r"\{[ \t]*([0-9]+)[ \t]*(?:(,)[ \t]*([0-9]+)?[ \t]*)?\}", re.ASCII)
_ITEMS = {'"': (_LITERAL, "string"), "[": (_CLASS, "set"), "<": (_TOKEN, "token")}
_ONE_CHAR = re.compile(CHAR % "", re.DOTALL)
_RANGE = re.compile(f"({CHAR % ''})(?:-({CHAR % ''}))?", re.DOTALL)
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n"}


def to_lark(
    text: str, root: str, find_token: FindToken, silent: Collection[int]
) -> str:
    """
    The language of *text* as a Lark grammar.

    Args:
        silent: tokens that write nothing, and those that end an output.

    Raises:
        BadGrammar: with an index into *text* where there is one place; also if the
            vocabulary lacks a token that is named.
    """
    return _Parser(text, find_token, silent).run(root)


class _Item(NamedTuple):
    """A part of a rule as Lark has it."""

    text: str
    depth: int = 0  # of the groups and repetitions in it


@dataclass(slots=True)
class _Parser:
    _text: str
    _find_token: FindToken
    _silent: Collection[int]
    _pos: int = 0
    _n_items: int = 0
    _used: dict[str, int] = field(default_factory=dict)  # first position
    _names: dict[str, str] = field(default_factory=dict)  # in Lark
    _lines: list[str] = field(default_factory=list)  # of groups and repetitions
    _exclusions: dict[int, str] = field(
        default_factory=dict
    )  # rules, by what they exclude

    def run(self, root: str) -> str:
        if wrong := _NO_TEXT.search(self._text):
            raise BadGrammar("NUL and surrogates are not allowed", wrong.start())
        bodies: dict[str, str] = {}  # of two rules with one name the later counts
        self._skip(lines=True)
        while self._pos < len(self._text):
            name, body = self._rule()
            bodies[name] = body
        for name, position in self._used.items():
            if name not in bodies:
                raise BadGrammar(f"no rule is named {name!r}", position)
        if root not in bodies:
            raise BadGrammar(f"no rule is named {root!r}", None)
        rules = [f"{self._name(name)}: {body}" for name, body in bodies.items()]
        return "\n".join([f"start: {self._name(root)}", *rules, *self._lines])

    def _name(self, rule: str) -> str:
        return self._names.setdefault(rule, f"r{len(self._names)}")

    def _extracted(self, body: str) -> str:
        """The name of a rule for a part of another one."""
        name = f"a{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _rule(self) -> tuple[str, str]:
        name = self._take(_NAME, "the name of a rule")
        self._skip()
        if not self._text.startswith("::=", self._pos):
            raise BadGrammar("expected ::=", self._pos)
        self._pos += 3
        self._skip(lines=True)
        self._count(1)
        body, _ = self._alternatives(0)
        if self._char not in "\r\n":
            raise BadGrammar("expected a new line or the end", self._pos)
        self._skip(lines=True)
        return name, body

    @property
    def _char(self) -> str:
        """The next character; "" at the end."""
        return self._text[self._pos : self._pos + 1]

    def _alternatives(self, n_open: int) -> _Item:
        """All up to the end of a rule or of one of *n_open* parentheses."""
        choices: list[str] = []
        depth = 0
        while True:
            items = self._sequence(n_open)
            choices.append(" ".join(item.text for item in items) or '""')
            depth = max([depth, *(item.depth for item in items)])
            if self._char != "|":
                return _Item(" | ".join(choices), depth + 1)
            self._pos += 1
            self._count(1)
            self._skip(lines=True)

    def _sequence(self, n_open: int) -> list[_Item]:
        items: list[_Item] = []
        can_repeat = False
        while char := self._char:
            if char in "*+?{":
                if not can_repeat:
                    raise BadGrammar(f"nothing before {char} to repeat", self._pos)
                items[-1] = self._repeated(items[-1], char)
            else:
                item = self._element(char, n_open)
                if item is None:
                    break
                can_repeat = item.text != ""
                items += [item] if can_repeat else []
            self._skip(lines=n_open > 0)
        return items

    def _element(self, char: str, n_open: int) -> _Item | None:
        """One part of a rule, which may be empty; None at its end."""
        if char == "(":
            return self._group(n_open + 1)
        if char in _ITEMS or char == "!":
            text = self._terminal("<" if char == "!" else char)
        elif char == ".":
            self._pos += 1
            text = one_of("", negated=True)
        elif _NAME.match(char):
            position = self._pos
            name = self._take(_NAME, "a name")
            self._used.setdefault(name, position)
            text = self._name(name)
        else:
            return None
        self._count(1 if text else 0)
        return _Item(text)

    def _group(self, n_open: int) -> _Item:
        start = self._pos
        if n_open > MAX_DEPTH:
            raise BadGrammar(f"more than {MAX_DEPTH} open parentheses", start)
        self._pos += 1
        self._count(1)
        self._skip(lines=True)
        body, depth = self._alternatives(n_open)
        if self._char != ")":
            raise BadGrammar("this parenthesis is not closed", start)
        self._check_depth(depth, self._pos)
        self._pos += 1
        self._count(2)
        return _Item(self._extracted(body), depth)

    def _terminal(self, kind: str) -> str:
        position = self._pos
        pattern, name = _ITEMS[kind]
        terminal = self._take(pattern, f"a {name}, closed and with known escapes")
        if kind == "<":
            negated, name_text = terminal[0] == "!", terminal.lstrip("!")[1:-1]
            number = _TOKEN_ID.fullmatch(name_text)
            return self._token(
                int(number[1]) if number else name_text, negated, position
            )
        if kind == '"' and len(terminal) > 2:
            self._count(len(terminal) - 2)
            return characters(terminal[1:-1], position)
        if kind == "[" and terminal not in ("[]", "[^]"):
            self._count(len(terminal) - 2)
            negated = terminal[1] == "^"
            return one_of(terminal[1 + negated : -1], negated)
        return ""

    def _token(self, token: int | str, negated: bool, position: int) -> str:
        token_id = self._find_token(token)
        if token_id is None:
            raise BadGrammar(f"{token!r} is no single token", position)
        if not negated:
            return one_token(token_id, negated, self._silent)
        # A vocabulary may have thousands of silent tokens, so they are written once for each.
        if token_id not in self._exclusions:
            limit = max(MAX_EXCLUDED // (len(self._silent) + 1), 1)
            if len(self._exclusions) == limit:
                reason = f"more than {limit} different tokens behind !, of a model with"
                reason += f" {len(self._silent)} tokens that have no text"
                raise BadGrammar(reason, position)
            text = one_token(token_id, negated, self._silent)
            self._exclusions[token_id] = self._extracted(text)
        return self._exclusions[token_id]

    def _count(self, n_items: int) -> None:
        self._n_items += n_items
        if self._n_items > MAX_ITEMS:
            raise BadGrammar(f"more than {MAX_ITEMS} items", self._pos)

    def _repeated(self, item: _Item, char: str) -> _Item:
        start, counts = self._pos, char
        if char == "{":
            counts = self._counts()
        else:
            self._pos += 1
        self._check_depth(item.depth + 1, start)
        repeated = f"{self._extracted(item.text)}{counts}"
        return _Item(self._extracted(repeated), item.depth + 1)

    def _counts(self) -> str:
        """The least and the most, as Lark has them."""
        start = self._pos
        match = _REPEAT.match(self._text, start)
        if match is None:
            raise BadGrammar("expected {n}, {n,} or {n,m}", start)
        low, high = match[1], match[3] or match[1]
        if max(len(low), len(high)) > 6 or int(low) > MAX_ITEMS:
            raise BadGrammar(f"more than {MAX_ITEMS} repetitions", start)
        if int(high) < int(low):
            raise BadGrammar(f"at most {high} is less than at least {low}", start)
        self._pos = match.end()
        return f"{{{int(low)},{'' if match[2] and not match[3] else int(high)}}}"

    @staticmethod
    def _check_depth(depth: int, position: int) -> None:
        if depth > MAX_DEPTH:
            text = f"more than {MAX_DEPTH} parentheses and repetitions in each other"
            raise BadGrammar(text, position)

    def _take(self, pattern: re.Pattern[str], expected: str) -> str:
        end = self._pos + MAX_WRITTEN
        match = pattern.match(self._text, self._pos, end)
        if match is None:
            if end < len(self._text):
                expected += f", of at most {MAX_WRITTEN} characters"
            raise BadGrammar(f"expected {expected}", self._pos)
        self._pos = match.end()
        return match[0]

    def _skip(self, *, lines: bool = False) -> None:
        match = (_SPACE_AND_LINES if lines else _SPACE).match(self._text, self._pos)
        assert match is not None
        self._pos = match.end()


def characters(inside: str, position: int) -> str:
    """The string *inside* of quotes; BadGrammar at *position*: no text has it."""
    codes = [_code(char) for char in _ONE_CHAR.findall(inside)]
    for code in codes:
        if not 0 < code <= MAX_CHAR or code in SURROGATES:
            raise BadGrammar(f"no text has the character {code:#x}", position)
    return " ".join(f"/{_char(code)}/" for code in codes)


def one_of(inside: str, negated: bool) -> str:
    """One character of the set *inside* of brackets, or one that it lacks."""
    ranges = [
        _of_text(_code(first), _code(last or first))
        for first, last in _RANGE.findall(inside)
    ]
    parts = [f"{_char(low)}-{_char(high)}" for low, high in ranges if low <= high]
    if negated:
        return f"/[^{''.join([_char(0), *parts])}]/"
    return f"/[{''.join(parts)}]/" if parts else NOTHING


def one_token(token: int, negated: bool, silent: Collection[int]) -> str:
    """A token, or any other one; none that is *silent*."""
    if negated:
        return f"<[^{','.join(map(str, sorted({token, *silent})))}]>"
    return NOTHING if token in silent else f"<[{token}]>"


def _code(char: str) -> int:
    """The code point of a character or of an escape."""
    if len(char) > 2:
        return int(char[2:], 16)  # noqa: FURB166 - int() knows no \\u
    return ord(_ESCAPED.get(char[1], char[1]) if len(char) == 2 else char)


def _of_text(low: int, high: int) -> tuple[int, int]:
    """A range without NUL, which no token writes, and with ends that are characters."""
    if low in SURROGATES:
        low = SURROGATES.stop
    if high in SURROGATES:
        high = SURROGATES.start - 1
    return max(low, 1), min(high, MAX_CHAR)


def _char(code: int) -> str:
    return f"\\u{{{code:x}}}"
