"""
The waiting room: requests whose images and sounds are being encoded.

The scheduler does not know them yet, so it never sees a span without rows. A request leaves
the room for the scheduler in any case: also if it is to end there at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pyllama_raw.core.scheduling.deadlines import Deadlines
from pyllama_raw.core.stats import SchedulerStats
from pyllama_raw.engine.requests import OpenRequest


class WaitingRoom:
    """Requests of one engine that wait for rows. The engine thread owns it."""

    def __init__(self) -> None:
        self._waiting: dict[int, OpenRequest] = {}  # by request_id
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, opened: Iterable[OpenRequest]) -> None:
        """Keep *opened*."""
        for each in opened:
            request = each.request
            self._waiting[request.request_id] = each
            if request.deadline is not None:
                self._deadlines.add(request.deadline, request.request_id)

    def take(self, request_id: int) -> OpenRequest | None:
        """Take a request out; None: it is not here."""
        return self._waiting.pop(request_id, None)

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a request that waits here."""
        return self._deadlines.next(self._waiting)

    def expired(self, now: float) -> Iterator[int]:
        """Ids of requests whose deadline is not after *now*; some may have left."""
        return self._deadlines.expired(now)

    def counted(self, stats: SchedulerStats) -> SchedulerStats:
        """*stats* of the scheduler, with the requests that wait here."""
        if not self._waiting:
            return stats
        n_tokens = sum(each.request.n_prompt for each in self._waiting.values())
        return replace(
            stats,
            submitted=stats.submitted + len(self),
            waiting=stats.waiting + len(self),
            waiting_tokens=stats.waiting_tokens + n_tokens,
        )
