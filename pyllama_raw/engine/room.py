"""
The waiting room: requests whose images and sounds are being encoded.

The scheduler does not know them yet, so it never sees a span without rows. A request leaves
the room for the scheduler in any case: also if it is to end there at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pyllama_raw.core.request import Request
from pyllama_raw.core.scheduling.deadlines import Deadlines
from pyllama_raw.core.stats import SchedulerStats
from pyllama_raw.engine.mailbox import Submit


class WaitingRoom:
    """Requests of one engine that wait for rows. The engine thread owns it."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Request, Submit]] = {}  # by request_id
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, command: Submit) -> None:
        """Keep the requests of *command*."""
        for request in command.requests:
            self._waiting[request.request_id] = request, command
            if request.deadline is not None:
                self._deadlines.add(request.deadline, request.request_id)

    def take(self, request_id: int) -> tuple[Request, Submit] | None:
        """Take a request out, with the command that brought it; None: it is not here."""
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
        n_tokens = sum(request.n_prompt for request, _ in self._waiting.values())
        return replace(
            stats,
            submitted=stats.submitted + len(self),
            waiting=stats.waiting + len(self),
            waiting_tokens=stats.waiting_tokens + n_tokens,
        )
