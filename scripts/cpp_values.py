"""
Values and statements of C++ sources that are written like data, such as tables of test cases.

It knows texts, numbers, lists in braces, names, calls and chains of calls; what a call makes is
for the caller to say. Types are not looked at.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/|^\#[^\n]*)
    |R"(?P<bound>[^(\s"]*)\((?P<raw>.*?)\)(?P=bound)"
    |(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])+')
    |(?P<name>[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*)
    |(?P<number>\d[\w.]*)
    |(?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
OPENING, CLOSING = "([{", ")]}"
WORDS = {"true": True, "false": False, "nullptr": None}


class Unread(Exception):
    """This C++ is not like data; the message says where it stops."""


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Statement:
    """Up to a semicolon, which is left out."""

    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class Block:
    """A block of statements and what stands before its brace."""

    head: list[Token]
    body: list[Statement | Block] = field(default_factory=list)


def tokens_of(source: str) -> Iterator[Token]:
    line = 1
    for match in TOKEN.finditer(source):
        kind = match.lastgroup or "raw"
        if match["raw"] is not None:
            yield Token("text", match["raw"], line)
        elif kind == "text":
            yield Token("text", ast.literal_eval(match["text"]), line)
        elif kind != "space":
            yield Token(kind, match[0], line)
        line += match[0].count("\n")


def tree_of(source: str) -> list[Statement | Block]:
    """
    The statements and blocks of *source*.

    A brace begins a block if nothing stands before it in its statement, or a parenthesis
    that has closed; otherwise it begins a list.
    """
    tops: list[list[Statement | Block]] = [[]]
    pending: list[Token] = []
    depth = 0
    for token in tokens_of(source):
        sign = token.text if token.kind == "sign" else ""
        if sign == "{" and depth == 0 and (not pending or pending[-1].text == ")"):
            block = Block(pending)
            tops[-1].append(block)
            tops.append(block.body)
            pending = []
        elif sign == "}" and depth == 0:
            tops.pop()
            pending = []
        elif sign == ";" and depth == 0:
            if pending:
                tops[-1].append(Statement(pending))
            pending = []
        else:
            depth += (sign != "" and sign in OPENING) - (sign != "" and sign in CLOSING)
            pending.append(token)
    return tops[0]


class Expression:
    """
    Evaluates tokens.

    Args:
        names: values of names.
        call: makes the value of a call from the name of the function, the values of its
            arguments and, for a method, the value that it belongs to.
    """

    def __init__(
        self,
        tokens: list[Token],
        names: Mapping[str, Any],
        call: Callable[[str, list[Any], Any], Any],
    ) -> None:
        self._tokens = tokens
        self._at = 0
        self._names = names
        self._call = call

    def value(self) -> Any:
        """All of it."""
        value = self._sum()
        if self._at < len(self._tokens):
            raise self._unread()
        return value

    def _sum(self) -> Any:
        value = self._chain()
        while self._takes("+"):
            value = value + self._chain()
        return value

    def _chain(self) -> Any:
        value = self._single()
        while self._takes("."):
            name = self._next("name").text
            value = self._call(name, self._arguments(), value)
        return value

    def _single(self) -> Any:
        if self._sees("{"):
            return self._arguments("{", "}")
        if self._sees("-"):
            self._at += 1
            return -self._single()
        token = self._next()
        match token.kind:
            case "text":
                return token.text + "".join(self._texts())
            case "number":
                return ast.literal_eval(token.text)
            case "name":
                return self._named(token)
        self._at -= 1
        raise self._unread()

    def _named(self, token: Token) -> Any:
        if self._sees("("):
            return self._call(token.text, self._arguments(), None)
        if token.text in WORDS:
            return WORDS[token.text]
        if token.text.isupper():  # one of an enum
            return token.text
        if token.text not in self._names:
            raise Unread(f"line {token.line}: {token.text} is not known")
        return self._names[token.text]

    def _texts(self) -> Iterator[str]:
        while self._at < len(self._tokens) and self._tokens[self._at].kind == "text":
            yield self._next().text

    def _arguments(self, opening: str = "(", closing: str = ")") -> list[Any]:
        values: list[Any] = []
        if not self._takes(opening):
            raise self._unread()
        while not self._takes(closing):
            values.append(self._sum())
            if not self._takes(",") and not self._sees(closing):
                raise self._unread()
        return values

    def _sees(self, sign: str) -> bool:
        if self._at >= len(self._tokens):
            return False
        token = self._tokens[self._at]
        return token.kind == "sign" and token.text == sign

    def _takes(self, sign: str) -> bool:
        sees = self._sees(sign)
        self._at += sees
        return sees

    def _next(self, kind: str | None = None) -> Token:
        if self._at >= len(self._tokens):
            raise self._unread()
        token = self._tokens[self._at]
        if kind not in (None, token.kind):
            raise self._unread()
        self._at += 1
        return token

    def _unread(self) -> Unread:
        if self._at >= len(self._tokens):
            return Unread("it ends where more is expected")
        token = self._tokens[self._at]
        return Unread(f"line {token.line}: {token.text!r} is not expected")
