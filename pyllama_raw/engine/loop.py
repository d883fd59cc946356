"""
The work of the engine thread: take commands, drive a step, hand out its events.

A command that raises ends what it was about, and nothing else. An exception of a step ends
the thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from logging import getLogger

from pyllama_raw.core.request import Event, Finished, FinishReason
from pyllama_raw.core.step import Fetched, Written
from pyllama_raw.engine.cpu_share import CpuShare
from pyllama_raw.engine.delivery import Delivery, refuse
from pyllama_raw.engine.door import Door, Pace
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.engine_state import EngineState
from pyllama_raw.engine.life import Life
from pyllama_raw.engine.mailbox import Command, Errand, Mailbox
from pyllama_raw.engine.parts import EngineParts
from pyllama_raw.engine.requests import OpenRequest, WaitingRoom
from pyllama_raw.engine.stream import Stream
from pyllama_raw.engine.telling import Teller
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.errors import EngineFault, OutputUnread, PyllamaError

STATS_S = 0.25  # statistics of running requests are at most this old, and one call

_log = getLogger(__name__)


class EngineLoop:
    """Obeys the commands in *mailbox* and makes steps until it is told to close."""

    def __init__(
        self,
        parts: EngineParts,
        mailbox: Mailbox,
        door: Door,
        clock: Callable[[], float],
    ) -> None:
        self._mailbox = mailbox
        self._door = door
        self._room = WaitingRoom(door.opened)
        self._files, self._media = parts.files, parts.media
        self.pace = Pace(door.opened, parts.scheduler.limits.n_slots)
        self.driver = Driver(
            parts.scheduler,
            parts.executor,
            clock,
            self._deliver,
            opened=door.opened,
            watchers=(door, self.pace, *parts.logs.watchers),
        )
        self._opened = door.opened
        self.delivery = Delivery(door.opened, self.leave, self._lose, self._end_unread)
        self.stats = parts.scheduler.stats()  # exact when a request has ended
        self._told = 0.0  # when stats was taken
        self._teller = Teller()
        self._executor = parts.executor
        self.cpu_share = CpuShare()
        self._drains: bool | None = None  # as close_after() said last; None: it goes on
        self.life = Life(self.driver, parts.executor, parts.restarts, parts.memory)
        self._told_state = self.state
        self._quiet: list[Future[None]] = []  # wait until there is no request
        self.is_replaced = False  # others tell what becomes of the engine

    def run(self) -> None:
        """Return when all requests have ended; raises what ends the thread."""
        timeout_s: float | None = 0.0
        while not self._is_done:
            commands = self._mailbox.take(timeout_s)
            while commands:
                self._obey(commands[0])
                commands.popleft()
            self._tell_state()
            if not self._is_done:
                timeout_s = 0.0 if self._step() else self._idle_s()
                self._tell_state()
        self._end_all()
        if self.life.hindrance is None and self._files is not None:
            for _ in self.driver.last_steps():  # keep what slots hold: nobody waits
                self._files.drain()

    def close(self) -> None:
        """Change nothing of the process any more."""
        self.cpu_share.close()
        self._answer_quiet()

    def _step(self) -> bool:
        """False: there was nothing to do."""
        for request_id in self._room.expired(self.driver.clock()):
            self._leave_room(request_id)  # the scheduler ends it
        return self.life.step()

    @property
    def state(self) -> EngineState:
        """The state as long as the thread runs. Thread: any."""
        if self._drains is not None:
            return EngineState.CLOSING
        if (hindrance := self.life.hindrance) is not None:
            return hindrance
        has_work = self.driver.scheduler.has_work or bool(self._room)
        return EngineState.RUNNING if has_work else EngineState.READY

    def _tell_state(self) -> None:
        state = self.state
        if state is not self._told_state:
            self._told_state = state
            self.tell_watchers(state)
        if self._quiet and state not in (EngineState.RUNNING, EngineState.LOADING):
            self._answer_quiet()

    def when_quiet(self, quiet: Future[None]) -> None:
        """Answer once no request runs, or the thread ends."""
        self._quiet.append(quiet)

    def _answer_quiet(self) -> None:
        waiting, self._quiet = self._quiet, []
        for each in waiting:
            if each.set_running_or_notify_cancel():
                each.set_result(None)

    @property
    def _is_done(self) -> bool:
        if self._drains and not self.life.is_asleep:
            return not (self._room or self.driver.scheduler.has_work)
        return self._drains is not None

    def _obey(self, command: Command) -> None:
        """Run *command*; whatever it raises is about nothing else."""
        try:
            try:
                if isinstance(command, Errand):  # its caller may ask what was before it
                    self.driver.tell_rest()
            finally:
                command()
        except BaseException:  # noqa: BLE001 - it is told in the log
            _log.exception("a command failed; the engine goes on")

    # Commands.

    def close_after(self, *, drains: bool) -> None:
        """End every request, with *drains* once it is done; then the thread."""
        self._drains = drains

    def take_report(self, report: Written | Fetched) -> None:
        """Hear what became of a file."""
        self.driver.scheduler.take_report(report)

    def submit(self, opened: Sequence[OpenRequest]) -> None:
        """Queue requests of one stream, all or none."""
        try:
            if opened[0].encodes is not None:
                self._await_rows(opened)
                for each in opened:
                    self.note_encoded(each.request.request_id)
            else:
                self.driver.take_on(opened)
        except BaseException as error:  # noqa: BLE001 - the reader is told
            self._refuse(opened, error)

    def _refuse(self, opened: Sequence[OpenRequest], error: BaseException) -> None:
        """Take on none of *opened*, which have one stream."""
        stream = opened[0].stream
        try:
            for each in opened:
                self._room.take(each.request.request_id)
                if not self.driver.withdraw(each.request.request_id):
                    self.leave(each)
        finally:
            self._give_up(stream, error, "taken")

    def _give_up(self, stream: Stream, error: BaseException, what: str) -> None:
        """End *stream*, whose requests could not be *what*; drop what still comes of them."""
        if not isinstance(error, PyllamaError):
            said = f"the request could not be {what}, the engine goes on: {error!r}"
            fault = EngineFault(said)
            fault.__cause__ = error
            error = fault
        self.delivery.disown(stream)
        refuse(stream, error)

    def _await_rows(self, opened: Sequence[OpenRequest]) -> None:
        """Have requests wait until their images and sounds are encoded."""
        requests, first = [each.request for each in opened], opened[0]
        self.driver.open(requests)
        first.context.run(self.driver.watchers.came, requests, first.submitted)
        self._room.put(opened)

    def note_encoded(self, request_id: int) -> None:
        """Have a request whose rows are there, or never will be, leave the waiting room."""
        opened = self._opened.get(request_id)
        if opened is None or self._media is None or opened.encodes is None:
            return
        error = opened.encodes.error
        if error is not None or self._media.encoder.is_done(opened.encodes):
            self._leave_room(request_id)
        if error is not None:
            self.driver.fail(request_id, error)

    def _leave_room(self, request_id: int) -> None:
        """Have a request enter the scheduler, if it is in the waiting room."""
        opened = self._room.take(request_id)
        if opened is None:
            return
        add_all = self.driver.scheduler.add_all
        try:
            opened.context.run(add_all, (opened.request,), opened.submitted)
        except BaseException as error:  # noqa: BLE001 - the reader is told
            stream = opened.stream
            forks = [each for each in self._opened.all() if each.stream is stream]
            self._refuse(forks, error)

    def _end(
        self, request_id: int, reason: FinishReason = FinishReason.CANCELLED
    ) -> None:
        """End a request wherever it is; unknown ids are ignored."""
        self._leave_room(request_id)
        self.driver.cancel(request_id, reason)

    def cancel(self, request_id: int) -> None:
        """End a request; unknown ids are ignored."""
        try:
            self._end(request_id)
        except BaseException as error:
            opened = self._opened.get(request_id)
            if opened is not None:
                self._give_up(opened.stream, error, "cancelled")
            raise

    def _deliver(self, events: list[Event], ended: bool) -> None:
        """Publish statistics before anyone can read that a request has ended."""
        if ended and self._media is not None:
            events = list(map(self._with_encodes, events))
        now = self.driver.clock()
        if ended or now - self._told >= STATS_S:
            self.stats = self._room.counted(self.driver.scheduler.stats())
            self._told = now
            self._teller.tell(self.driver.scheduler)
            self.cpu_share.note(self._executor.times)
        self.delivery.deliver(events)

    def _with_encodes(self, event: Event) -> Event:
        """*event*; if it is the last one of a request, with the seconds of its encodes."""
        encodes = self._opened[event.request_id].encodes
        if type(event) is not Finished or encodes is None:
            return event
        return replace(event, encode_s=encodes.seconds)

    def watch(self, watcher: Watcher) -> None:
        """Tell *watcher* what happens from now on."""
        self._tell_state()
        watcher.engine(self.state, self.driver.clock())
        self.driver.watchers.add(watcher)

    def tell_watchers(self, state: EngineState) -> None:
        """Tell what has become of the engine."""
        if not self.is_replaced:
            self.driver.watchers.engine(state, self.driver.clock())

    def leave(self, opened: OpenRequest) -> None:
        """Nothing counts a request any more. Thread: any."""
        self._door.leave(opened)
        if self._media is not None and opened.encodes is not None:
            self._media.encoder.leave(opened.encodes)

    def _lose(self, loop: object) -> None:
        """*loop* is closed: its requests end before the next step."""
        self._mailbox.post(partial(self._abandon, loop))

    def _abandon(self, loop: object) -> None:
        """Nobody can read the streams of a closed event loop."""
        for opened in self._opened.all():
            if opened.stream.loop is loop:
                self._end(opened.request.request_id)

    def _end_unread(self, stream: Stream) -> None:
        """Requests that nobody reads end before the next step."""
        error = OutputUnread(stream.max_events)
        stream.max_events = sys.maxsize  # once
        for opened in self._opened.all():
            if opened.stream is stream:
                fail = partial(self.driver.fail, opened.request.request_id, error)
                self._mailbox.post(fail)

    def _idle_s(self) -> float | None:
        moments = (
            self.driver.scheduler.next_deadline,
            self._room.next_deadline,
            self.life.retry_at,
        )
        next_one = min((each for each in moments if each is not None), default=None)
        return None if next_one is None else max(next_one - self.driver.clock(), 1e-3)

    def _end_all(self) -> None:
        for request_id in list(self._opened):
            self._end(request_id, FinishReason.CLOSED)
        self.stats = self.driver.scheduler.stats()
        self.driver.tell_rest()
