"""
The engine thread: take commands, plan a step, run it, hand out its events.

Rules:
1. This thread alone touches the scheduler and the executor. Others post commands.
2. It never waits for a reader or an event loop.
3. Every stream it was given ends: with a `Finished` event, or, if the thread is gone,
   with a `Refused`. The flag `_ended` is set before the last look into the mailbox and
   read after every post, so that no command is lost between the two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from threading import Thread, current_thread
from typing import Any, TypeVar

from pyllama_raw.core.request import Event, Finished, Request
from pyllama_raw.core.scheduler import Scheduler
from pyllama_raw.core.stats import SchedulerStats
from pyllama_raw.core.step import Captured, Executor, StepPlan
from pyllama_raw.engine.abort import AbortFlag, AbortGate
from pyllama_raw.engine.mailbox import (
    Call,
    Cancel,
    Close,
    Command,
    Mailbox,
    Submit,
    Written,
)
from pyllama_raw.engine.parts import FileWriter
from pyllama_raw.engine.stream import Refused, Stream
from pyllama_raw.engine.wakeup import Waker, wake
from pyllama_raw.errors import ClosedError, EngineStopped, PyllamaError

T = TypeVar("T")

STATS_S = 0.25  # statistics of running requests are at most this old, and one call


class EngineThread:
    """Runs requests on one scheduler and one executor until close()."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        flag: AbortFlag,
        *,
        files: FileWriter | None = None,
        release: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            files: what the executor hands files to; None: it writes none.
            release: frees what the executor stands on; called once, by the thread, when
                no step can follow.
        """
        self.clock = clock
        self.stats: SchedulerStats = scheduler.stats()  # exact when a request has ended
        self._told = 0.0  # when stats was taken
        self._scheduler = scheduler
        self._executor = executor
        self._release = release
        self._files = files
        if files is not None:
            files.report = self._note_written
        self._gate = AbortGate(flag)
        self._mailbox = Mailbox(n_enough=scheduler.limits.n_slots)
        self._streams: dict[int, Stream] = {}
        self._closing = False
        self._ended = False
        self._cause: BaseException | None = None
        self._pid = os.getpid()
        self._waker = Waker(self._lose)
        executor.on_compute = self._waker.flush
        self._thread = Thread(target=self._run, name="pyllama-engine", daemon=True)
        self._thread.start()

    # -- any thread -------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return not (self._ended or self._closing) and self._pid == os.getpid()

    def coming(self) -> AbstractContextManager[None]:
        """Around the making of requests: an idle engine begins with all that come."""
        return self._mailbox.coming()

    def submit(self, request: Request, stream: Stream) -> None:
        """Queue *request*. Its events, or why it was refused, go to *stream*."""
        self.submit_all((request,), stream)

    def submit_all(self, requests: tuple[Request, ...], stream: Stream) -> None:
        """Queue all *requests* or none; a refusal is told to *stream* once."""
        self.check()
        self._post(Submit(requests, stream, self.clock()))

    def cancel(self, request_id: int) -> None:
        """End a request within the running step; safe to call twice or too late."""
        if self.alive:
            self._gate.cancel(request_id)
            self._post(Cancel(request_id))

    def forget(self, request_id: int) -> None:
        """Like cancel(), without a lock: for finalisers."""
        if self.alive:
            self._mailbox.post(Cancel(request_id))
            self._executor.interrupt()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run *function* between two steps, in the engine thread."""
        self.check()
        answer: Future[T] = Future()
        self._post(Call(function, answer))
        return answer

    def close(self) -> None:
        """Ask the thread to end every request and itself; does not wait."""
        if self.alive:
            self._closing = True
            self._gate.close()
            self._post(Close())

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

    def _note_written(self, write_id: int, written: Captured | None) -> None:
        self._post(Written(write_id, written))

    def _post(self, command: Command) -> None:
        self._mailbox.post(command)
        self._executor.interrupt()
        if self._ended:
            self._refuse(self._mailbox.take())

    def _why_ended(self) -> PyllamaError:
        if self._cause is None:
            return ClosedError("the engine is closed")
        error = EngineStopped(f"the engine thread has ended: {self._cause!r}")
        error.__cause__ = self._cause
        return error

    def _refuse(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Submit):
                command.stream.events.append(Refused(self._why_ended()))
                wake(command.stream.loop, (command.stream,))
            elif isinstance(command, Call):
                command.answer.set_exception(self._why_ended())

    # -- the engine thread ------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - readers are told why
            self._cause = error
        self._end()
        self._waker.close()
        try:
            self._release()
        except BaseException as error:  # noqa: BLE001 - the next caller is told
            self._cause = self._cause or error

    def _loop(self) -> None:
        timeout_s: float | None = 0.0
        while True:
            self._executor.resume()
            for command in self._mailbox.take(timeout_s):
                self._obey(command)
            if self._closing:
                self._cancel_all()
                self._write_idle()
                return
            timeout_s = 0.0 if self._step() else self._idle_s()

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Cancel(request_id):
                self._scheduler.cancel(request_id, self.clock())
                self._gate.settle(request_id)
            case Call(function, answer):
                _answer(function, answer)
            case Written(write_id, written):
                self._scheduler.end_write(write_id, written)
            case Close():
                self._closing = True

    def _submit(self, command: Submit) -> None:
        requests, stream = command.requests, command.stream
        try:
            for request in requests:
                self._executor.open(request)
            self._scheduler.add_all(requests, command.submitted)
        except PyllamaError as error:
            for request in requests:
                self._executor.close(request.request_id)
            stream.events.append(Refused(error))
            wake(stream.loop, (stream,))
        else:
            self._streams.update({r.request_id: stream for r in requests})

    def _step(self) -> bool:
        """Plan and run one step; False if there is nothing to do."""
        scheduler = self._scheduler
        plan = scheduler.schedule(self.clock())
        events = scheduler.take_events()
        if events:
            self._deliver(events)
        if plan:
            self._execute(plan)
        else:
            self._waker.flush()  # nothing will be computed
        return bool(plan or events)

    def _execute(self, plan: StepPlan) -> None:
        """Run *plan* and deliver what it gives, step by step if somebody waits for that."""
        streams = self._streams
        if plan.goes_on > 1 and any(streams[c.request_id].eager for c in plan.chunks):
            plan = plan._replace(each=True)  # somebody waits for every token
        self._gate.enter(plan.chunks)
        try:
            result = self._executor.execute(plan)
            while result.rest is not None:
                self._deliver(self._scheduler.apply(plan, result, self.clock()))
                following = result.rest()
                if following is None:
                    return
                result = following
        finally:
            self._gate.leave()
        self._deliver(self._scheduler.apply(plan, result, self.clock()))

    def _tell(self, events: list[Event]) -> None:
        """Publish statistics before anyone can read that a request has ended."""
        now = self.clock()
        if now - self._told >= STATS_S or any(type(e) is Finished for e in events):
            self.stats, self._told = self._scheduler.stats(), now

    def _deliver(self, events: list[Event]) -> None:
        """One pass over the events, one wake-up for each event loop."""
        self._tell(events)
        streams = self._streams
        woken: dict[object, list[Stream]] = {}
        for event in events:
            stream = streams[event.request_id]
            if type(event) is Finished:
                del streams[event.request_id]
                used = self._executor.close(event.request_id)
                stream.events.append(replace(event, sampler=used))
            else:
                stream.events.append(event)
                if not stream.eager:
                    continue
            ready = woken.get(stream.loop)
            if ready is None:
                woken[stream.loop] = [stream]
            else:
                ready.append(stream)
        for loop, ready in woken.items():
            self._waker.post(loop, ready)

    def _lose(self, loop: object) -> None:
        """*loop* is closed. Thread: the waker's."""
        self._mailbox.post(Call(partial(self._abandon, loop), Future()))

    def _abandon(self, loop: object) -> None:
        """Nobody can read the streams of a closed event loop."""
        lost = [i for i, stream in self._streams.items() if stream.loop is loop]
        for request_id in lost:
            self._scheduler.cancel(request_id, self.clock())

    def _idle_s(self) -> float | None:
        deadline = self._scheduler.next_deadline
        return None if deadline is None else max(deadline - self.clock(), 1e-3)

    def _cancel_all(self) -> None:
        for request_id in list(self._streams):
            self._scheduler.cancel(request_id, self.clock())
        self.stats = self._scheduler.stats()
        self._deliver(self._scheduler.take_events())

    def _write_idle(self) -> None:
        """Keep in files what slots hold, one after the other: nobody waits any more."""
        if self._files is not None:
            for plan in self._scheduler.last_plans():
                self._executor.execute(plan)
                self._files.drain()

    def _end(self) -> None:
        self._ended = True
        for stream in set(self._streams.values()):
            stream.events.append(Refused(self._why_ended()))
            wake(stream.loop, (stream,))
        self._streams.clear()
        self._refuse(self._mailbox.take())


def _answer(function: Callable[[], Any], answer: Future[Any]) -> None:
    try:
        answer.set_result(function())
    except Exception as error:  # noqa: BLE001 - it is the caller's
        answer.set_exception(error)
