"""
A stream of the events of an engine and its requests.

The engine waits for no reader: a stream holds so many events, and a reader that is slower is
told how many of the oldest it has lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, cast

from pyllama_raw.api.generation import OneReader
from pyllama_raw.api.model import Owner
from pyllama_raw.core.request import Finished, Request, SlotChange
from pyllama_raw.engine.info import EngineState
from pyllama_raw.engine.mailbox import Stream, wake
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.errors import WrongUse

if TYPE_CHECKING:
    from pyllama_raw.api.session import Sessions


class RequestState(StrEnum):
    """The stage that a request has reached."""

    WAITING = "waiting"
    """It has no slot yet."""
    RUNNING = "running"
    """It has a slot."""
    PREEMPTED = "preempted"
    """It has lost its slot and waits again."""
    ENDED = "ended"
    """This is its last event."""


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A request is in another state."""

    request_id: int
    """Numbers count from 1; each of n outputs has one."""
    state: RequestState
    """The state it is in now."""
    at_s: float
    """The time at which that came, on the engine clock."""
    client: str | None = None
    """The sender of the request; told when it comes."""
    why: str | None = None
    """Once it has ended: the finish reason, or the code of the error."""


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """The engine is in another state; the first event of a stream tells the present one."""

    state: EngineState
    """The state it is in now."""
    at_s: float
    """The time at which that came, on the engine clock."""


@dataclass(frozen=True, slots=True)
class EventsLost:
    """The reader was too slow."""

    n_events: int
    """So many events before the next one are gone."""


Event = RequestEvent | EngineEvent | EventsLost


class _Feed(Stream, Watcher):
    """Takes events in the engine thread; the oldest goes where there is no room."""

    __slots__ = ("_lock", "_numbers", "has_ended")

    def __init__(self, max_events: int) -> None:
        super().__init__()
        self.events = deque[Any](maxlen=max_events)
        self.has_ended = False
        self._numbers = count()
        self._lock = Lock()  # after a reload two engine threads tell

    def came(self, requests: Sequence[Request], submitted: float) -> None:
        for request in requests:
            state = RequestState.WAITING
            self._put(
                RequestEvent(request.request_id, state, submitted, request.client)
            )

    def changed(self, change: SlotChange, request_id: int, now: float) -> None:
        self._put(RequestEvent(request_id, RequestState(change), now))

    def ended(self, request: Request, end: Finished) -> None:  # noqa: ARG002
        at_s = end.timings.finished
        state = RequestState.ENDED
        self._put(RequestEvent(end.request_id, state, at_s, why=end.why))

    def engine(self, state: EngineState, now: float) -> None:
        self.has_ended = state.has_ended
        self._put(EngineEvent(state, now))

    def give_up(self, clock: Callable[[], float], answer: Future[None]) -> None:
        """The engine may have ended before it knew of this."""
        if answer.exception() is not None:
            self.engine(EngineState.CLOSED, clock())

    def _put(self, event: Event) -> None:
        events = cast("deque[Any]", self.events)
        with self._lock:
            events.append((next(self._numbers), event))
        if len(events) <= 1:  # else the reader has not seen those before
            wake(self.loop, (self,))


class Events(Owner):
    """
    Use it as `async with engine.events() as events`, then `async for event in events`.

    It begins with the state of the engine, and ends with that in which the engine has ended.
    """

    def __init__(self, sessions: Sessions, max_events: int) -> None:
        self._sessions = sessions
        self._max_events = max_events
        self._feed: _Feed | None = None
        self._next = 0  # number of the event that is read next
        self._after_loss: Event | None = None  # what comes after an EventsLost
        self._reading = OneReader("stream of events")

    async def __aenter__(self) -> Self:
        feed = self._feed = _Feed(self._max_events)
        beginning = self._sessions.watch(feed)
        clock = self._sessions.current.thread.clock
        beginning.add_done_callback(partial(feed.give_up, clock))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Hear of nothing any more; what the end of the block does."""
        if self._feed is not None:
            self._sessions.unwatch(self._feed)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        feed, event = self._feed, self._after_loss
        if feed is None:
            raise WrongUse("use `async with engine.events() as events` first")
        if event is not None:
            self._after_loss = None
            return event
        if feed.has_ended and not feed.events:
            raise StopAsyncIteration
        with self._reading:
            await feed.wait()
        number, event = cast("deque[Any]", feed.events).popleft()
        n_lost, self._next = number - self._next, number + 1
        if n_lost:
            self._after_loss = event
            return EventsLost(n_lost)
        return cast("Event", event)
