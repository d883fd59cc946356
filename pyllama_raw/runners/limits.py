"""
Limits of what is sent to a runner: at once, and in a minute.

A service tells what is left by headers `x-ratelimit-*`; what it tells counts beside what is
configured, for MAX_RESET_S at most: it cannot silence a program for days.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Literal

import anyio

from pyllama_raw.runners.errors import Backpressure, QueueTimeout

MINUTE_S = 60.0
MAX_RESET_S = 120.0  # that a service may ask for
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
KINDS = ("requests", "tokens")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one runner. None: there is none."""

    max_concurrency: int | None = 32
    """Requests at once."""
    rpm: int | None = None
    """Requests in a minute."""
    tpm: int | None = None
    """Tokens in a minute."""
    when_full: Literal["wait", "reject"] = "wait"
    """The fate of requests beyond max_concurrency."""
    max_queue: int = 1024
    """Requests that wait for their turn."""
    queue_timeout_s: float = 30.0
    """Seconds that a request waits for its turn."""


class Turnstile:
    """Lets requests pass by Limits, in their order."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._sent = deque[tuple[float, int]]()  # of the last minute: when, and tokens
        self._blocked_until = dict.fromkeys(KINDS, float("-inf"))
        n_turns = limits.max_concurrency
        self._turns = anyio.Semaphore(sys.maxsize if n_turns is None else n_turns)

    @asynccontextmanager
    async def entered(self, n_tokens: int = 1) -> AsyncIterator[None]:
        """
        A block in which a request of *n_tokens* may run.

        Raises:
            Backpressure: a limit of the minute or of the queue is reached.
            QueueTimeout: its turn did not come.
        """
        await self._take_turn()
        try:
            self.count(n_tokens)
            yield
        finally:
            self._turns.release()

    def count(self, n_tokens: int = 1) -> None:
        """Count a request of this minute, or raise Backpressure."""
        now, n_tokens = self._clock(), max(1, n_tokens)
        while self._sent and self._sent[0][0] <= now - MINUTE_S:
            self._sent.popleft()
        n_requests = len(self._sent)
        n_sent = sum(tokens for _, tokens in self._sent)
        self._check("requests", n_requests, 1, self._limits.rpm, now)
        self._check("tokens", n_sent, n_tokens, self._limits.tpm, now)
        self._sent.append((now, n_tokens))

    def note_headers(self, headers: Mapping[str, str]) -> None:
        """Take in the headers of an answer."""
        for kind in KINDS:
            left = headers.get(f"x-ratelimit-remaining-{kind}", "").strip()
            reset = duration_s(headers.get(f"x-ratelimit-reset-{kind}", ""))
            if left == "0" and reset is not None:
                self._blocked_until[kind] = self._clock() + min(reset, MAX_RESET_S)

    def _check(
        self, kind: str, n_sent: int, n: int, limit: int | None, now: float
    ) -> None:
        """Raise Backpressure if *n* more are too many."""
        wait_s = self._blocked_until[kind] - now
        if wait_s > 0:
            raise Backpressure(
                f"the service takes no more {kind} for {wait_s:g} s", wait_s
            )
        if limit is not None and n_sent + n > limit:
            message = f"{kind}-per-minute limit reached ({n_sent}/{limit})"
            ends_s = self._sent[0][0] + MINUTE_S - now if self._sent else None
            raise Backpressure(message, ends_s)

    async def _take_turn(self) -> None:
        turns, limits = self._turns, self._limits
        if turns.value:
            turns.acquire_nowait()
            return
        n_waiting = turns.statistics().tasks_waiting
        if limits.when_full == "reject" or n_waiting >= limits.max_queue:
            message = f"{limits.max_concurrency} requests run and {n_waiting} wait"
            raise Backpressure(message)
        with anyio.move_on_after(limits.queue_timeout_s) as scope:
            await turns.acquire()
        if scope.cancelled_caught:
            raise QueueTimeout(limits.queue_timeout_s)


def duration_s(text: str) -> float | None:
    """Seconds of a duration such as `6m0s`, `20ms` or `1.5`; None: it is none."""
    parts = DURATION.findall(text.strip())
    if not parts or "".join(number + unit for number, unit in parts) != text.strip():
        return None
    return sum(float(number) * UNITS_S[unit or "s"] for number, unit in parts)
