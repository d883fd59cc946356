"""
Guards between a request and a service: its turn, its time, further tries, and a rest.

Limits: how much is sent at once, and in a minute. A service tells what is left by headers
`x-ratelimit-*`; what it tells counts beside what is configured, for MAX_RESET_S at most: it cannot
silence a program for days.

Timeouts: a limit of the whole alone says little of a stream: one that hangs at its beginning is
found by `first_token_s`, one that hangs later by `between_tokens_s`.

Tries: what failed early is tried again. After the first delta nothing is: a reader would get the
same text twice, and somebody would pay for it twice.

Breaker: a runner that fails again and again rests for a while. Closed, all requests pass. After
*threshold* failures in a row it is open, and none passes. When it has rested, a single request
passes as a probe: its success closes the breaker, its failure opens it again.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
)
from contextlib import (
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from itertools import count
from math import inf
from random import uniform
from time import monotonic
from typing import Annotated, Literal, TypeVar

import anyio
from pydantic import Field

from pyllama_raw.errors import ClosedError, PyllamaError, QueueFull
from pyllama_raw.options.frozen import Checked, Count, Whole, check_value
from pyllama_raw.runners.errors import (
    Backpressure,
    CircuitOpen,
    QueueTimeout,
    RunnerTimeout,
)

MINUTE_S = 60.0
MAX_RESET_S = 120.0  # that a service may ask for
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
KINDS = ("requests", "tokens")
T = TypeVar("T")
Seconds = Annotated[float, Field(ge=0)]
# Errors that say nothing of a runner, but that another one may have room.
FULL = (Backpressure, CircuitOpen, QueueFull, QueueTimeout)


@dataclass(frozen=True, slots=True)
class Limits(Checked):
    """Limits of one runner. None: there is none. Raises ConfigError for a wrong one."""

    max_concurrency: Count | None = 32
    """Requests at once."""
    rpm: Whole | None = None
    """Requests in a minute."""
    tpm: Whole | None = None
    """Tokens in a minute."""
    when_full: Literal["wait", "reject"] = "wait"
    """The fate of requests beyond max_concurrency."""
    max_queue: Whole = 1024
    """Requests that wait for their turn."""
    queue_timeout_s: Seconds = 30.0
    """Seconds that a request waits for its turn."""


class Turnstile:
    """Lets requests pass by Limits, in their order."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._sent = deque[tuple[float, int]]()  # of the last minute: when, and tokens
        self._blocked_until = dict.fromkeys(KINDS, float("-inf"))
        n_turns = limits.max_concurrency
        self._turns = anyio.Semaphore(sys.maxsize if n_turns is None else int(n_turns))

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


@dataclass(frozen=True, slots=True)
class Timeouts(Checked):
    """Limits in seconds. None: there is none. Raises ConfigError for a wrong one."""

    connect_s: Seconds | None = 10.0
    """Until the connection is made."""
    first_token_s: Seconds | None = 300.0
    """From the request to its first delta, with the wait in a queue."""
    between_tokens_s: Seconds | None = 60.0
    """Between deltas, and to the end."""
    total_s: Seconds | None = 600.0
    """For all of it."""
    health_s: Seconds = 3.0
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
class Backoff(Checked):
    """Waits before further tries. Raises ConfigError for a wrong value."""

    first_s: Seconds = 0.1
    """Before the second try."""
    factor: Annotated[float, Field(ge=1, le=1e6)] = 2.0
    """By which each wait is longer than the one before."""
    most_s: Seconds = 2.0
    """The longest one."""
    most_told_s: Seconds = 60.0
    """The longest wait that a service may ask for; after longer ones nobody tries again."""
    max_retries: Whole = 3
    """Tries after the first one."""
    jitter: Callable[[float, float], float] = uniform
    """Draws a wait between its half and all of it."""

    def ceiling_s(self, attempt: int) -> float:
        """The longest wait after the try *attempt*, counted from 0."""
        growth = self.factor ** min(attempt, 50)  # a float holds 1e6**50
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


logger = logging.getLogger(__name__)
BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """
    The breaker of one runner.

    Args:
        threshold: failures in a row that open it.
        rest_s: seconds that it stays open.
        name: of the runner, for the log.

    Attributes:
        n_opened: how often it has opened.
    """

    def __init__(
        self,
        threshold: int = 10,
        rest_s: float = 30.0,
        clock: Callable[[], float] = monotonic,
        name: str = "",
    ) -> None:
        check_value("threshold", threshold, Count)
        check_value("rest_s", rest_s, Seconds)
        self.name, self.n_opened = name, 0
        self._threshold, self._rest_s, self._clock = threshold, rest_s, clock
        self._n_failures = 0
        self._opened_at: float | None = None
        self._retry_at = 0.0
        self._is_probing = False

    @property
    def state(self) -> BreakerState:
        """The state now."""
        if self._opened_at is None:
            return "closed"
        return "open" if self._clock() < self._retry_at else "half_open"

    def check(self) -> None:
        """Let a request pass, which is told by succeeded(), failed() or left(); or CircuitOpen."""
        if self._opened_at is None:
            return
        if self.state == "open" or self._is_probing:
            raise CircuitOpen(self._opened_at, self._retry_at)
        self._is_probing = True

    @contextmanager
    def watching(self, *, is_forced: bool = False) -> Iterator[None]:
        """A block with a request, if one may pass or must; the end of the block is taken in."""
        if not is_forced:
            self.check()
        try:
            yield
            self.succeeded()
        except PyllamaError as error:
            self.failed(error)
            raise
        finally:
            self.left()

    def succeeded(self) -> None:
        """The runner has answered."""
        if self._opened_at is not None:
            logger.info("%s answers again", self.name or "a runner")
        self._n_failures, self._opened_at, self._is_probing = 0, None, False

    def failed(self, error: PyllamaError) -> None:
        """The runner has failed; errors that are not its fault are answers, if it gave them."""
        if isinstance(error, ClosedError):
            self.open()
        elif error.counts_as_circuit_failure:
            self._n_failures += 1
            if self._n_failures >= self._threshold or self._is_probing:
                self.open()
        elif not isinstance(error, FULL):
            self.succeeded()

    def left(self) -> None:
        """Nobody knows: the caller left before there was an answer."""
        self._is_probing = False

    def open(self, rest_s: float | None = None) -> None:
        """Open for *rest_s* seconds, or as long as always, whatever happened before."""
        rest_s = self._rest_s if rest_s is None else rest_s
        if self.state != "open":
            self.n_opened += 1
            message = "%s rests for %g s after %d failures in a row"
            logger.warning(message, self.name or "a runner", rest_s, self._n_failures)
        self._opened_at = self._clock()
        self._retry_at, self._is_probing = self._opened_at + rest_s, False
