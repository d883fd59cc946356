"""
Numbers for the rows of spans, as the tokens of a prompt have them.

Whatever compares prompts compares ints: so a key of 32 bytes gets a number below 0. A number
is never given to another key. A key that was forgotten gets a new one: what is cached under
the old one is not found again, which is a miss.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import count
from threading import Lock

MAX_KEYS = 2**16  # about 10 MB


class SpanKeys:
    """
    The numbers of one engine.

    Thread:
        Any.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        numbers = count(-1, -1)
        self._number = lru_cache(max_keys)(lambda _: next(numbers))
        self._lock = Lock()  # two threads with one new key get one number

    def number(self, key: bytes) -> int:
        """The number of *key*, below 0: equal only for equal keys."""
        with self._lock:
            return self._number(key)
