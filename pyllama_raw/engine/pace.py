"""The pace of an engine: how soon its queue is empty, by the requests that ended last."""

from __future__ import annotations

from collections import deque

from pyllama_raw.core.request import Finished, Request
from pyllama_raw.engine.requests import OpenRequests
from pyllama_raw.engine.watcher import Watcher

MAX_ENDS = 32  # requests that the pace is taken from


class Pace(Watcher):
    """Notes how long requests had one of *n_slots*. Any thread may ask."""

    def __init__(self, opened: OpenRequests, n_slots: int) -> None:
        self._opened, self._n_slots = opened, n_slots
        self._held_s: deque[float] = deque(maxlen=MAX_ENDS)

    def ended(self, request: Request, end: Finished) -> None:  # noqa: ARG002
        """Note one that had a slot."""
        if end.timings.admitted is not None:
            self._held_s.append(end.timings.finished - end.timings.admitted)

    @property
    def queue_s(self) -> float | None:
        """
        Seconds until a request that comes now has a slot, as an estimate.

        It is 0 while a slot is free, and None before any request has ended.
        """
        n_open = len(self._opened)
        if n_open < self._n_slots:
            return 0.0
        held_s = tuple(self._held_s)
        if not held_s:
            return None
        n_waiting = sum(each.waits_since is not None for each in self._opened.all())
        n_running = max(n_open - n_waiting, 1)  # fewer than slots if cells are scarce
        return (n_waiting + 1) * sum(held_s) / len(held_s) / n_running
