"""How much may come in: answers at a time, and what a key may ask for in a minute."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import ceil
from time import monotonic

from pyllama_raw import AsyncEngine
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure


class Places:
    """
    The answers in work of some engines: as many as they have slots and let wait.

    Thread: that of the event loop.
    """

    def __init__(self, engines: Collection[AsyncEngine]) -> None:
        self.n_open = 0
        self._engines = engines
        infos = [engine.info for engine in engines]
        n_waiting = sum(info.config.scheduler.max_waiting for info in infos)
        n_slots = sum(info.n_slots for info in infos)
        self._max = n_slots + n_waiting
        self.max_outputs = n_slots + n_waiting // 2
        """Outputs that one body may ask for, so that others may wait beside them."""

    def check(self) -> None:
        """Raise Failure if all are taken."""
        if self.n_open >= self._max:
            headers = {"retry-after": str(self.retry_s())}
            message = "all places of the queue are taken: try again, or elsewhere"
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
        soonest = min(engine.queue_s or 0.0 for engine in self._engines)
        return max(1, min(ceil(soonest), 60))


class Bucket:
    """A budget that fills evenly, up to that of a minute; it can be overdrawn."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute, self._level, self._at = per_minute, float(per_minute), now

    def wait_s(self, n: float, now: float) -> float:
        """Seconds until there are *n*; 0: there are."""
        filled = self._level + (now - self._at) * self._per_minute / 60
        self._level, self._at = min(filled, float(self._per_minute)), now
        return max(n - self._level, 0.0) * 60 / self._per_minute

    def take(self, n: int) -> None:
        """Use *n*, whether they are there or not."""
        self._level -= n


class Rates:
    """The budgets of each key; without keys all clients share them."""

    def __init__(self, config: ServeConfig) -> None:
        given = {
            "requests": config.requests_per_minute,
            "tokens": config.tokens_per_minute,
        }
        self._limits = {what: limit for what, limit in given.items() if limit}
        self._buckets: dict[tuple[str, str], Bucket] = {}  # by budget and key

    def enter(self, name: str) -> None:
        """Count a request of the key *name*. Raises Failure if it has to wait."""
        for what in self._limits:
            if wait_s := self._bucket(what, name).wait_s(1, monotonic()):
                headers = {"retry-after": str(ceil(wait_s))}
                message = f"too many {what} in a minute: try again in {wait_s:.1f} s"
                raise Failure(429, "rate_limit_exceeded", message, headers=headers)
        self.charge("requests", name, 1)

    def charge(self, what: str, name: str, n: int) -> None:
        """Take *n*; tokens are known when an answer has ended."""
        if what in self._limits:
            self._bucket(what, name).take(n)

    def _bucket(self, what: str, name: str) -> Bucket:
        new = Bucket(self._limits[what], monotonic())
        return self._buckets.setdefault((what, name), new)
