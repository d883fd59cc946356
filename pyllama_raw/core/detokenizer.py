"""
Token pieces in, text out, as soon as it is certain.

The text of all pushes is the UTF-8 text of all pieces, however they were cut, with
U+FFFD for invalid bytes. It ends before the first stop string to become complete (the
longest one, if several end at the same byte). A byte is looked at once.
"""

from __future__ import annotations

from codecs import utf_8_decode

from pyllama_raw.core.stop_strings import NO_STOPS, StopStrings


class Detokenizer:
    """The text of one sequence; holds back open characters and begun stop strings."""

    __slots__ = ("_pending", "_state", "_strings", "stop")

    def __init__(self, strings: StopStrings = NO_STOPS) -> None:
        self.stop: bytes | None = None  # the one that was met: the text is complete
        self._strings = strings
        self._state = 0
        self._pending = b""  # an open character, then the start of a stop string

    @property
    def pending(self) -> bytes:
        """What is held back."""
        return self._pending

    def push(self, piece: bytes) -> str:
        """Take the next piece; return the text that is certain now."""
        if self.stop is not None:
            return ""
        # Nearly all pieces: nothing is held back, and no stop string begins in this one.
        if not self._pending and self._strings.first_bytes.isdisjoint(piece):
            try:
                return piece.decode()
            except UnicodeDecodeError:
                # It ends inside a character, or is no UTF-8.
                pass
        return self._push_slowly(piece)

    def flush(self) -> str:
        """Return what was held back; nothing follows it."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        self._state = 0
        return text

    def _push_slowly(self, piece: bytes) -> str:
        data = self._pending + piece
        n_before_stop = self._scan(piece)
        # A stop string is complete: the text ends before it, and nothing comes any more.
        if n_before_stop is not None:
            self._pending = data[: len(self._pending) + n_before_stop]
            return self.flush()
        # What may become a stop string is held back, then what may become a character.
        certain = data[: len(data) - self._strings.depths[self._state]]
        text, n_decoded = utf_8_decode(certain, "replace", False)
        self._pending = data[n_decoded:]
        return text

    def _scan(self, piece: bytes) -> int | None:
        """Follow *piece*; where a stop string starts in it (< 0: before it), or None."""
        strings, state = self._strings, self._state
        for i, byte in enumerate(piece):
            state = strings.next(state, byte)
            match = strings.matches[state]
            if match:
                self.stop = match
                return i + 1 - len(match)
        self._state = state
        return None
