"""
Text that is still coming, read by generators.

A reader is a generator: it yields where it needs more text. Each text is looked at once, so a reply
costs time in proportion to its length.

A special token is its name behind MARK, which no text has. So one search finds both kinds of
delimiters, and none is taken for the other.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

MARK = "\ud800"  # a lone surrogate: text that is decoded from UTF-8 has none

LIMIT = 256  # characters of a name, key or header: what goes on for longer is none

T = TypeVar("T")
Flow = Generator[None, None, T]
Write = Callable[[str], None]
SPACE = re.compile(r"\s*")


class Broken(Exception):
    """Sign that text is not what it seemed, or that the reply ended within it."""


class Delimiters:
    """Delimiters that are looked for together."""

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted(set(texts), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self.first = frozenset(MARK).union(text[0] for text in ordered)
        self.beginnings = {text[:n] for text in ordered for n in range(1, len(text))}
        self._longest = max(map(len, ordered), default=0)

    def __bool__(self) -> bool:
        return self._longest > 0

    def held(self, text: str, pos: int) -> int:
        """The index of a beginning of a delimiter at the end of *text*, or its length."""
        for at in range(max(pos, len(text) - self._longest + 1), len(text)):
            if text[at:] in self.beginnings:
                return at
        return len(text)


class TextSource:
    """The text that has come and was not taken yet."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        self._memory: list[str] | None = None  # taken since keep()

    @property
    def is_empty(self) -> bool:
        """Whether all that has come was taken."""
        return self.pos == len(self.text)

    def add(self, text: str) -> None:
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def keep(self, start: str = "") -> None:
        """Remember *start* and what is taken from here on, until `drop` or `kept`."""
        self._memory = [start]

    def drop(self) -> None:
        """Forget what was kept: it is what it seemed."""
        self._memory = None

    def kept(self) -> str:
        """Text that was taken since `keep`; it is kept no longer."""
        texts, self._memory = self._memory, None
        return "".join(texts or ())

    def take(self, end: int) -> str:
        """The text up to the index *end*, which is now taken."""
        text = self.text[self.pos : end]
        self.pos = end
        if self._memory is not None:
            self._memory.append(text)
        return text

    def peek(self) -> Flow[str]:
        """The next character, which stays; nothing at the end of the reply."""
        return (yield from self.ahead(1))

    def ahead(self, n: int) -> Flow[str]:
        """The next *n* characters, which stay; fewer at the end of the reply."""
        while len(self.text) - self.pos < n and not self.ended:
            yield
        return self.text[self.pos : self.pos + n]

    def next(self, char: str) -> Flow[bool]:
        """Take the next character if it is *char*."""
        is_next = (yield from self.peek()) == char
        if is_next:
            self.take(self.pos + 1)
        return is_next

    def expect(self, char: str) -> Flow[None]:
        """Take the next character. Broken: it is not *char*."""
        if not (yield from self.next(char)):
            raise Broken

    def space(self) -> Flow[None]:
        """Take white space."""
        yield from self.run(SPACE, lambda _: None)

    def run(self, pattern: re.Pattern[str], write: Write) -> Flow[None]:
        """Take all that *pattern* of single characters matches."""
        while True:
            match = pattern.match(self.text, self.pos)
            if match and match.end() > self.pos:
                write(self.take(match.end()))
            if self.pos < len(self.text) or self.ended:
                return
            yield

    def cut(self, markers: Delimiters) -> bool:
        """Whether the reply ends within one of *markers*, which is taken then."""
        unread = self.text[self.pos :]
        cut = self.ended and (not unread or unread in markers.beginnings)
        if cut:
            self.take(len(self.text))
        return cut

    def search(self, markers: Delimiters) -> tuple[re.Match[str] | None, int]:
        """The first of *markers*, if it is certain, and up to where there is none."""
        # A marker at the end may be the beginning of a longer one.
        match = markers.pattern.search(self.text, self.pos)
        end = len(self.text) if self.ended else markers.held(self.text, self.pos)
        if match and (self.ended or match.start() < end):
            return match, match.start()
        return None, end

    def until(self, markers: Delimiters, write: Write) -> Flow[str]:
        """Write the text before the first of *markers* and take it; nothing at the end."""
        while True:
            match, end = self.search(markers)
            if end > self.pos:
                write(self.take(end))
            if match:
                return self.take(match.end())
            if self.ended:
                return ""
            yield

    def find(self, markers: Delimiters) -> Flow[str]:
        """The text before the first of *markers*, which stays. Broken: within LIMIT is none."""
        while True:
            match, end = self.search(markers)
            if end - self.pos > LIMIT or (self.ended and not match):
                raise Broken
            if match:
                return self.text[self.pos : end]
            yield

    def match(self, markers: Delimiters) -> Flow[str]:
        """Take one of *markers* if it is next, or take nothing."""
        while markers:
            match = markers.pattern.match(self.text, self.pos)
            if self.ended or markers.held(self.text, self.pos) > self.pos:
                return self.take(match.end()) if match else ""
            yield
        return ""


# -- JSON as it comes --------------------------------------------------------------------

CLOSING = {"{": "}", "[": "]"}
SCALAR = re.compile(r"[-+.0-9Eaeflnrstu]+")  # of numbers and of true, false and null
OUTSIDE = re.compile(r"[-+.0-9Eaeflnrstu:,\s]+")  # of strings and brackets
INSIDE = re.compile(rf'[^"\\{MARK}]+')  # of a string
SHORT = re.compile(rf'"(?:[^"\\{MARK}]|\\.){{0,{LIMIT}}}"', re.DOTALL)
CONTROL = re.compile(r"[\x00-\x1f]")


def quoted(text: str) -> str:
    """*text* as a part of a string of JSON, without the quotes around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def pass_on(source: TextSource, write: Write) -> Flow[None]:
    """Pass on arguments. Where they break off, what follows is no part of them."""
    with contextlib.suppress(Broken):
        yield from read_value(source, write)


def read_value(source: TextSource, write: Write) -> Flow[None]:
    """Pass on one value. Broken: what follows is none; what was one so far is passed on."""
    brackets: list[str] = []
    while True:
        char = yield from source.peek()
        if char in CLOSING:
            brackets.append(CLOSING[char])
            write(source.take(source.pos + 1))
        elif brackets and char == brackets[-1]:
            brackets.pop()
            write(source.take(source.pos + 1))
        elif char == '"':
            yield from read_string(source, write)
        elif char and OUTSIDE.match(char):
            yield from source.run(OUTSIDE if brackets else SCALAR, write)
        else:
            raise Broken
        # A string, a number or a word outside of all brackets is a whole value, too.
        if not brackets:
            return


def read_string(source: TextSource, write: Write) -> Flow[None]:
    """Pass on one string with its quotes. Control characters, which JSON has not, are escaped."""
    write(source.take(source.pos + 1))
    while True:
        char = yield from source.peek()
        if char == '"':
            write(source.take(source.pos + 1))
            return
        if char in ("", MARK):
            raise Broken
        if char == "\\":
            escape = yield from source.ahead(2)
            write(source.take(source.pos + len(escape)))
        else:
            yield from source.run(
                INSIDE, lambda text: write(CONTROL.sub(_escaped, text))
            )


def _escaped(control: re.Match[str]) -> str:
    return quoted(control.group())


def read_short(source: TextSource) -> Flow[str]:
    """The value of a short string, as of a key. Broken: what follows is none, and stays."""
    while True:
        match = SHORT.match(source.text, source.pos)
        if match:
            try:
                value = str(json.loads(match.group(), strict=False))
            except ValueError:
                raise Broken from None
            source.take(match.end())
            return value
        unread = source.text[source.pos :]
        if source.ended or len(unread) > 2 * LIMIT + 2 or unread[:1] not in ("", '"'):
            raise Broken
        yield


def unquoted(text: str) -> str:
    """*text*, or what it says where it is a string of JSON that has JSON."""
    for closing in ("", '"') if text.startswith('"') else ():
        try:
            return str(json.loads(text + closing))
        except ValueError:
            continue
    return text
