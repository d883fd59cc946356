"""
When a running step may be aborted.

Rules: a step is aborted only if every request in it was cancelled, or the engine
closes. A cancellation meant for one step never reaches the next: the flag is set only
while a step is published, and one lock covers both.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Protocol


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
        self._lock = Lock()
        self._wanted: set[int] | None = None  # request ids of the running step
        self._cancelled: set[int] = set()  # that the scheduler does not know of yet
        self._closing = False

    def enter(self, request_ids: Iterable[int]) -> None:
        """A step begins. Thread: the engine's."""
        with self._lock:
            self._wanted = set(request_ids) - self._cancelled
            self._stop_if_unwanted()

    def leave(self) -> None:
        """The step is over. Thread: the engine's."""
        with self._lock:
            self._wanted = None
            self._flag.clear()

    def cancel(self, request_id: int) -> None:
        """Nobody wants *request_id* any more; settle() must follow. Thread: any."""
        with self._lock:
            self._cancelled.add(request_id)
            if self._wanted is not None:
                self._wanted.discard(request_id)
                self._stop_if_unwanted()

    def settle(self, request_id: int) -> None:
        """The scheduler knows of the cancellation."""
        with self._lock:
            self._cancelled.discard(request_id)

    def close(self) -> None:
        """Abort this step and every later one. Thread: any."""
        with self._lock:
            self._closing = True
            if self._wanted is not None:
                self._stop_if_unwanted()

    def _stop_if_unwanted(self) -> None:
        if self._closing or not self._wanted:
            self._flag.set()
