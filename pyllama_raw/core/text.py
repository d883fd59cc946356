"""
Token pieces in, text out, as soon as it is certain; and where a stop string ends it.

The text of all pushes is the UTF-8 text of all pieces, however they were cut, with
U+FFFD for invalid bytes. It ends before the first stop string to become complete (the
longest one, if several end at the same byte). A byte is looked at once.

The stop strings of a request are a table that finds the end of one byte by byte. The table never
changes: all outputs of a request share it, in the engine thread and in the reader's. Making it
takes time in proportion to the bytes of all strings, so whoever accepts strings bounds them, and
makes it where that time keeps nobody waiting.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque


class StopStrings:
    """
    The states of Aho and Corasick (1975): each is the start of a stop string.

    State 0 is the empty start. A search in state *s* that reads a byte goes to
    `moves[s][byte]`; without such a move it tries again from `fallbacks[s]`, which is
    shorter. So many bytes take at most twice as many moves.
    """

    __slots__ = ("depths", "fallbacks", "first_bytes", "matches", "moves", "strings")

    def __init__(self, strings: tuple[bytes, ...] = ()) -> None:
        assert all(strings), "an empty stop string stops everything"
        self.strings = strings
        self.moves: list[dict[int, int]] = [{}]
        self.depths = [0]  # bytes of each state
        # The longest stop string each state ends with; empty: none.
        self.matches = [b""]
        for string in strings:
            self._add(string)
        self.first_bytes = frozenset(self.moves[0])
        self.fallbacks = [0] * len(self.moves)  # the longest state each one ends with
        self._find_fallbacks()

    def __bool__(self) -> bool:
        return bool(self.strings)

    def next(self, state: int, byte: int) -> int:
        """The longest state that what was read ends with."""
        while (target := self.moves[state].get(byte)) is None:
            if not state:
                return 0
            state = self.fallbacks[state]
        return target

    def _add(self, string: bytes) -> None:
        # Strings with an equal start share its states.
        at = 0
        for depth, byte in enumerate(string, start=1):
            target = self.moves[at].get(byte)
            if target is None:
                target = self.moves[at][byte] = len(self.moves)
                self.moves.append({})
                self.depths.append(depth)
                self.matches.append(b"")
            at = target
        self.matches[at] = string

    def _find_fallbacks(self) -> None:
        """Shorter states come first: a fallback is shorter."""
        # States of one byte fall back to 0, as they do already.
        waiting = deque(self.moves[0].values())
        while waiting:
            state = waiting.popleft()
            for byte, child in self.moves[state].items():
                fallback = self.next(self.fallbacks[state], byte)
                self.fallbacks[child] = fallback
                # A longer string that ends here wins over one that ends inside of it.
                self.matches[child] = self.matches[child] or self.matches[fallback]
                waiting.append(child)


NO_STOPS = StopStrings()


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
