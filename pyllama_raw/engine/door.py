"""The door of an engine: requests are counted when they come in, and once when they go out."""

from __future__ import annotations

from collections import deque
from contextvars import copy_context
from threading import Lock

from pyllama_raw.core.request import Finished, Request
from pyllama_raw.core.scheduling.admission import Admission
from pyllama_raw.core.scheduling.roster import SlotChange
from pyllama_raw.engine.adapters import Adapters
from pyllama_raw.engine.requests import OpenRequest, OpenRequests
from pyllama_raw.engine.stream import Stream
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.errors import PyllamaError

MAX_ENDS = 32  # requests that the pace is taken from


class Door(Watcher):
    """
    Makes the records of requests.

    A request counts and pins its adapters from enter() to leave(), so those that lie in the
    mailbox are bounded like those that wait.

    Args:
        admission: not touched by anybody else.
    """

    def __init__(self, admission: Admission, adapters: Adapters) -> None:
        self.opened = OpenRequests()
        self._admission = admission
        self._adapters = adapters
        self._lock = Lock()  # no other one is taken while it is held

    def enter(
        self, requests: tuple[Request, ...], stream: Stream, now: float
    ) -> tuple[OpenRequest, ...]:
        """
        Open all *requests*, or none of them. Thread: their caller's.

        Raises QueueFull, InvalidRequest, AdapterNotFound.
        """
        pinned, context = self._adapters.pin(requests), copy_context()
        try:
            with self._lock:
                tickets = self._admission.enter(requests)
                opened = tuple(
                    OpenRequest(request, now, stream, context, ticket, adapters, now)
                    for request, ticket, adapters in zip(
                        requests, tickets, pinned, strict=True
                    )
                )
                self.opened.add(opened)
        except PyllamaError:
            for adapters in pinned:
                self._adapters.unpin(adapters)
            raise
        return opened

    def changed(self, change: SlotChange, request_id: int, now: float) -> None:
        """A request that loses its slot waits anew, and counts no second time."""
        opened = self.opened.get(request_id)
        if opened is None:
            return
        opened.waits_since = None if change == "running" else now
        if opened.ticket.n_tokens:
            with self._lock:
                self._admission.seat(opened.ticket)

    def leave(self, opened: OpenRequest) -> None:
        """A request has ended, or was refused; can be repeated. Thread: any."""
        with self._lock:
            self._admission.leave(opened.ticket)
            adapters, opened.adapters = opened.adapters, ()
            self.opened.pop(opened.request.request_id, None)
        self._adapters.unpin(adapters)

    def take_streams(self) -> set[Stream]:
        """The streams of all that are open, which are forgotten. Thread: any, several."""
        with self._lock:
            streams = {opened.stream for opened in self.opened.all()}
            self.opened.clear()
        return streams


class Pace(Watcher):
    """How soon the queue is empty, by how long the last requests had one of *n_slots*."""

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
