"""
Events of one request, on their way from the engine thread to its reader.

The engine thread appends and never waits; `deque.append` is atomic. The reader's event
loop is woken once a step for all its streams. A slow reader finds everything that
happened since in one piece, unless an output that outgrows its slot is not read at all.

To wake a loop is a system call, in which the engine thread gives the GIL away. Usually the
next step is being computed meanwhile (ARCHITECTURE.md, Steps ahead).
"""

from __future__ import annotations

import sys
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.lowlevel import checkpoint_if_cancelled, current_token

from pyllama_raw.core.request import Event
from pyllama_raw.errors import PyllamaError, WrongUse


@dataclass(frozen=True, slots=True)
class Refused:
    """The last event of a request that never reached the scheduler, or lost it."""

    error: PyllamaError


class OneReader:
    """A `with` block for one task at a time; another one would take a part of what comes."""

    __slots__ = ("_is_in", "_subject")

    def __init__(self, subject: str) -> None:
        self._is_in = False
        self._subject = subject

    def __enter__(self) -> None:
        if self._is_in:
            raise WrongUse(
                f"another task reads this {self._subject}: let one task read it, and hand on "
                "what it reads"
            )
        self._is_in = True

    def __exit__(self, *_: object) -> None:
        self._is_in = False


class Stream:
    """A buffer with one writer, the engine thread, and one reader, a task of `loop`."""

    __slots__ = ("_arrival", "eager", "events", "loop", "max_events")

    def __init__(self, loop: object = None) -> None:
        self.loop = loop or current_token().native_token
        self.eager = True  # False: the reader wants to be woken at the end only
        self.events: deque[Event | Refused] = deque()
        self.max_events = sys.maxsize  # that may be unread
        self._arrival: anyio.Event | Future[None] | None = None

    async def wait(self) -> None:
        """Return when there are events; a checkpoint in any case."""
        if self.events:
            await checkpoint_if_cancelled()
        while not self.events:
            if isinstance(self.loop, AbstractEventLoop):
                # What an anyio.Event would wait for, in half the time.
                self._arrival = self.loop.create_future()
                await self._arrival
            else:
                self._arrival = anyio.Event()
                await self._arrival.wait()

    def notify(self) -> None:
        """Wake the reader. Thread: the event loop's only."""
        arrival = self._arrival
        # trio.
        if isinstance(arrival, anyio.Event):
            arrival.set()
        elif arrival is not None and not arrival.done():
            arrival.set_result(None)


def wake(loop: Any, streams: Iterable[Stream]) -> bool:
    """
    Notify *streams* inside *loop*; False if that loop is closed.

    Args:
        loop: an asyncio event loop or a TrioToken.
        streams: all of that loop that have new events; must not change afterwards.
    """
    # asyncio, or trio.
    post = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon
    try:
        post(_notify, streams)
    except Exception:  # noqa: BLE001 - RuntimeError if it is closed; others await theirs
        return False
    return True


def _notify(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.notify()


class _Nobody:
    """The event loop of a stream that no task reads."""

    def call_soon_threadsafe(self, *_: object) -> None:
        """There is nobody to wake."""


NOBODYS = Stream(_Nobody())
NOBODYS.events = deque(maxlen=0)  # what comes is dropped
