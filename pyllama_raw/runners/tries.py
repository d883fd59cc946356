"""
Tries of a request: the time that each may take, and another one after what failed early.

A limit of the whole alone says little of a stream: one that hangs at its beginning is found by
`first_token_s`, one that hangs later by `between_tokens_s`. After the first delta nothing is
tried again: a reader would get the same text twice, and somebody would pay for it twice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from itertools import count
from math import inf
from random import uniform
from typing import TypeVar

import anyio

from pyllama_raw.errors import PyllamaError
from pyllama_raw.runners.errors import RunnerTimeout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits in seconds. None: there is none."""

    connect_s: float | None = 10.0
    """Until the connection is made."""
    first_token_s: float | None = 300.0
    """From the request to its first delta, with the wait in a queue."""
    between_tokens_s: float | None = 60.0
    """Between deltas, and to the end."""
    total_s: float | None = 600.0
    """For all of it."""
    health_s: float = 3.0
    """For an answer to health()."""


async def timed(
    source: AsyncGenerator[T, None], timeouts: Timeouts
) -> AsyncGenerator[T, None]:
    """
    *source*, with limits of time; its first item is no token.

    Raises:
        RunnerTimeout: a part took too long; *source* is closed.
    """
    began = anyio.current_time()
    total = _end(began, "total", timeouts.total_s)
    part = _end(began, "first_token", timeouts.first_token_s)
    async with aclosing(source):
        for n_items in count(1):
            end_at, name, limit_s = min(part, total)
            with anyio.CancelScope(deadline=end_at) as scope:
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
            if scope.cancelled_caught:
                raise RunnerTimeout(name, limit_s)
            yield item
            if n_items > 1:
                now, limit = anyio.current_time(), timeouts.between_tokens_s
                part = _end(now, "between_tokens", limit)


def _end(since: float, name: str, limit_s: float | None) -> tuple[float, str, float]:
    """The time at which *name* is to be over, its name and its limit."""
    limit_s = inf if limit_s is None else limit_s
    return since + limit_s, name, limit_s


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits before further tries."""

    first_s: float = 0.1
    """Before the second try."""
    factor: float = 2.0
    """By which each wait is longer than the one before."""
    most_s: float = 2.0
    """The longest one."""
    most_told_s: float = 60.0
    """The longest wait that a service may ask for; after longer ones nobody tries again."""
    max_retries: int = 3
    """Tries after the first one."""
    jitter: Callable[[float, float], float] = uniform
    """Draws a wait between its half and all of it."""

    def ceiling_s(self, attempt: int) -> float:
        """The longest wait after the try *attempt*, counted from 0."""
        growth = self.factor ** min(attempt, 64)
        return min(self.first_s * growth, self.most_s)

    def wait_s(self, attempt: int, error: PyllamaError) -> float | None:
        """Seconds to wait after *attempt* failed with *error*; None: give up."""
        if attempt >= self.max_retries or not error.is_retryable:
            return None
        advised_s: float | None = getattr(error, "retry_after_s", None)
        if advised_s is not None:
            return advised_s if advised_s <= self.most_told_s else None
        ceiling = self.ceiling_s(attempt)
        return self.jitter(ceiling / 2, ceiling)


class RetryBudget:
    """
    A share of requests that may be tried again: a service that is down gets no double load.

    Args:
        share: retries for each request.
        at_least: retries that are always there; they come back with requests.
    """

    def __init__(
        self, backoff: Backoff, share: float = 0.1, at_least: float = 10.0
    ) -> None:
        self._backoff, self._share = backoff, share
        self._left = self._max = at_least

    def earn(self) -> None:
        """A request was sent."""
        self._left = min(self._left + self._share, self._max)

    def wait_s(self, attempt: int, error: PyllamaError) -> float | None:
        """As the backoff, while a try is left, which is taken."""
        wait_s = self._backoff.wait_s(attempt, error)
        if wait_s is None or self._left < 1:
            return None
        self._left -= 1
        return wait_s


async def retried(
    make_source: Callable[[], AsyncGenerator[T, None]],
    wait_s: Callable[[int, PyllamaError], float | None],
    watching: Callable[[], AbstractContextManager[None]] = nullcontext,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> AsyncGenerator[T, None]:
    """
    Items of *make_source*, which is called again if it fails before its first delta.

    Args:
        wait_s: seconds until then, after a try, counted from 0, failed; None: give up.
        watching: makes a block around each try.
    """
    began = False
    for attempt in count():
        has_said = False
        try:
            with watching():
                async with aclosing(make_source()) as source:
                    async for item in source:
                        if item is None and began:
                            continue
                        began, has_said = True, has_said or item is not None
                        yield item
        except PyllamaError as error:
            pause_s = None if has_said else wait_s(attempt, error)
            if pause_s is None:
                raise
        else:
            return
        await sleep(pause_s)
