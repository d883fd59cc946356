"""
Records of the requests of an engine, from the moment they are posted until they have ended.

The thread of the caller makes it. Each operation on a dict is atomic, so any thread may look a
record up, also while the engine thread is stuck.

Requests whose images and sounds are being encoded are in the waiting room. The scheduler does not
know them yet, so it never sees a span without rows. A request leaves the room for the scheduler in
any case: also if it is to end there at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace

from pyllama_raw.core.request import Request
from pyllama_raw.core.scheduling.admission import Ticket
from pyllama_raw.core.scheduling.roster import Deadlines
from pyllama_raw.core.stats import SchedulerStats
from pyllama_raw.engine.adapters import KnownAdapter
from pyllama_raw.engine.encoder import RequestEncodes
from pyllama_raw.engine.request_log import warms_up
from pyllama_raw.engine.stream import NOBODYS, Stream


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended. What changes belongs to the engine thread, or to a door."""

    request: Request
    submitted: float  # on the engine clock
    stream: Stream = NOBODYS  # where its events go
    context: Context = field(default_factory=copy_context)  # of the caller
    ticket: Ticket = field(default_factory=Ticket)
    adapters: tuple[KnownAdapter, ...] = ()  # that it has pinned
    waits_since: float | None = None  # for a slot; None: it has one
    encodes: RequestEncodes | None = None  # of its images and sounds
    awaits_rows: bool = False  # of these: the scheduler does not know it yet


class OpenRequests(dict[int, OpenRequest]):
    """All that are open, by request_id."""

    def add(self, opened: Iterable[OpenRequest]) -> None:
        """Have *opened*, too."""
        self.update((each.request.request_id, each) for each in opened)

    def all(self) -> list[OpenRequest]:
        """Records of this moment. Thread: any."""
        return list(self.values())

    def warms_up(self, request_id: int) -> bool:
        """Whether a request only warms the engine up."""
        opened = self.get(request_id)
        return opened is not None and warms_up(opened.request.policy_data)

    @property
    def oldest(self) -> float | None:
        """Moment at which the oldest one came; None: there is none."""
        return min((each.submitted for each in self.all()), default=None)

    @property
    def oldest_wait(self) -> float | None:
        """Since when the one waits that has waited longest for a slot."""
        waits = [each.waits_since for each in self.all()]
        return min((since for since in waits if since is not None), default=None)


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
