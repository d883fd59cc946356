"""
The engine thread, as other threads see it: they post commands, and events go to streams.

Rules:
1. This thread alone touches the scheduler and the executor (loop.py). Others post commands.
2. It never waits for a reader or an event loop.
3. Every stream it was given ends: with `Finished` events, or, if the thread is gone,
   with a `Refused`. The flag `_ended` is set before the last look into the mailbox and
   read after every post, so that no command is lost between the two.
4. One that was never closed ends before the interpreter does: a daemon thread inside C while
   Python is taken down can crash the process, and a thread that is joined too early can hang
   it; `atexit` runs between the two.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from logging import getLogger
from threading import current_thread
from typing import TypeVar
from weakref import WeakSet

from pyllama_raw.core.request import Request
from pyllama_raw.core.stats import SchedulerStats
from pyllama_raw.engine.adapters import Adapters
from pyllama_raw.engine.delivery import refuse
from pyllama_raw.engine.door import Door
from pyllama_raw.engine.engine_state import EngineState
from pyllama_raw.engine.loop import EngineLoop
from pyllama_raw.engine.mailbox import (
    Command,
    Errand,
    Mailbox,
    OwnThread,
    check_may_wait,
)
from pyllama_raw.engine.parts import EngineParts
from pyllama_raw.engine.stream import Stream
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.errors import ClosedError, EngineStopped, PyllamaError

T = TypeVar("T")

JOIN_S = 30.0  # longer than any step that cannot be aborted should take
MAX_UNREAD = 2**16  # events of outputs that can outgrow their slots, or what slots hold

_log = getLogger(__name__)


class EngineThread:
    """Runs requests on the parts of an engine until close()."""

    def __init__(
        self,
        parts: EngineParts,
        before_release: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            before_release: called once, by the thread, when no step can follow and before
                the parts are released.
        """
        self._parts = parts
        self.clock = clock  # seconds, as deadlines count them
        self._before_release = before_release
        self.adapters = Adapters(parts.adapter_host, parts.max_adapter_bytes)
        self.adapters.post = self._post_call
        n_slots = parts.scheduler.limits.n_slots
        self._mailbox = Mailbox(n_slots, clock)
        # Around the making of requests: an idle engine begins with all that come.
        self.coming = self._mailbox.coming
        self._door = Door(parts.admission, self.adapters)
        self.opened = self._door.opened  # requests that have not ended
        # The one thing of it that other threads may change is `is_replaced`.
        self.loop = EngineLoop(parts, self._mailbox, self._door, clock)
        if parts.media is not None:
            parts.media.encoder.report = lambda id_: self._post(
                partial(self.loop.note_encoded, id_)
            )
        if parts.files is not None:
            parts.files.report = lambda report: self._post(
                partial(self.loop.take_report, report)
            )
        self.has_begun = False  # to take commands
        self.error: BaseException | None = None  # has ended it, or came at the end
        self.gone: Future[None] = Future()  # answered when everything is freed
        # Whether others go on in place of this thread, which has ended by an error.
        self.is_survived: Callable[[BaseException], bool] = lambda _: False
        self._refuses = False  # new requests, because close() was called
        self._ended = False
        self._pid = os.getpid()
        self._thread = OwnThread(target=self._run, name="pyllama-engine", daemon=True)
        self._thread.start()
        # The newest is called first: before the finalisers of what the thread uses.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        _threads.add(self)

    @property
    def stats(self) -> SchedulerStats:
        """Exact when a request has ended."""
        return self.loop.stats

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return not self._refuses and self._is_running

    @property
    def state(self) -> EngineState:
        """What the engine does now."""
        if self._is_running:
            return EngineState.CLOSING if self._refuses else self.loop.state
        return EngineState.CLOSED if self.error is None else EngineState.ERROR

    def quiet(self) -> Future[None]:
        """Answered when no request runs."""
        quiet = Future[None]()
        self.call(partial(self.loop.when_quiet, quiet))
        return quiet

    @property
    def _is_running(self) -> bool:
        return not self._ended and self.is_ours

    def submit_all(
        self, requests: tuple[Request, ...], stream: Stream, waited_s: float = 0.0
    ) -> None:
        """
        Queue all *requests* or none; events, or once a later refusal, go to *stream*.

        Args:
            waited_s: seconds that their caller has waited for this thread.

        Raises:
            QueueFull: no slot is free, and too much waits; told without a wait, because
                requests are counted here and not by the engine thread.
            InvalidRequest: these are more than an idle engine takes.
            PromptTooLong, BadMedia: a prompt with images or sounds does not fit the context.
            ClosedError, EngineStopped.
        """
        self.check()
        n_slot = self._parts.scheduler.limits.n_ctx_slot
        if any(request.max_tokens > n_slot for request in requests):
            stream.max_events = max(n_slot * len(requests), MAX_UNREAD)
        try:
            opened = self._door.enter(requests, stream, self.clock() - waited_s)
        except PyllamaError as error:
            _log.info("requests were refused: %s", error)
            raise
        try:
            if self._parts.media is not None:
                for request in requests:  # before anything is encoded
                    self._parts.scheduler.limits.check(request)
                self._parts.media.enter(opened)
            self._post(partial(self.loop.submit, opened))
        except BaseException:
            for each in opened:
                self.loop.leave(each)
            raise

    def cancel(self, request_id: int) -> None:
        """End a request within the running step; safe to call twice or too late."""
        if self._is_running:
            self.loop.driver.executor.stop(request_id)
            self._post(partial(self.loop.cancel, request_id))

    def forget(self, request_id: int) -> None:
        """Like cancel(), without a lock: for finalisers."""
        if self._is_running:
            self._mailbox.post(partial(self.loop.cancel, request_id))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run *function* between two steps, in the engine thread; any other may call."""
        self.check_for_waiting()
        return self._post_call(function)

    def watch(self, watcher: Watcher) -> Future[None]:
        """Tell *watcher* what happens from the next command on; of the end in any case."""
        return self.call(partial(self.loop.watch, watcher))

    def unwatch(self, watcher: Watcher) -> None:
        """Tell it nothing any more, soon; can be repeated."""
        if self._is_running:
            self._mailbox.post(partial(self.loop.driver.watchers.discard, watcher))

    def close(self, *, drains: bool = False) -> None:
        """
        Refuse new requests, end all others and the thread; does not wait.

        Args:
            drains: the others are done first. A later close() without it ends them.
        """
        if not self._is_running or (drains and self._refuses):
            return
        self._refuses = True
        if not drains:
            self.loop.driver.executor.stop()
        self._post(partial(self.loop.close_after, drains=drains))

    @property
    def is_ours(self) -> bool:
        """Whether it runs in this process; a fork has none of its threads."""
        return self._pid == os.getpid()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is freed; False if that took too long."""
        if not self.is_ours or current_thread() is self._thread:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise EngineStopped, or ClosedError, if no request can be taken."""
        if not self.is_ours:
            raise ClosedError(
                "the engine belongs to the parent process: open one after the fork"
            )
        if not self.alive:
            raise self._why_ended()

    def check_for_waiting(self) -> None:
        """As check() for a caller that waits for the engine: WrongUse in the thread of one."""
        check_may_wait()
        self.check()

    def _post_call(self, function: Callable[[], T]) -> Future[T]:
        call = Errand(function)
        self._post(call)
        return call.answer

    def _post(self, command: Command) -> None:
        self._mailbox.post(command)
        if self._ended:
            self._refuse_rest()

    def _why_ended(self) -> PyllamaError:
        if self.error is None:
            return ClosedError("the engine is closed")
        error = EngineStopped(f"the engine thread has ended: {self.error!r}")
        error.__cause__ = self.error
        return error

    def _refuse_rest(self) -> None:
        """Answer what nobody will obey."""
        self._refuse_streams()
        for command in self._mailbox.rest():
            if isinstance(command, Errand):
                command.refuse(self._why_ended())

    def _refuse_streams(self) -> None:
        for stream in self._door.take_streams():
            refuse(stream, self._why_ended())

    def _run(self) -> None:
        self.has_begun = True
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001 - readers are told why
            self.error = error
            self.loop.is_replaced |= self.is_survived(error)
        self._ended = True
        self.loop.close()
        self._refuse_streams()
        self.loop.tell_watchers(self.state)
        self._refuse_rest()
        try:
            with closing(self._parts.logs):
                self._before_release()
                self._parts.release()
        except BaseException as error:  # noqa: BLE001 - the next caller is told
            self.error = self.error or error
        self.gone.set_result(None)


_threads = WeakSet[EngineThread]()


def _close_all() -> None:
    threads = list(_threads)
    for thread in threads:
        thread.close()
    for thread in threads:
        thread.join(JOIN_S)
