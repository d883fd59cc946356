"""Streams read without an event loop, and steps that wait for the test."""

from __future__ import annotations

import time
from dataclasses import replace
from threading import Event, Semaphore

from pyllama_raw.core.request import Finished
from pyllama_raw.core.step import StepPlan
from pyllama_raw.engine.mailbox import Refused, Stream
from pyllama_raw.engine.thread import EngineThread
from pyllama_raw.testing import FakeExecutor, fake_parts
from tests.support.limits import LIMIT_S

HANG_S = LIMIT_S  # a test that waits longer has failed


class PlainLoop:
    """Stands for an event loop: callbacks run at once, in the engine thread."""

    def __init__(self) -> None:
        self.closed = False
        self.calls: list[int] = []  # how many streams each wake-up was for

    def call_soon_threadsafe(self, function, streams) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(len(list(streams)))
        function(streams)


class PlainStream(Stream):
    """Can be waited for by a thread."""

    __slots__ = ("_news",)

    def __init__(self, loop: object) -> None:
        super().__init__(loop)
        self._news = Event()

    def notify(self) -> None:
        self._news.set()

    def read_to_end(self) -> list:
        """All events; the last one is Finished or Refused."""
        events: list = []
        while not (events and isinstance(events[-1], Finished | Refused)):
            assert self._news.wait(HANG_S)
            self._news.clear()
            while self.events:
                events.append(self.events.popleft())
        return events


class HeldSteps:
    """As on_step of a FakeExecutor: each step waits until the test allows it."""

    def __init__(self) -> None:
        self._entered = Semaphore(0)
        self._allowed = Semaphore(0)

    def __call__(self, step: int, plan: StepPlan) -> None:
        self._entered.release()
        assert self._allowed.acquire(timeout=HANG_S)

    def wait_for_one(self) -> None:
        assert self._entered.acquire(timeout=HANG_S)

    def allow(self, n_steps: int = 1) -> None:
        for _ in range(n_steps):
            self._allowed.release()


def make_thread(
    executor: FakeExecutor | None = None,
    *,
    clock=time.monotonic,
    files=None,
    **options,
) -> EngineThread:
    parts = replace(fake_parts(executor, **options), files=files)
    return EngineThread(parts, clock=clock)
