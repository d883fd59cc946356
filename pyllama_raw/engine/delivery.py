"""
From events of the scheduler to the streams that wait for them.

Rule: every stream that was opened ends, with a `Finished` event for each of its requests
or with one `Refused`. All of it belongs to the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable

from pyllama_raw.core.request import Event, Finished
from pyllama_raw.engine.requests import OpenRequest, OpenRequests
from pyllama_raw.engine.stream import NOBODYS, Refused, Stream, wake
from pyllama_raw.errors import PyllamaError


class Delivery:
    """
    Knows which stream each event belongs to.

    Args:
        ended: called with a request before its reader can know of the end.
        lost: called with an event loop that is closed.
        unread: called with a stream that holds more than it may.
    """

    def __init__(
        self,
        opened: OpenRequests,
        ended: Callable[[OpenRequest], None],
        lost: Callable[[object], None],
        unread: Callable[[Stream], None],
    ) -> None:
        self._opened = opened
        self._ended = ended
        self._lost = lost
        self._unread = unread

    def deliver(self, events: list[Event]) -> None:
        """One pass over the events, one wake-up for each event loop."""
        all_opened = self._opened
        woken: dict[object, list[Stream]] = {}
        for event in events:
            opened = all_opened[event.request_id]
            stream = opened.stream
            n_unread = len(stream.events)
            if type(event) is Finished:
                self._ended(opened)
            elif n_unread >= stream.max_events:
                self._unread(stream)
            elif not stream.eager and n_unread < stream.max_events // 2:
                stream.events.append(event)
                continue
            stream.events.append(event)
            ready = woken.get(stream.loop)
            if ready is None:
                woken[stream.loop] = [stream]
            else:
                ready.append(stream)
        for loop, ready in woken.items():
            if not wake(loop, ready):
                self._lost(loop)

    def disown(self, stream: Stream) -> None:
        """Drop what still comes of its requests."""
        for opened in self._opened.all():
            if opened.stream is stream:
                opened.stream = NOBODYS


def refuse(stream: Stream, error: PyllamaError) -> None:
    """End *stream*. Thread: any."""
    stream.events.append(Refused(error))
    wake(stream.loop, (stream,))
