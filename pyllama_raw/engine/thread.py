"""
The thread of an engine: it takes commands, makes steps, and delivers what comes of them.

Other threads call the methods of the first half, which post commands; the loop and what it calls
stand in the second half, in the order in which it calls.

Rules:
1. This thread alone touches the scheduler and the executor. Others post commands.
2. It never waits for a reader or an event loop.
3. A command that raises ends what it was about, and nothing else. An exception of the executor
   is survived as life.py says; any other one of a step ends the thread.
4. Every stream that it was given ends: with `Finished` events, or, if the thread is gone, with a
   `Refused`. The phase changes before the last look into the mailbox and is read after every
   post, so that no command is lost between the two.
5. A thread that was never closed ends before the interpreter does: a daemon thread inside C while
   Python is taken down can crash the process, and a thread that is joined too early can hang it;
   `atexit` runs between the two.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from logging import getLogger
from threading import current_thread
from typing import TypeVar
from weakref import WeakSet

from pyllama_raw.core.request import Event, Finished, FinishReason, Request
from pyllama_raw.engine.adapters import Adapters
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.info import EngineState
from pyllama_raw.engine.life import Life
from pyllama_raw.engine.mailbox import (
    NOBODYS,
    Command,
    Errand,
    Mailbox,
    OwnThread,
    Refused,
    Stream,
    check_may_wait,
    wake,
)
from pyllama_raw.engine.parts import EngineParts
from pyllama_raw.engine.requests import Door, OpenRequest, Pace, WaitingRoom
from pyllama_raw.engine.watcher import CpuShare, Teller, Watcher
from pyllama_raw.errors import (
    ClosedError,
    EngineFault,
    EngineStopped,
    OutputUnread,
    PyllamaError,
)

T = TypeVar("T")

JOIN_S = 30.0  # longer than any step that cannot be aborted should take
MAX_UNREAD = 2**16  # events of outputs that can outgrow their slots, or what slots hold
STATS_S = 0.25  # statistics of running requests are at most this old, and one call

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
        self._pid = os.getpid()
        self._parts = parts
        self._before_release = before_release
        self.clock = clock  # seconds, as deadlines count them
        self._limits = parts.scheduler.limits
        n_slots = self._limits.n_slots
        self._mailbox = Mailbox(n_slots, clock)
        # Around the making of requests: an idle engine begins with all that come.
        self.coming = self._mailbox.coming
        self.adapters = Adapters(parts.adapter_host, parts.max_adapter_bytes)
        self.adapters.post = self._post_call
        self._door = Door(parts.admission, self.adapters)
        self.records = self._door.records  # of requests that have not ended
        self._room = WaitingRoom()
        self.pace = Pace(self.records, n_slots)
        self.driver = Driver(
            parts.scheduler,
            parts.executor,
            clock,
            records=self.records,
            watchers=(self._door, self.pace, *parts.logs.watchers),
        )
        self.life = Life(
            parts.executor, parts.scheduler, parts.restarts, clock, parts.memory
        )
        if parts.media is not None:
            parts.media.encoder.report = lambda request_id: self._post(
                partial(self._note_encoded, request_id)
            )
        if parts.files is not None:
            parts.files.report = lambda report: self._post(
                partial(parts.scheduler.take_report, report)
            )
        self.stats = parts.scheduler.stats()  # exact when a request has ended
        self.cpu_share = CpuShare()
        self._stats_at = 0.0  # when stats was taken
        self._n_ended = 0  # requests that it knew of
        self._teller = Teller()
        self._quiet: list[Future[None]] = []  # answered when no request runs
        self._watched_state = self._state  # the latest that watchers have heard of
        self._speaks = True  # of what becomes of the engine; see silence()
        self.has_begun = False  # to take commands
        self.gone: Future[None] = Future()  # answered when everything is freed
        # Whether others go on in place of this thread, which has ended by an error.
        self.is_survived: Callable[[BaseException], bool] = lambda _: False
        self._thread = OwnThread(target=self._run, name="pyllama-engine", daemon=True)
        self._thread.start()
        # The newest is called first: before the finalisers of what the thread uses.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        _threads.add(self)

    # -- requests, from any thread -----------------------------------------------------------

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
        limits, media = self._limits, self._parts.media
        # An output that can outgrow its slot may have no end, so what is unread is bounded.
        if any(request.max_tokens > limits.n_ctx_slot for request in requests):
            stream.max_events = max(limits.n_ctx_slot * len(requests), MAX_UNREAD)
        try:
            # They count from here on, so QueueFull needs no answer of the thread.
            records = self._door.enter(requests, stream, self.clock() - waited_s)
        except PyllamaError as error:
            _log.info("requests were refused: %s", error)
            raise
        try:
            if media is not None:
                for request in requests:  # before anything is encoded
                    limits.check(request)
                media.enter(records)
            self._post(partial(self._submit, records))
        except BaseException:
            for record in records:
                self._leave(record)
            raise

    def cancel(self, request_id: int) -> None:
        """End a request within the running step; safe to call twice or too late."""
        if self._is_running:
            self.driver.executor.stop(request_id)
            self._post(partial(self._cancel, request_id))

    def forget(self, request_id: int) -> None:
        """Like cancel(), without a lock: for finalisers."""
        if self._is_running:
            self._mailbox.post(partial(self._cancel, request_id))

    # -- commands, from any thread -----------------------------------------------------------

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run *function* between two steps, in the engine thread; any other may call."""
        self.check_for_waiting()
        return self._post_call(function)

    def quiet(self) -> Future[None]:
        """Answered when no request runs, or the thread ends."""
        # The command only notes it; _tell_state() answers it.
        quiet = Future[None]()
        self.call(partial(self._quiet.append, quiet))
        return quiet

    def watch(self, watcher: Watcher) -> Future[None]:
        """Tell *watcher* what happens from the next command on; of the end in any case."""
        return self.call(partial(self._watch, watcher))

    def unwatch(self, watcher: Watcher) -> None:
        """Tell it nothing any more, soon; can be repeated."""
        if self._is_running:
            self._mailbox.post(partial(self.driver.watchers.discard, watcher))

    def silence(self) -> None:
        """Tell nobody what becomes of the engine: another thread does that from now on."""
        self._speaks = False

    def close(self, *, drains: bool = False) -> None:
        """
        Refuse new requests, end all others and the thread; does not wait.

        Args:
            drains: the others are done first. A later close() without it ends them.
        """
        # A drain does not revive what close() ends.
        if not self._is_running or (drains and self.life.is_shut):
            return
        self.life.shut()
        if not drains:
            self.driver.executor.stop()
        self._post(partial(self.life.close, drains=drains))

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is freed; False if that took too long."""
        if not self.is_ours or current_thread() is self._thread:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post_call(self, function: Callable[[], T]) -> Future[T]:
        call = Errand(function)
        self._post(call)
        return call.answer

    def _post(self, command: Command) -> None:
        self._mailbox.post(command)
        if self.life.phase.is_over:
            self._refuse_rest()

    # -- what becomes of the engine, for any thread --------------------------------------------

    @property
    def state(self) -> EngineState:
        """The state of the engine, as others see it."""
        if not self.is_ours:
            return EngineState.CLOSED if self.error is None else EngineState.ERROR
        if self.life.is_shut and not self.life.phase.is_over:
            return EngineState.CLOSING
        return self._state

    @property
    def _state(self) -> EngineState:
        """The state of the thread, which hears later than others that the engine closes."""
        state = self.life.phase.state
        if state is EngineState.READY and self._has_work:
            return EngineState.RUNNING
        return state

    @property
    def error(self) -> BaseException | None:
        """The error that has ended the thread, or came at its end."""
        return self.life.error

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return not self.life.is_shut and self._is_running

    @property
    def is_ours(self) -> bool:
        """Whether it runs in this process; a fork has none of its threads."""
        return self._pid == os.getpid()

    @property
    def _is_running(self) -> bool:
        return not self.life.phase.is_over and self.is_ours

    @property
    def _has_work(self) -> bool:
        """Whether some request has not ended."""
        return bool(self.driver.scheduler.alive or self._room.waiting)

    def check(self) -> None:
        """Raise EngineStopped, or ClosedError, if no request can be taken."""
        if not self.is_ours:
            raise ClosedError(
                "the engine belongs to the parent process: open one after the fork"
            )
        if self.life.is_shut or self.life.phase.is_over:
            raise self._end_error()

    def check_for_waiting(self) -> None:
        """As check() for a caller that waits for the engine: WrongUse in the thread of one."""
        check_may_wait()
        self.check()

    def _end_error(self) -> PyllamaError:
        """The error of whoever comes too late."""
        if self.error is None:
            return ClosedError("the engine is closed")
        # Each caller gets an error of its own, with the same cause.
        error = EngineStopped(f"the engine thread has ended: {self.error!r}")
        error.__cause__ = self.error
        return error

    # -- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        """Serve until close(), or until an error ends the thread; then free everything."""
        self.has_begun = True
        try:
            self._serve()
            self.life.end()
        except BaseException as error:  # noqa: BLE001 - readers are told why
            # Another session may go on in place of this thread. Its watchers then hear of no
            # end.
            if self.is_survived(error):
                self.silence()
            self.life.fail(error)
        # From here on, whoever posts a command refuses it, because nobody obeys.
        self.cpu_share.close()
        self._refuse_streams()
        self._tell_state()
        self._refuse_rest()
        try:
            with closing(self._parts.logs):
                self._before_release()
                self._parts.release()
        except BaseException as error:  # noqa: BLE001 - the next caller is told
            self.life.fail(error)
        self.gone.set_result(None)

    def _serve(self) -> None:
        """Return when all requests have ended after close(); raises what ends the thread."""
        wait_s: float | None = 0.0
        while True:
            # Commands: submit, cancel, close, calls. An idle engine waits for them here.
            commands = self._mailbox.take(wait_s)
            while commands:
                self._obey(commands[0])
                commands.popleft()
            if self.life.phase.drains and not self._has_work:
                self.life.drained()
            self._tell_state()
            if self.life.phase.ends:
                break
            # Schedule, execute, apply and deliver.
            wait_s = 0.0 if self._step() else self._idle_s()
            self._tell_state()
        # The engine closes, so what is left ends as closed, with what it has.
        for request_id in list(self.records):
            self._end(request_id, FinishReason.CLOSED)
        self.stats = self.driver.scheduler.stats()
        self._deliver_pending()
        # Files get what idle slots hold last, because nobody waits any more.
        if self.life.phase.has_context and self._parts.files is not None:
            for events in self.driver.last_steps():
                self._deliver(events)
                self._parts.files.drain()

    def _obey(self, command: Command) -> None:
        """Run *command*; whatever it raises is about nothing else."""
        try:
            try:
                if isinstance(command, Errand):  # its caller may ask what was before it
                    self._deliver_pending()
            finally:
                command()
        except BaseException:  # noqa: BLE001 - it is told in the log
            _log.exception("a command failed; the engine goes on")

    def _step(self) -> bool:
        """Make a step; False: there was nothing to do."""
        driver, life = self.driver, self.life
        # A request that waits for rows beyond its deadline ends as any other one does.
        if self._room.waiting:
            for request_id in self._room.expired(driver.clock()):
                self._leave_room(request_id)
        # The context has failed: another one is made, and all go on from their tokens.
        if life.retry_at is not None and driver.clock() >= life.retry_at:
            failure = life.come_back()
            if failure is not None:
                self._deliver(driver.give_up(failure))
        # There is none, or it sleeps: requests wait, but not beyond their deadlines.
        if not life.phase.has_context:
            driver.scheduler.expire(driver.clock())
            return self._deliver_pending()
        try:
            plan, events = driver.plan()
            # What needs no decode must not wait for one.
            if events:
                self._deliver(events)
            if plan:
                self._deliver(driver.run(plan))
                if driver.watchers.wants_steps:
                    driver.log_step()
        except Exception as error:
            # Only the executor's failures leave the scheduler as it was.
            if driver.running_plan is None:
                raise
            life.survive(error)
            return True
        return bool(plan or events)

    def _idle_s(self) -> float | None:
        """Seconds until something is to be done without a command; None: there is nothing."""
        # A deadline, that of a request that waits for rows, or another try to make a context.
        moments = (
            self.driver.scheduler.next_deadline,
            self._room.next_deadline if self._room.waiting else None,
            self.life.retry_at,
        )
        moment = min((at for at in moments if at is not None), default=None)
        return None if moment is None else max(moment - self.driver.clock(), 1e-3)

    # -- delivery ------------------------------------------------------------------------------

    def _deliver_pending(self) -> bool:
        """Deliver what does not wait for a step; False if there is nothing."""
        events = self.driver.scheduler.take_events()
        if events:
            self._deliver(events)
        return bool(events)

    def _deliver(self, events: list[Event]) -> None:
        """Put *events* into the streams of their requests; one wake-up for each event loop."""
        # Whoever reads an end finds statistics that know of it.
        now, scheduler = self.driver.clock(), self.driver.scheduler
        n_ended = scheduler.counters.submitted - len(scheduler.alive)
        if n_ended > self._n_ended or now - self._stats_at >= STATS_S:
            stats = scheduler.stats()
            self.stats = self._room.counted(stats) if self._room.waiting else stats
            self._stats_at, self._n_ended = now, n_ended
            self.cpu_share.note(self._parts.executor.times)
            self._teller.tell(scheduler)
        records = self.records
        # By event loop, those to be woken.
        ready = defaultdict[object, list[Stream]](list)
        for event in events:
            record = records[event.request_id]
            stream = record.stream
            n_unread = len(stream.events)
            if type(event) is Finished:
                event = self.driver.closed(event)  # noqa: PLW2901
                if record.encodes is not None:
                    event = replace(event, encode_s=record.encodes.seconds)  # noqa: PLW2901
                self._leave(record)
            elif n_unread >= stream.max_events:
                # Nobody reads an output without an end.
                self._end_unread(stream)
            elif not stream.eager and n_unread < stream.max_events // 2:
                # The reader wants to be woken at the end only.
                stream.events.append(event)
                continue
            stream.events.append(event)
            ready[stream.loop].append(stream)
        for loop, streams in ready.items():
            if not wake(loop, streams):
                self._mailbox.post(partial(self._abandon, loop))

    def _leave(self, record: OpenRequest) -> None:
        """Remove a request from admission and from the encoder. Thread: any."""
        self._door.leave(record)
        if self._parts.media is not None and record.encodes is not None:
            self._parts.media.encoder.leave(record.encodes)

    def _end_unread(self, stream: Stream) -> None:
        """Have the requests of *stream* end before the next step."""
        error = OutputUnread(stream.max_events)
        stream.max_events = sys.maxsize  # once
        for record in self.records.of_stream(stream):
            fail = partial(self.driver.fail, record.request.request_id, error)
            self._mailbox.post(fail)

    def _abandon(self, loop: object) -> None:
        """End the requests whose event loop is closed, because nobody can read them."""
        for record in self.records.all():
            if record.stream.loop is loop:
                self._end(record.request.request_id)

    # -- commands ------------------------------------------------------------------------------

    def _submit(self, records: Sequence[OpenRequest]) -> None:
        """Take on requests of one stream, all or none."""
        try:
            if records[0].encodes is None:
                self.driver.take_on(records)
                return
            # Images and sounds are being encoded: the requests wait, but watchers know of them.
            requests, first = [record.request for record in records], records[0]
            for request in requests:
                self.driver.executor.open(request)
            first.context.run(self.driver.watchers.came, requests, first.submitted)
            self._room.put(records)
            for request in requests:
                self._note_encoded(request.request_id)
        except BaseException as error:  # noqa: BLE001 - the reader is told
            self._refuse(records, error)

    def _note_encoded(self, request_id: int) -> None:
        """Have a request whose rows are there, or never will be, leave the waiting room."""
        record, media = self.records.get(request_id), self._parts.media
        if record is None or media is None or record.encodes is None:
            return
        error = record.encodes.error
        if error is not None or media.encoder.is_done(record.encodes):
            self._leave_room(request_id)
        if error is not None:
            self.driver.fail(request_id, error)

    def _leave_room(self, request_id: int) -> None:
        """Have a request enter the scheduler, if it is in the waiting room."""
        record = self._room.take(request_id)
        if record is None:
            return
        add_all = self.driver.scheduler.add_all
        try:
            record.context.run(add_all, (record.request,), record.submitted)
        except BaseException as error:  # noqa: BLE001 - the reader is told
            self._refuse(self.records.of_stream(record.stream), error)

    def _refuse(self, records: Sequence[OpenRequest], error: BaseException) -> None:
        """Take on none of *records*, which have one stream."""
        stream = records[0].stream
        try:
            for record in records:
                request_id = record.request.request_id
                self._room.take(request_id)
                if not self.driver.withdraw(request_id):
                    self._leave(record)
        finally:
            self._give_up(stream, error, "taken")

    def _give_up(self, stream: Stream, error: BaseException, action: str) -> None:
        """End *stream*, whose requests could not be *action*; drop what still comes of them."""
        # Whatever a command raises, its reader gets an error that says who is at fault.
        if not isinstance(error, PyllamaError):
            text = f"the request could not be {action}, the engine goes on: {error!r}"
            fault = EngineFault(text)
            fault.__cause__ = error
            error = fault
        for record in self.records.of_stream(stream):
            record.stream = NOBODYS
        refuse(stream, error)

    def _cancel(self, request_id: int) -> None:
        """End a request; unknown ids are ignored."""
        try:
            self._end(request_id)
        except BaseException as error:
            record = self.records.get(request_id)
            if record is not None:
                self._give_up(record.stream, error, "cancelled")
            raise

    def _end(
        self, request_id: int, reason: FinishReason = FinishReason.CANCELLED
    ) -> None:
        """End a request wherever it is; unknown ids are ignored."""
        self._leave_room(request_id)
        self.driver.cancel(request_id, reason)

    # -- what becomes of the engine, for watchers and those who wait ---------------------------

    def _watch(self, watcher: Watcher) -> None:
        self._tell_state()
        watcher.engine(self._state, self.driver.clock())
        self.driver.watchers.add(watcher)

    def _tell_state(self) -> None:
        """Tell of another state, if it is one."""
        # Watchers hear of the state once, before all that happens in it.
        state = self._state
        if state is not self._watched_state:
            self._watched_state = state
            if self._speaks:
                self.driver.watchers.engine(state, self.driver.clock())
        if self._quiet and state not in (EngineState.RUNNING, EngineState.LOADING):
            answers, self._quiet[:] = self._quiet[:], []
            for answer in answers:
                if answer.set_running_or_notify_cancel():
                    answer.set_result(None)

    # -- the end -------------------------------------------------------------------------------

    def _refuse_rest(self) -> None:
        """Answer what nobody will obey. Thread: any, several."""
        self._refuse_streams()
        for command in self._mailbox.rest():
            if isinstance(command, Errand):
                command.refuse(self._end_error())

    def _refuse_streams(self) -> None:
        for stream in self._door.take_streams():
            refuse(stream, self._end_error())


def refuse(stream: Stream, error: PyllamaError) -> None:
    """End *stream*. Thread: any."""
    stream.events.append(Refused(error))
    wake(stream.loop, (stream,))


_threads = WeakSet[EngineThread]()


def _close_all() -> None:
    threads = list(_threads)
    for thread in threads:
        thread.close()
    for thread in threads:
        thread.join(JOIN_S)
