"""
Token pieces in, text out, as soon as it is certain.

The text of all pushes is the UTF-8 text of all pieces, however they were cut, with
U+FFFD for invalid bytes. It ends before the first stop string to become complete (the
longest one, if several end at the same byte). A byte is looked at once.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from typing import NamedTuple


class Detokenizer:
    """The text of one sequence; holds back open characters and begun stop strings."""

    __slots__ = ("_first_bytes", "_pending", "_state", "_states", "stop")

    def __init__(self, stop: tuple[bytes, ...] = ()) -> None:
        assert all(stop), "an empty stop string stops everything"
        self.stop: bytes | None = None  # the one that was met: the text is complete
        self._states = _build(stop)
        self._state = self._states[0]
        self._first_bytes = frozenset(self._state.moves)
        self._pending = b""  # an open character, then the start of a stop string

    def push(self, piece: bytes) -> str:
        """Take the next piece; return the text that is certain now."""
        if self.stop is not None:
            return ""
        if not self._pending and self._first_bytes.isdisjoint(piece):
            try:
                return piece.decode()
            except UnicodeDecodeError:
                pass  # it ends inside a character, or is no UTF-8
        return self._push_slowly(piece)

    def flush(self) -> str:
        """Return what was held back; nothing follows it."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        self._state = self._states[0]
        return text

    def _push_slowly(self, piece: bytes) -> str:
        data = self._pending + piece
        n_before_stop = self._scan(piece)
        if n_before_stop is not None:
            self._pending = data[: len(self._pending) + n_before_stop]
            return self.flush()
        certain = data[: len(data) - self._state.depth]
        text, n_decoded = utf_8_decode(certain, "replace", False)
        self._pending = data[n_decoded:]
        return text

    def _scan(self, piece: bytes) -> int | None:
        """Follow *piece*; where a stop string starts in it (< 0: before it), or None."""
        states, state = self._states, self._state
        for i, byte in enumerate(piece):
            state = states[state.moves.get(byte, 0)]
            if state.match:
                self.stop = state.match
                return i + 1 - len(state.match)
        self._state = state
        return None


class _State(NamedTuple):
    """The longest start of a stop string that the bytes so far end with."""

    depth: int  # its length
    match: bytes  # the longest stop string the bytes end with; empty: none
    moves: dict[int, int]  # byte -> index of the next state; others lead to state 0


def _build(stop: tuple[bytes, ...]) -> list[_State]:
    """The states of Aho and Corasick (1975), with all moves worked out; the root first."""
    root = _State(0, b"", {})
    states = [root]
    for string in stop:
        _add(states, string)
    waiting = deque((child, 0) for child in root.moves.values())
    while waiting:
        index, fallback_index = waiting.popleft()
        state = states[index]
        fallback = states[fallback_index]  # longest proper suffix; completed before
        for byte, child in state.moves.items():
            waiting.append((child, fallback.moves.get(byte, 0)))
        states[index] = _State(
            state.depth,
            state.match or fallback.match,
            fallback.moves | state.moves,
        )
    return states


def _add(states: list[_State], string: bytes) -> None:
    at = 0
    for depth, byte in enumerate(string, start=1):
        moves = states[at].moves
        if byte not in moves:
            moves[byte] = len(states)
            states.append(_State(depth, b"", {}))
        at = moves[byte]
    states[at] = states[at]._replace(match=string)
