"""The door of an engine: requests are counted when they come in, and once when they go out."""

from __future__ import annotations

from contextvars import copy_context
from threading import Lock

from pyllama_raw.core.request import Request
from pyllama_raw.core.scheduling.admission import Admission
from pyllama_raw.core.scheduling.slot_change import SlotChange
from pyllama_raw.engine.adapters import Adapters
from pyllama_raw.engine.requests import OpenRequest, OpenRequests
from pyllama_raw.engine.stream import Stream
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.errors import PyllamaError


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
