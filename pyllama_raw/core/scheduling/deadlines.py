"""Moments at which time may be over for requests that have not ended, earliest first."""

from __future__ import annotations

from collections.abc import Container, Iterator
from heapq import heappop, heappush


class Deadlines:
    """A heap with lazy removal: requests that ended are skipped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, deadline: float, request_id: int) -> None:
        heappush(self._heap, (deadline, request_id))

    def next(self, alive: Container[int]) -> float | None:
        """The earliest moment of a request in *alive*."""
        while self._heap and self._heap[0][1] not in alive:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> Iterator[int]:
        """Take out the ids whose moment is not after *now*."""
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[1]
