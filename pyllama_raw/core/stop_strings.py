"""
The stop strings of a request, as a table that finds the end of one byte by byte.

The table never changes: all outputs of a request share it, in the engine thread and in
the reader's. Making it takes time in proportion to the bytes of all strings, so whoever
accepts strings bounds them, and makes it where that time keeps nobody waiting.
"""

from __future__ import annotations

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
