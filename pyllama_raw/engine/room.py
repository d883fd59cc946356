"""
The waiting room: requests whose images and sounds are being encoded.

The scheduler does not know them yet, so it never sees a span without rows. A request leaves
the room for the scheduler in any case: also if it is to end there at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pyllama_raw.core.request import Request
from pyllama_raw.core.scheduling.deadlines import Deadlines
from pyllama_raw.core.stats import SchedulerStats
from pyllama_raw.engine.requests import OpenRequest, OpenRequests


class WaitingRoom:
    """Requests of *opened* that wait for rows. The engine thread owns it."""

    def __init__(self, opened: OpenRequests) -> None:
        self._opened = opened
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def _waiting(self) -> list[Request]:
        return [each.request for each in self._opened.all() if each.awaits_rows]

    def put(self, opened: Iterable[OpenRequest]) -> None:
        """Keep *opened*."""
        for each in opened:
            each.awaits_rows = True
            request = each.request
            for moment in request.time_limits(each.submitted):
                self._deadlines.add(moment, request.request_id)

    def take(self, request_id: int) -> OpenRequest | None:
        """Take a request out; None: it is not here."""
        opened = self._opened.get(request_id)
        if opened is None or not opened.awaits_rows:
            return None
        opened.awaits_rows = False
        return opened

    @property
    def next_deadline(self) -> float | None:
        """The earliest moment at which time may be over for a request that waits here."""
        return self._deadlines.next({each.request_id for each in self._waiting})

    def expired(self, now: float) -> Iterator[int]:
        """Ids of requests whose time may be over at *now*; some may have left."""
        return self._deadlines.expired(now)

    def counted(self, stats: SchedulerStats) -> SchedulerStats:
        """*stats* of the scheduler, with the requests that wait here."""
        waiting = self._waiting
        n_tokens = sum(request.n_prompt for request in waiting)
        return replace(
            stats,
            submitted=stats.submitted + len(waiting),
            waiting=stats.waiting + len(waiting),
            waiting_tokens=stats.waiting_tokens + n_tokens,
        )
