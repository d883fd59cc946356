"""Since when requests are there, and since when they wait for a slot."""

from __future__ import annotations

from collections.abc import Sequence

from pyllama_raw.core.request import Finished, Request
from pyllama_raw.core.scheduling.planner import SlotChange
from pyllama_raw.engine.watcher import Watcher


class Waits(Watcher):
    """
    Known as soon as a request is posted, because the engine thread may be stuck.

    Each operation on a dict is atomic, so any thread may ask.
    """

    def __init__(self) -> None:
        self._alive: dict[int, float] = {}
        self._waiting: dict[int, float] = {}

    def post(self, requests: Sequence[Request], now: float) -> None:
        """*requests* wait from now on. Thread: their caller's."""
        for request in requests:
            self._alive[request.request_id] = self._waiting[request.request_id] = now

    def leave(self, request_id: int) -> None:
        """A request has ended or was refused; unknown ids are ignored."""
        self._alive.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def changed(self, change: SlotChange, request_id: int, now: float) -> None:
        """Whoever loses its slot waits anew."""
        if change == "running":
            self._waiting.pop(request_id, None)
        elif request_id in self._alive:
            self._waiting[request_id] = now

    def ended(self, end: Finished) -> None:
        """It waits for nothing any more."""
        self.leave(end.request_id)

    @property
    def oldest(self) -> float | None:
        """When the oldest request came that has not ended."""
        return min(tuple(self._alive.values()), default=None)

    @property
    def oldest_wait(self) -> float | None:
        """Since when the one waits that has waited longest for a slot."""
        return min(tuple(self._waiting.values()), default=None)
