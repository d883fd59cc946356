"""
Server-sent events out of bytes, wherever these are split.

Lines end with LF, CR or CRLF; a line that begins with a colon is a comment, and one blank after
the colon of a field is not a part of it. An event is told when its empty line has come: what a
broken connection leaves is none.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from typing import NamedTuple

from pyllama_raw.runners.errors import UnexpectedAnswer

MAX_CHARACTERS = 2**24  # of one event


class ServerEvent(NamedTuple):
    """One event."""

    data: str
    """Its lines of data, one below the other."""
    kind: str = "message"
    """The name that the field `event` gives."""


class EventReader:
    """The reader of one stream."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8-sig")("replace")
        self._line: list[str] = []  # parts of the line that has begun
        self._n_characters = 0
        self._ends_cr = False  # an LF that comes next belongs to it
        self._data: list[str] = []
        self._kind = ""

    def feed(self, received: bytes) -> list[ServerEvent]:
        """Events that *received* completes."""
        text = self._decoder.decode(received)
        if self._ends_cr and text:
            text = text.removeprefix("\n")
            self._ends_cr = False
        self._ends_cr = self._ends_cr or text.endswith("\r")
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        events = []
        for line in lines:
            whole = "".join((*self._line, line))
            self._line.clear()
            events += self._take(whole)
        self._line += [rest] if rest else []
        self._count(len(rest))
        return events

    def _take(self, line: str) -> list[ServerEvent]:
        """Take in a whole line."""
        if not line:
            found = [ServerEvent("\n".join(self._data), self._kind or "message")]
            has_data, self._kind = bool(self._data), ""
            self._data.clear()
            self._n_characters = 0
            return found if has_data else []
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._count(len(value))
        elif name == "event":
            self._kind = value
        return []

    def _count(self, n: int) -> None:
        """A server that never ends an event does not fill the memory."""
        self._n_characters += n
        if self._n_characters > MAX_CHARACTERS:
            said = f"an event has more than {MAX_CHARACTERS} characters: look at the server"
            raise UnexpectedAnswer(said)
