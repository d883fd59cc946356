"""How much a key may ask for in a minute: a budget of requests, and one of tokens."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from time import monotonic

from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure


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

    def __init__(
        self, config: ServeConfig, clock: Callable[[], float] = monotonic
    ) -> None:
        given = {
            "requests": config.requests_per_minute,
            "tokens": config.tokens_per_minute,
        }
        self._limits = {what: limit for what, limit in given.items() if limit}
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}  # by budget and key

    def enter(self, name: str) -> None:
        """Count a request of the key *name*. Raises Failure if it has to wait."""
        for what in self._limits:
            if wait_s := self._bucket(what, name).wait_s(1, self._clock()):
                headers = {"retry-after": str(ceil(wait_s))}
                message = f"too many {what} in a minute: try again in {wait_s:.1f} s"
                raise Failure(429, "rate_limit_exceeded", message, headers=headers)
        self.charge("requests", name, 1)

    def charge(self, what: str, name: str, n: int) -> None:
        """Take *n*; tokens are known when an answer has ended."""
        if what in self._limits:
            self._bucket(what, name).take(n)

    def _bucket(self, what: str, name: str) -> Bucket:
        new = Bucket(self._limits[what], self._clock())
        return self._buckets.setdefault((what, name), new)
