"""
Second tries of what failed before anything of the answer was read.

After the first delta nothing is tried again: a reader would get the same text twice, and
somebody would pay for it twice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import uniform
from typing import TypeVar

import anyio

from pyllama_raw.errors import PyllamaError

T = TypeVar("T")


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
        told: float | None = getattr(error, "retry_after_s", None)
        if told is not None:
            return told if told <= self.most_told_s else None
        ceiling = self.ceiling_s(attempt)
        return self.jitter(ceiling / 2, ceiling)


NO_RETRIES = Backoff(max_retries=0)


class RetryBudget:
    """
    A share of requests that may be tried again: a service that is down gets no double load.

    Args:
        share: retries for each request.
        at_least: retries that are always there; they come back with requests.
    """

    def __init__(self, share: float = 0.1, at_least: float = 10.0) -> None:
        self._share, self._most = share, at_least
        self._left = at_least

    def earn(self) -> None:
        """A request was sent."""
        self._left = min(self._left + self._share, self._most)

    def take(self) -> bool:
        """Whether another try is left, which is taken."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


async def retried(
    make_source: Callable[[], AsyncGenerator[T, None]],
    backoff: Backoff,
    budget: RetryBudget,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> AsyncGenerator[T, None]:
    """Items of *make_source*, which is called again if it fails before its first delta."""
    budget.earn()
    began, attempt = False, 0
    while True:
        has_said = False
        try:
            async with aclosing(make_source()) as source:
                async for item in source:
                    if item is None and began:
                        continue
                    began, has_said = True, has_said or item is not None
                    yield item
                return
        except PyllamaError as error:
            wait_s = None if has_said else backoff.wait_s(attempt, error)
            if wait_s is None or not budget.take():
                raise
        attempt += 1
        await sleep(wait_s)


def retry_after_s(text: str | None, now: datetime | None = None) -> float | None:
    """Seconds of the header Retry-After, which has a number or a date; None: it is neither."""
    if text is None:
        return None
    given = text.strip()
    if given.isascii() and given.isdigit():
        return float(given)
    try:
        at = parsedate_to_datetime(given)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max((at - (now or datetime.now(UTC))).total_seconds(), 0.0)
