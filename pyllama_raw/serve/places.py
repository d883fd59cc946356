"""Places for answers: as many as an engine has slots and lets wait, counted at the door."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from time import monotonic

from pyllama_raw.serve.failures import Failure

WINDOW_S = 10.0
RETRY_S = (1, 60)


class Places:
    """The answers in work of one model, or of all. Thread: that of the event loop."""

    def __init__(
        self, n_slots: int, max_waiting: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self.n_open = 0
        self._n_slots, self._max = n_slots, n_slots + max_waiting
        self._clock = clock
        self._ends = deque[float]()  # of the latest seconds
        self._busy_since = 0.0

    def check(self) -> None:
        """
        Raises:
            Failure: all are taken.
        """
        if self.n_open >= self._max:
            headers = {"retry-after": str(self.retry_s())}
            message = f"all {self._max} places of the queue are taken: try again, or elsewhere"
            raise Failure(503, "server_is_overloaded", message, headers=headers)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Around an answer. Raises Failure as check()."""
        self.check()
        if not self.n_open:
            self._busy_since = self._clock()
        self.n_open += 1
        try:
            yield
        finally:
            self.n_open -= 1
            self._ends.append(self._clock())

    def retry_s(self) -> int:
        """Seconds in which all that waits has a slot, at the speed of the latest ends."""
        now = self._clock()
        while self._ends and self._ends[0] < now - WINDOW_S:
            self._ends.popleft()
        span_s = min(now - self._busy_since, WINDOW_S)
        n_waiting = max(self.n_open - self._n_slots, 1)
        n_ended = len(self._ends)
        seconds = span_s * n_waiting / n_ended if n_ended else span_s
        least, most = RETRY_S
        return max(least, min(ceil(seconds), most))
