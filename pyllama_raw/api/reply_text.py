"""
The text of an output in runs, in which each special token stands alone.

A stop string may begin in the text and end in the name of a token, or the other way round,
so a token is held back while its bytes may begin one.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque
from typing import NamedTuple

from pyllama_raw.core.stop_strings import StopStrings

_UTF_8 = getincrementaldecoder("utf-8")


class TextRun(NamedTuple):
    """A text of one kind."""

    text: str
    special: bool  # it is the name of one special token


class ReplyText:
    """Tokens in, runs out; the text of all runs is what a Detokenizer makes of the tokens."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self.stop: bytes | None = None  # the one that was met: the text is complete
        self._held: deque[tuple[bytes, bool]] = deque()  # tokens that are not told yet
        self._n_held = 0  # bytes of them
        self._decoder = _UTF_8("replace")

    def push(self, piece: bytes, special: bool) -> list[TextRun]:
        """Take the next token; return the runs that are certain now."""
        if self.stop is not None:
            return []
        self._held.append((piece, special))
        self._n_held += len(piece)
        n_open, stop = self._follow(piece)
        self.stop = stop
        runs = self._release(self._n_held - n_open)
        return runs if stop is None else self._complete(runs)

    def flush(self) -> list[TextRun]:
        """Return what was held back; nothing follows it."""
        return self._complete(self._release(self._n_held))

    def _complete(self, runs: list[TextRun]) -> list[TextRun]:
        """*runs* and the end of their last character; what is held is in a stop string."""
        self._held.clear()
        self._n_held = 0
        self._close(runs)
        return runs

    def _follow(self, piece: bytes) -> tuple[int, bytes | None]:
        """Bytes at the end that are, or may begin, a stop string; and the one that they are."""
        strings, state = self._strings, self._state
        if not strings:
            return 0, None
        for n_read, byte in enumerate(piece, 1):
            state = strings.next(state, byte)
            if match := strings.matches[state]:
                return len(piece) - n_read + len(match), match
        self._state = state
        return strings.depths[state], None

    def _release(self, n_certain: int) -> list[TextRun]:
        """The first *n_certain* bytes of what is held; a name only as a whole."""
        runs: list[TextRun] = []
        while self._held and len(self._held[0][0]) <= n_certain:
            piece, special = self._held.popleft()
            n_certain -= len(piece)
            self._n_held -= len(piece)
            if special:
                self._close(runs)
                runs.append(TextRun(piece.decode("utf-8", "replace"), True))
            else:
                self._add(runs, piece)
        if n_certain and (self.stop is not None or not self._held[0][1]):
            piece, special = self._held.popleft()
            self._held.appendleft((piece[n_certain:], special))
            self._n_held -= n_certain
            self._add(runs, piece[:n_certain])
        return runs

    def _add(self, runs: list[TextRun], piece: bytes) -> None:
        if text := self._decoder.decode(piece):
            runs.append(TextRun(text, False))

    def _close(self, runs: list[TextRun]) -> None:
        """An open character ends here."""
        if text := self._decoder.decode(b"", final=True):
            runs.append(TextRun(text, False))
