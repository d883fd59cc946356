"""
A breaker: a runner that fails again and again rests for a while.

Closed, all requests pass. After *threshold* failures in a row it is open, and none passes. When
it has rested, a single request passes as a probe: its success closes the breaker, its failure
opens it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Literal

from pyllama_raw.errors import ClosedError, PyllamaError, QueueFull
from pyllama_raw.runners.errors import Backpressure, CircuitOpen, QueueTimeout

# Errors that say nothing of a runner, but that another one may have room.
FULL = (Backpressure, CircuitOpen, QueueFull, QueueTimeout)
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
