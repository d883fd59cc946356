"""How much a client may ask for: budgets that fill evenly, one of requests, one of tokens."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from time import monotonic

from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure


class Bucket:
    """A budget of at most what fills it in a minute; it can be overdrawn."""

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
    """The budgets of each key; without keys all clients share one."""

    def __init__(
        self, config: ServeConfig, clock: Callable[[], float] = monotonic
    ) -> None:
        self._config, self._clock = config, clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def enter(self, name: str) -> None:
        """
        Count a request of the key *name*.

        Raises:
            Failure: it has to wait.
        """
        requests = self._bucket("requests", name, self._config.requests_per_minute)
        tokens = self._bucket("tokens", name, self._config.tokens_per_minute)
        for what, bucket in (("requests", requests), ("tokens", tokens)):
            if bucket is None:
                continue
            if wait_s := bucket.wait_s(1, self._clock()):
                headers = {"retry-after": str(ceil(wait_s))}
                message = f"too many {what} in a minute: try again in {wait_s:.1f} s"
                raise Failure(429, "rate_limit_exceeded", message, headers=headers)
        if requests is not None:
            requests.take(1)

    def charge(self, name: str, n_tokens: int) -> None:
        """Take the tokens of an answer, which are known when it has ended."""
        bucket = self._bucket("tokens", name, self._config.tokens_per_minute)
        if bucket is not None:
            bucket.take(n_tokens)

    def _bucket(self, what: str, name: str, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        place = (what, name)
        if place not in self._buckets:
            self._buckets[place] = Bucket(per_minute, self._clock())
        return self._buckets[place]
