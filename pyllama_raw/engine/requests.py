"""
Records of the requests of an engine, from the moment they are posted until they have ended.

The thread of the caller makes it. Each operation on a dict is atomic, so any thread may look a
record up, also while the engine thread is stuck.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from pyllama_raw.core.request import Request
from pyllama_raw.core.scheduling.admission import Ticket
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
