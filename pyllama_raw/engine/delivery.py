"""
From events of the scheduler to the streams that wait for them.

Rule: every stream that was opened ends, with a `Finished` event for each of its requests
or with one `Refused`. All of it belongs to the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pyllama_raw.core.request import Event, Finished, Request
from pyllama_raw.engine.stream import Refused, Stream
from pyllama_raw.engine.wakeup import wake
from pyllama_raw.errors import PyllamaError


class Delivery:
    """
    The open streams, and which request each event belongs to.

    Args:
        ended: called with the id of a request before its reader can know of the end.
        lost: called with an event loop that is closed.
    """

    def __init__(
        self,
        ended: Callable[[int], None],
        lost: Callable[[object], None],
    ) -> None:
        self._ended = ended
        self._streams: dict[int, Stream] = {}  # by request_id
        self._lost = lost

    @property
    def request_ids(self) -> list[int]:
        return list(self._streams)

    def open(self, requests: Iterable[Request], stream: Stream) -> None:
        self._streams.update((request.request_id, stream) for request in requests)

    def stream_of(self, request_id: int) -> Stream | None:
        return self._streams.get(request_id)

    def ids_of(self, stream: Stream) -> list[int]:
        return [i for i, other in self._streams.items() if other is stream]

    def ids_on(self, loop: object) -> list[int]:
        """Requests whose readers are tasks of *loop*."""
        return [i for i, stream in self._streams.items() if stream.loop is loop]

    def deliver(self, events: list[Event]) -> None:
        """One pass over the events, one wake-up for each event loop."""
        streams = self._streams
        woken: dict[object, list[Stream]] = {}
        for event in events:
            stream = streams[event.request_id]
            if type(event) is Finished:
                del streams[event.request_id]
                self._ended(event.request_id)
            elif not stream.eager:
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

    def disown(self, request_ids: Iterable[int]) -> None:
        """What still comes of requests that are in the scheduler is nobody's."""
        for request_id in request_ids:
            self._streams[request_id] = Stream(_NOBODY)

    def forget(self, request_id: int) -> None:
        """Nothing will come of this request."""
        self._streams.pop(request_id, None)

    def refuse_all(self, why: Callable[[], PyllamaError]) -> None:
        """End every stream."""
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            refuse(stream, why())


def refuse(stream: Stream, error: PyllamaError) -> None:
    """End *stream*. Thread: any."""
    stream.events.append(Refused(error))
    wake(stream.loop, (stream,))


class _Nobody:
    """The event loop of streams that no task reads."""

    def call_soon_threadsafe(self, *_: object) -> None:
        """There is nobody to wake."""


_NOBODY = _Nobody()
