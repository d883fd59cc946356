"""
The gate that says whether a running step may be aborted.

Rule: a step is aborted only if nobody wants what it computes. The flag is set only while a
step is published, and one lock covers both, so no stop reaches a step it was not meant for.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from threading import RLock
from typing import Protocol

from pyllama_raw.core.step import Work


class PolledFlag(Protocol):
    """A flag that a running llama_decode polls."""

    def set(self) -> None:
        """Ask the running decode to stop."""

    def clear(self) -> None:
        """Let decodes run."""


class AbortGate:
    """Decides from any thread whether the step that runs now has to stop."""

    def __init__(self) -> None:
        self._flag: PolledFlag | None = None  # of the running step, or the last one
        self._is_set = False
        self._lock = RLock()  # a finaliser can stop all where the lock is held
        self._running: Items[Work] = ()  # what the running step computes
        self._unwanted: set[int] = set()  # that the scheduler may not know of yet
        self._stops_all = False

    def enter(self, works: Items[Work], flag: PolledFlag) -> None:
        """A step begins that computes *works* and polls *flag*. Thread: the engine's."""
        with self._lock:
            self._flag, self._running = flag, works  # stop() can come in between
            self._stop_if_unwanted()

    def leave(self) -> None:
        """The step is over. Thread: the engine's."""
        with self._lock:
            self._running = ()
            self._unwanted.clear()
        if self._is_set:  # nobody sets it between steps
            assert self._flag is not None
            self._flag.clear()
            self._is_set = False

    def stop(self, request_id: int | None = None) -> None:
        """See `Executor.stop`. Thread: any."""
        with self._lock:
            if request_id is None:
                self._stops_all = True
            else:
                self._unwanted.add(request_id)
            self._stop_if_unwanted()

    def _stop_if_unwanted(self) -> None:
        """Costs next to nothing unless somebody has left."""
        # Nearly always.
        if not self._running or not (self._stops_all or self._unwanted):
            return
        assert self._flag is not None
        gone = self._unwanted
        if self._stops_all or all(work.request_id in gone for work in self._running):
            self._flag.set()
            self._is_set = True
