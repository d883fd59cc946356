"""Places for answers: as many as engines have slots and let wait, counted at the door."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import ceil

from pyllama_raw import AsyncEngine
from pyllama_raw.serve.failures import Failure

RETRY_S = (1, 60)


class Places:
    """The answers in work of some engines. Thread: that of the event loop."""

    def __init__(self, engines: Collection[AsyncEngine]) -> None:
        self.n_open = 0
        self._engines = engines
        infos = [engine.info for engine in engines]
        n_waiting = sum(info.config.scheduler.max_waiting for info in infos)
        self._max = sum(info.n_slots for info in infos) + n_waiting

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
        self.n_open += 1
        try:
            yield
        finally:
            self.n_open -= 1

    def retry_s(self) -> int:
        """Seconds until one of the engines has a slot for who comes now, 1 to 60."""
        least, most = RETRY_S
        soonest = min(engine.queue_s or 0.0 for engine in self._engines)
        return max(least, min(ceil(soonest), most))
