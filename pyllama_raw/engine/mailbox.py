"""
Commands from any thread to the engine thread: functions, in the order they were posted.

The threads that engines run in must not wait for an engine. Hooks of policies, watchers and step
logs run there. What they wait for comes when they have returned, or when another such thread has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Event, Lock, Thread, current_thread
from typing import Any

from pyllama_raw.errors import WrongUse

LINGER_S = 5e-4  # silence that ends a burst
BURST_S = 1e-2  # longest wait for its end

Command = Callable[[], object]

# Set in an errand that takes long, once nobody waits for its answer any more.
CALLER_LEFT: ContextVar[Event | None] = ContextVar("CALLER_LEFT", default=None)


class OwnThread(Thread):
    """Runs an engine."""


def check_may_wait() -> None:
    """Raise WrongUse in the thread of an engine."""
    if isinstance(current_thread(), OwnThread):
        raise WrongUse(
            "a hook, a watcher or a step log called an engine, which would wait for its "
            "return for ever: let another thread call"
        )


@dataclass(frozen=True, slots=True)
class Errand:
    """A function whose answer somebody waits for."""

    function: Callable[[], Any]
    answer: Future[Any] = field(default_factory=Future)

    def __call__(self) -> None:
        """Run the function, unless whoever asked has left."""
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            result = self.function()
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.answer.set_exception(error)
        else:
            self.answer.set_result(result)

    def refuse(self, error: BaseException) -> None:
        """Answer by *error*, unless there is an answer or nobody waits for it."""
        if not self.answer.done() and self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


class Mailbox:
    """
    Many writers, one reader.

    post() may interrupt itself, so finalisers can post, whatever they interrupted.

    A lock is the bell, because `SimpleQueue.get(timeout=...)` of CPython can wait for ever: it
    does if its time is over before the wait begins, as in a thread that lost its CPU.

    Args:
        n_enough: a burst of that many commands is not waited for any longer.
        clock: says when a burst has been waited for long enough.
    """

    def __init__(self, n_enough: int, clock: Callable[[], float]) -> None:
        self._n_enough = n_enough
        self._clock = clock
        self._posted: deque[Command] = deque()
        self._current: deque[Command] = deque()
        self._bell = Lock()  # free: it has rung since the reader last heard it
        self._coming = set[object]()  # one operation on a set cannot be interrupted

    def post(self, command: Command) -> None:
        try:
            self._posted.append(command)
        finally:  # an interrupt after the one is followed by the other
            try:  # noqa: SIM105 - suppress() could be interrupted before
                self._bell.release()
            except RuntimeError:  # it has rung, and the reader will look
                pass

    @contextmanager
    def coming(self) -> Iterator[None]:
        """While a command is being prepared, a burst does not end."""
        ticket = object()
        self._coming.add(ticket)
        try:
            yield
        finally:
            self._coming.discard(ticket)

    def take(self, timeout_s: float | None = 0.0) -> deque[Command]:
        """
        All commands there are; waits for the first one (None: for ever).

        One that had to be waited for is often the first of a burst, of which a step
        that began at once would get one request: so the others are waited for, too.

        Returns:
            Always the same deque. The reader removes a command once it is obeyed, so
            those it does not come to are found by rest().
        """
        # The engine was idle: the first command may be the first of many.
        if timeout_s != 0.0 and self._hears_one(timeout_s):
            self._await_burst()
        for _ in range(len(self._posted)):
            self._current.append(self._posted.popleft())
        return self._current

    def rest(self) -> Iterator[Command]:
        """Remove what was not obeyed, when the reader is gone. Thread: any, several."""
        for commands in (self._current, self._posted):
            with suppress(IndexError):
                while True:
                    yield commands.popleft()

    def _hears_one(self, timeout_s: float | None) -> bool:
        """Whether there is a command, within *timeout_s*."""
        # A lock waits for ever if it is told -1.
        wait_s = -1 if timeout_s is None else timeout_s
        while not self._posted:  # the bell may have rung for what was taken
            if not self._bell.acquire(timeout=wait_s):
                break
        return bool(self._posted)

    def _await_burst(self) -> None:
        # Until nothing comes for a while, and nobody prepares a request.
        end = self._clock() + BURST_S
        while len(self._posted) < self._n_enough and self._clock() < end:
            if not (self._bell.acquire(timeout=LINGER_S) or self._coming):
                return
