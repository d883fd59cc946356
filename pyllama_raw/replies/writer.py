"""Puts what was read into parts."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Protocol

from pyllama_raw.replies.parts import CallDelta, Content, Part
from pyllama_raw.replies.source import MARK, Write


class Lead(Enum):
    """Fate of white space at the beginning of a stretch of text."""

    KEPT = "kept"
    DROPPED = "dropped"
    HELD = "held"  # kept if text follows


class Stopped(Exception):
    """Sign that the content ends here: a stop string has come."""


class StopSearch(Protocol):
    """Looks for stop strings in a text."""

    stop: bytes | None  # the one that was met: nothing follows the text before it

    @property
    def pending(self) -> bytes:
        """Bytes that are held back."""

    def push(self, piece: bytes) -> str:
        """Take the next piece; return the text that is certain now."""

    def flush(self) -> str:
        """Return what was held back; what follows is looked at anew."""


class TextStretch:
    """A stretch of text between delimiters, to which white space beside them may belong."""

    def __init__(self, write: Write, lead: Lead, *, trim_end: bool) -> None:
        self._write = write
        self._lead = lead
        self._trim_end = trim_end
        self._space: list[str] = []
        self.blank = True

    @property
    def is_empty(self) -> bool:
        """Whether not even white space has come."""
        return self.blank and not self._space

    def write(self, text: str) -> None:
        if self.blank and self._lead is Lead.DROPPED:
            text = text.lstrip()
        body = text.rstrip()
        if not self._trim_end and (body or not self.blank):
            body = text
        if body:
            self._write("".join([*self._space, body]))
            self._space.clear()
            self.blank = False
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def end(self, *, trim: bool) -> None:
        """The stretch is over; with *trim* white space at its end belongs to what follows."""
        if not trim and self._space and not (self.blank and self._lead is Lead.HELD):
            self._write("".join(self._space))
        self._space.clear()


class PartWriter:
    """Collects parts; neighbours that go on are one part."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._texts: list[str] = []
        self._make: Callable[[str], Part] = Content
        self._n_calls = 0

    def taken(self) -> list[Part]:
        """The parts since the last time."""
        self._flush(self._make)
        parts, self._parts = self._parts, []
        return parts

    def forget_text(self) -> None:
        """Only calls are left of what was written."""
        self._parts = [part for part in self.taken() if isinstance(part, CallDelta)]

    def add(self, make: Callable[[str], Part], text: str) -> None:
        """More of the text of a part, which *make* makes."""
        if make is not self._make:
            self._flush(make)
        self._texts.append(text)

    def call(self, name: str, id_: str) -> None:
        index = self._n_calls
        self._n_calls += 1
        self._flush(partial(CallDelta, index, None, None))
        self._parts.append(CallDelta(index, id_, name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the last call."""
        self._texts.append(text)

    def _flush(self, make: Callable[[str], Part]) -> None:
        """Make a part of what there is; the next is made by *make*."""
        if text := "".join(self._texts).replace(MARK, ""):
            self._parts.append(self._make(text))
        self._texts.clear()
        self._make = make
