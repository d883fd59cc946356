"""
When a running step may be aborted.

Rules: a step is aborted only if every request in it was cancelled, or the engine
closes. A cancellation meant for one step never reaches the next: the flag is set only
while a step is published, and one lock covers both.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

from pyllama_raw.core.step import Work


class AbortFlag(Protocol):
    """What a running llama_decode polls."""

    def set(self) -> None:
        """Ask the running decode to stop."""

    def clear(self) -> None:
        """Let decodes run."""


class AbortGate:
    """Decides from any thread whether the step that runs now has to stop."""

    def __init__(self, flag: AbortFlag) -> None:
        self._flag = flag
        self._is_set = False
        self._lock = Lock()
        self._running: Sequence[Work] | None = None  # what the running step computes
        self._cancelled: set[int] = set()  # that the scheduler does not know of yet
        self._closing = False

    def enter(self, works: Sequence[Work]) -> None:
        """A step begins. Thread: the engine's."""
        with self._lock:
            self._running = works
            self._stop_if_unwanted()

    def leave(self) -> None:
        """The step is over. Thread: the engine's."""
        with self._lock:
            self._running = None
        if self._is_set:  # nobody sets it between steps
            self._flag.clear()
            self._is_set = False

    def cancel(self, request_id: int) -> None:
        """Nobody wants *request_id* any more; settle() must follow. Thread: any."""
        with self._lock:
            self._cancelled.add(request_id)
            self._stop_if_unwanted()

    def settle(self, request_id: int) -> None:
        """The scheduler knows of the cancellation."""
        with self._lock:
            self._cancelled.discard(request_id)

    def close(self) -> None:
        """Abort this step and every later one. Thread: any."""
        with self._lock:
            self._closing = True
            self._stop_if_unwanted()

    def _stop_if_unwanted(self) -> None:
        """Costs next to nothing unless somebody has cancelled."""
        if self._running is None or not (self._closing or self._cancelled):
            return
        gone = self._cancelled
        if self._closing or all(work.request_id in gone for work in self._running):
            self._flag.set()
            self._is_set = True
