"""
The engine thread: take commands, drive a step, hand out its events.

Rules:
1. This thread alone touches the scheduler and the executor. Others post commands.
2. It never waits for a reader or an event loop.
3. A command that raises ends what it was about, and nothing else. An exception of a step
   ends the thread.
4. Every stream it was given ends: with `Finished` events, or, if the thread is gone,
   with a `Refused`. The flag `_ended` is set before the last look into the mailbox and
   read after every post, so that no command is lost between the two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from logging import getLogger
from threading import Thread, current_thread
from typing import TYPE_CHECKING, TypeVar

from pyllama_raw.core.admission import Admission
from pyllama_raw.core.planner import Planner
from pyllama_raw.core.request import Event, FinishReason, Request
from pyllama_raw.core.stats import SchedulerStats
from pyllama_raw.core.step import Executor, Fetched, Written
from pyllama_raw.engine.adapters import Adapters
from pyllama_raw.engine.delivery import Delivery, refuse
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.logs import Logs
from pyllama_raw.engine.mailbox import (
    Call,
    Cancel,
    Close,
    Command,
    Encoded,
    Mailbox,
    Submit,
)
from pyllama_raw.engine.parts import FileWriter
from pyllama_raw.engine.stream import Stream
from pyllama_raw.engine.telling import Teller
from pyllama_raw.engine.waits import Waits
from pyllama_raw.engine.watcher import EngineChange, Watcher
from pyllama_raw.errors import ClosedError, EngineFault, EngineStopped, PyllamaError

if TYPE_CHECKING:
    from pyllama_raw.engine.media_desk import MediaDesk

T = TypeVar("T")

STATS_S = 0.25  # statistics of running requests are at most this old, and one call

_log = getLogger(__name__)


class EngineThread:
    """Runs requests on one scheduler and one executor until close()."""

    def __init__(
        self,
        scheduler: Planner,
        executor: Executor,
        *,
        admission: Admission | None = None,
        files: FileWriter | None = None,
        logs: Logs | None = None,
        media: MediaDesk | None = None,
        adapters: Adapters | None = None,
        release: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            admission: whom to take on; None: the default number beyond the slots.
            files: what the executor hands files to; None: it writes none.
            logs: what is written down of steps and requests; None: nothing.
            media: encodes images and sounds; None: prompts are text.
            adapters: what requests may name; None: none.
            release: frees what the executor stands on; called once, by the thread, when
                no step can follow.
        """
        logs = logs or Logs()
        self.waits = Waits()
        self._has_begun = False
        self._driver = Driver(
            scheduler,
            executor,
            clock,
            self._deliver,
            log=logs.steps,
            watchers=(self.waits, *logs.watchers),
        )
        self.stats: SchedulerStats = scheduler.stats()  # exact when a request has ended
        self._told = 0.0  # when stats was taken
        self._teller = Teller()
        self._release = release
        self._files = files
        if files is not None:
            files.report = self._post
        self._media = media
        if media is not None:
            media.encoder.report = lambda request_id: self._post(Encoded(request_id))
        n_slots = scheduler.limits.n_slots
        self.adapters = adapters or Adapters()
        self.adapters.post = self._post_call
        self._mailbox = Mailbox(
            n_slots, admission or Admission(n_slots), clock, self.adapters
        )
        self._refuses = False  # new requests, because close() was called
        self._close: Close | None = None  # the last one that was obeyed
        self._ended = False
        self._cause: BaseException | None = None
        self._pid = os.getpid()
        self._delivery = Delivery(self._leave, self._lose)
        self._thread = Thread(target=self._run, name="pyllama-engine", daemon=True)
        self._thread.start()

    # -- any thread -------------------------------------------------------------

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds, as deadlines count them."""
        return self._driver.clock

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return not self._refuses and self._is_running

    @property
    def error(self) -> BaseException | None:
        """What has ended the thread, or failed when all was freed."""
        return self._cause

    @property
    def closing(self) -> bool:
        """Whether close() was called and the thread has not ended."""
        return self._refuses and self._is_running

    @property
    def _is_running(self) -> bool:
        return not self._ended and self._pid == os.getpid()

    def coming(self) -> AbstractContextManager[None]:
        """Around the making of requests: an idle engine begins with all that come."""
        return self._mailbox.coming()

    def submit_all(self, requests: tuple[Request, ...], stream: Stream) -> None:
        """
        Queue all *requests* or none; events, or once a later refusal, go to *stream*.

        Raises:
            QueueFull: no slot is free, and too much waits; told without a wait, because
                requests are counted here and not by the engine thread.
            InvalidRequest: these are more than an idle engine takes.
            ClosedError, EngineStopped.
        """
        self.check()
        try:
            self._mailbox.enter(requests)
        except PyllamaError as error:
            _log.info("requests were refused: %s", error)
            raise
        try:
            if self._media is not None:
                self._media.enter(requests)
            now = self.clock()
            self.waits.post(requests, now)
            self._post(Submit(requests, stream, now))
        except BaseException:
            for request in requests:
                self._leave(request.request_id)
            raise

    def cancel(self, request_id: int) -> None:
        """End a request within the running step; safe to call twice or too late."""
        if self._is_running:
            self._driver.executor.stop(request_id)
            self._post(Cancel(request_id))

    def forget(self, request_id: int) -> None:
        """Like cancel(), without a lock: for finalisers."""
        if self._is_running:
            self._mailbox.post(Cancel(request_id))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run *function* between two steps, in the engine thread."""
        self.check()
        return self._post_call(function)

    def watch(self, watcher: Watcher) -> Future[None]:
        """Tell *watcher* what happens from the next command on; of the end in any case."""
        return self.call(partial(self._watch, watcher))

    def unwatch(self, watcher: Watcher) -> None:
        """Tell it nothing any more, soon; can be repeated."""
        if self._is_running:
            discard = partial(self._driver.watchers.discard, watcher)
            self._mailbox.post(Call(discard, Future()))

    @property
    def last_step_at(self) -> float | None:
        """When the result of the last step was taken in; None: there was no step."""
        return self._driver.last_step_at

    @property
    def n_watcher_faults(self) -> int:
        """Watchers that raised, and the step log; they are told nothing more."""
        return self._driver.watchers.n_faults

    @property
    def has_begun(self) -> bool:
        """Whether the thread takes commands, or did."""
        return self._has_begun

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
            self._driver.executor.stop()
        self._post(Close(drains))

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is freed; False if that took too long."""
        if self._pid != os.getpid() or current_thread() is self._thread:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise EngineStopped, or ClosedError, if no request can be taken."""
        if self._pid != os.getpid():
            raise ClosedError(
                "the engine belongs to the parent process: open one after the fork"
            )
        if not self.alive:
            raise self._why_ended()

    def _leave(self, request_id: int) -> None:
        """Nothing counts a request any more."""
        self._mailbox.leave(request_id)
        self.waits.leave(request_id)
        if self._media is not None:
            self._media.encoder.leave(request_id)

    def _lose(self, loop: object) -> None:
        """*loop* is closed: its requests end before the next step."""
        self._mailbox.post(Call(partial(self._abandon, loop), Future()))

    def _post_call(self, function: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._post(Call(function, answer))
        return answer

    def _post(self, command: Command) -> None:
        self._mailbox.post(command)
        if self._ended:
            self._refuse_rest()

    def _why_ended(self) -> PyllamaError:
        if self._cause is None:
            return ClosedError("the engine is closed")
        error = EngineStopped(f"the engine thread has ended: {self._cause!r}")
        error.__cause__ = self._cause
        return error

    def _refuse_rest(self) -> None:
        """Answer the commands that nobody will obey."""
        for command in self._mailbox.rest():
            if isinstance(command, Submit):
                refuse(command.stream, self._why_ended())
            elif isinstance(command, Call) and not command.answer.done():
                command.answer.set_exception(self._why_ended())

    # -- the engine thread ------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - readers are told why
            self._cause = error
        self._ended = True
        self._delivery.refuse_all(self._why_ended)
        self._tell_watchers("closed" if self._cause is None else "failed")
        self._refuse_rest()
        try:
            self._release()
        except BaseException as error:  # noqa: BLE001 - the next caller is told
            self._cause = self._cause or error

    def _loop(self) -> None:
        timeout_s: float | None = 0.0
        self._has_begun = True
        while not self._is_done:
            commands = self._mailbox.take(timeout_s)
            while commands:
                self._obey(commands[0])
                commands.popleft()
            if not self._is_done:
                timeout_s = 0.0 if self._step() else self._idle_s()
        self._end_all()
        self._write_idle()

    def _step(self) -> bool:
        """False: there was nothing to do."""
        did = self._driver.step()
        wanted = () if self._media is None else self._driver.scheduler.take_wanted()
        for request_id, n_spared in wanted:
            self._want(request_id, n_spared)
        return did or bool(wanted)

    @property
    def _is_done(self) -> bool:
        close = self._close
        return close is not None and not (
            close.drains and self._driver.scheduler.has_work
        )

    def _obey(self, command: Command) -> None:
        """Do what *command* says; whatever it raises is about nothing else."""
        try:
            match command:
                case Submit():
                    self._submit(command)
                case Cancel(request_id):
                    self._cancel(request_id)
                case Call():
                    _answer(command)
                case Encoded(request_id):
                    self._note_encoded(request_id)
                case Written() | Fetched():
                    self._driver.scheduler.take_report(command)
                case Close():
                    self._close = command
                    self._tell_watchers("closing")
        except BaseException:  # noqa: BLE001 - it is told in the log
            _log.exception("%s failed; the engine goes on", type(command).__name__)

    def _submit(self, command: Submit) -> None:
        requests, stream = command.requests, command.stream
        try:
            self._delivery.open(requests, stream)
            command.context.run(self._driver.add, requests, command.submitted)
            for request in requests:
                if request.payloads:
                    n_spared = self._driver.scheduler.spare(request.request_id)
                    self._want(request.request_id, n_spared)
        except BaseException as error:  # noqa: BLE001 - the reader is told
            for request in requests:
                self._withdraw(request.request_id)
            refuse(stream, _told(error, "the request could not be taken"))

    def _withdraw(self, request_id: int) -> None:
        """Free what was made for a request that was not taken."""
        self._delivery.disown([request_id])
        if not self._driver.withdraw(request_id):
            self._delivery.forget(request_id)
            self._leave(request_id)

    def _want(self, request_id: int, n_spared: int) -> None:
        """Have images and sounds of a request encoded; some may be already."""
        if self._media is not None:
            self._media.want(request_id, n_spared)
            self._note_encoded(request_id)

    def _note_encoded(self, request_id: int) -> None:
        """Tell the scheduler what has come of the images and sounds of a request."""
        if self._media is None:
            return
        n_spans, error = self._media.ready(request_id)
        if error is not None:
            self._driver.fail(request_id, error)
        elif n_spans:
            self._driver.media_ready(request_id, n_spans)

    def _cancel(self, request_id: int) -> None:
        try:
            self._driver.cancel(request_id)
        except BaseException as error:
            stream = self._delivery.stream_of(request_id)
            if stream is not None:
                self._delivery.disown(self._delivery.ids_of(stream))
                refuse(stream, _told(error, "the request could not be cancelled"))
            raise

    def _deliver(self, events: list[Event], ended: bool) -> None:
        """Publish statistics before anyone can read that a request has ended."""
        if ended and self._media is not None:
            events = list(map(self._media.leave, events))
        now = self.clock()
        if ended or now - self._told >= STATS_S:
            self.stats, self._told = self._driver.scheduler.stats(), now
            self._teller.tell(self._driver.scheduler)
        self._delivery.deliver(events)

    def _watch(self, watcher: Watcher) -> None:
        change: EngineChange = "closing" if self._refuses else "running"
        watcher.engine(change, self.clock())
        self._driver.watchers.add(watcher)

    def _tell_watchers(self, change: EngineChange) -> None:
        self._driver.watchers.engine(change, self.clock())

    def _abandon(self, loop: object) -> None:
        """Nobody can read the streams of a closed event loop."""
        for request_id in self._delivery.ids_on(loop):
            self._driver.cancel(request_id)

    def _idle_s(self) -> float | None:
        deadline = self._driver.scheduler.next_deadline
        return None if deadline is None else max(deadline - self.clock(), 1e-3)

    def _end_all(self) -> None:
        for request_id in self._delivery.request_ids:
            self._driver.cancel(request_id, FinishReason.CLOSED)
        self.stats = self._driver.scheduler.stats()
        self._driver.tell_rest()

    def _write_idle(self) -> None:
        """Keep in files what slots hold, one after the other: nobody waits any more."""
        if self._files is not None:
            for _ in self._driver.last_steps():
                self._files.drain()


def _answer(call: Call) -> None:
    answer = call.answer
    if not answer.set_running_or_notify_cancel():
        return
    try:
        result = call.function()
    except BaseException as error:  # noqa: BLE001 - it is the caller's
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _told(error: BaseException, what: str) -> PyllamaError:
    """*error* as the reader of a stream gets it."""
    if isinstance(error, PyllamaError):
        return error
    fault = EngineFault(f"{what}, the engine goes on: {error!r}")
    fault.__cause__ = error
    return fault
