"""
Is a text a grammar in GBNF that libllama can use?

libllama's own parser writes its errors to stderr, calls itself for every parenthesis, and
makes repetitions by copying: a few bytes can fill its stack or all memory. So what it gets
is checked here first, with positions in the errors. Left recursion is left to libllama.
"""

from __future__ import annotations

import re

from pyllama_raw.errors import BadGrammar

MAX_DEPTH = 100  # of parentheses
MAX_RULES = 10_000
MAX_BRANCHES = 2000  # alternatives and repetitions: each token may look at them all
MAX_REPEAT = 2000  # llama-grammar.cpp: MAX_REPETITION_THRESHOLD

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_CHAR = (
    r"(?:\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}"
    r'|\\[trn\\"\[\]-]|[^\\%s])'
)
_LITERAL = re.compile('"' + _CHAR % '"' + '*"')
_CLASS = re.compile(r"\[\^?" + _CHAR % r"\]" + r"*\]")
_TOKEN = re.compile(r"!?<(?:\[[0-9]{1,9}\]|[^>]+)>")
_REPEAT = re.compile(r"\{[ \t]*([0-9]+)[ \t]*(?:(,)[ \t]*([0-9]+)?[ \t]*)?\}", re.ASCII)
_ITEMS = {'"': (_LITERAL, "string"), "[": (_CLASS, "set"), "<": (_TOKEN, "token")}


def check(text: str, root: str = "root") -> None:
    """Raise BadGrammar, with an index into *text*, if it is not well formed."""
    _Check(text).run(root)


class _Check:
    """One look at a text from left to right, without recursion."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0
        self._open: list[int] = []  # positions of parentheses
        self._defined: set[str] = set()
        self._used: dict[str, int] = {}  # first position
        self._has_item = False  # a repetition can follow
        self._n_branches = 0

    def run(self, root: str) -> None:
        if "\0" in self._text:
            raise BadGrammar("NUL is not allowed", self._text.index("\0"))
        self._skip(lines=True)
        while self._pos < len(self._text):
            self._rule()
        for name, position in self._used.items():
            if name not in self._defined:
                raise BadGrammar(f"no rule is named {name!r}", position)
        if root not in self._defined:
            raise BadGrammar(f"no rule is named {root!r}", None)

    def _rule(self) -> None:
        name = self._take(_NAME, "the name of a rule")
        self._defined.add(name)
        if len(self._defined) > MAX_RULES:
            raise BadGrammar(f"more than {MAX_RULES} rules", self._pos)
        self._skip()
        if not self._text.startswith("::=", self._pos):
            raise BadGrammar("expected ::=", self._pos)
        self._pos += 3
        self._skip(lines=True)
        self._has_item = False
        while self._element():
            self._skip(lines=bool(self._open))
        if self._open:
            raise BadGrammar("this parenthesis is not closed", self._open[-1])
        if self._pos < len(self._text) and self._text[self._pos] not in "\r\n":
            raise BadGrammar("expected a new line or the end", self._pos)
        self._skip(lines=True)

    def _element(self) -> bool:
        """Take one part of a rule; False at its end."""
        char = self._text[self._pos : self._pos + 1]
        self._count(char)
        if char in _ITEMS or char == "!":
            pattern, name = _ITEMS["<" if char == "!" else char]
            taken = self._take(pattern, f"a {name}, closed and with known escapes")
            self._has_item = taken not in ('""', "[]", "[^]")
        elif char == ".":
            self._pos += 1
            self._has_item = True
        elif char in ("*", "+", "?", "{"):
            self._repetition(char)
        elif char in ("(", ")", "|"):
            return self._group(char)
        elif char and _NAME.match(char):
            position = self._pos
            self._used.setdefault(self._take(_NAME, "a name"), position)
            self._has_item = True
        else:
            return False
        return True

    def _count(self, char: str) -> None:
        self._n_branches += char in ("|", "*", "+", "?", "{")
        if self._n_branches > MAX_BRANCHES:
            text = f"more than {MAX_BRANCHES} alternatives and repetitions"
            raise BadGrammar(text, self._pos)

    def _group(self, char: str) -> bool:
        if char == ")" and not self._open:
            return False
        self._has_item = char == ")"
        if char == "(":
            self._open.append(self._pos)
        elif char == ")":
            self._open.pop()
        if len(self._open) > MAX_DEPTH:
            raise BadGrammar(f"more than {MAX_DEPTH} open parentheses", self._pos)
        self._pos += 1
        if char != ")":
            self._skip(lines=True)
        return True

    def _repetition(self, char: str) -> None:
        if not self._has_item:
            raise BadGrammar(f"nothing before {char} to repeat", self._pos)
        if char != "{":
            self._pos += 1
            return
        start = self._pos
        found = _REPEAT.match(self._text, start)
        if found is None:
            raise BadGrammar("expected {n}, {n,} or {n,m}", start)
        least, most = found[1], found[3] or found[1]
        if max(len(least), len(most)) > 6 or int(least) > MAX_REPEAT:
            raise BadGrammar(f"more than {MAX_REPEAT} repetitions", start)
        if int(most) < int(least):
            raise BadGrammar(f"at most {most} is less than at least {least}", start)
        self._pos = found.end()

    def _take(self, pattern: re.Pattern[str], expected: str) -> str:
        found = pattern.match(self._text, self._pos)
        if found is None:
            raise BadGrammar(f"expected {expected}", self._pos)
        self._pos = found.end()
        return found[0]

    def _skip(self, *, lines: bool = False) -> None:
        found = (_SPACE_AND_LINES if lines else _SPACE).match(self._text, self._pos)
        assert found is not None
        self._pos = found.end()
