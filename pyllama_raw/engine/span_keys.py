"""
Numbers for the rows of spans, as the tokens of a prompt have them.

Whatever compares prompts compares ints: so a key of 32 bytes gets a number below 0. A number
is never given to another key. A key that was forgotten gets a new one: what is cached under
the old one is not found again, which is a miss.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

MAX_KEYS = 2**16  # about 10 MB
_LAST = -(2**31)


class SpanKeys:
    """
    The numbers of one engine.

    Thread:
        Any.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._numbers = OrderedDict[bytes, int]()  # the latest used last
        self._next = -1
        self._lock = Lock()

    def number(self, key: bytes) -> int:
        """The number of *key*, below 0: equal only for equal keys."""
        with self._lock:
            number = self._numbers.get(key)
            if number is None:
                number, self._next = self._next, self._next - 1
                assert number >= _LAST
                self._numbers[key] = number
                if len(self._numbers) > self._max_keys:
                    self._numbers.popitem(last=False)
            else:
                self._numbers.move_to_end(key)
            return number
