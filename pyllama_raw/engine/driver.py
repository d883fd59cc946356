"""
The steps of an engine, without its thread: a scheduler, an executor, and what is around a step.

The engine thread makes a step of four calls, and delivers events between them (thread.py). Tests,
benchmarks and simulators call `step()`, which does the same with a function that takes events.
The clock may be any that does not go back: it is read before a step is planned and after it has
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from logging import getLogger
from typing import NamedTuple

from pyllama_raw.core.request import Event, Finished, FinishReason, Request
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import Executor, StepPlan, StepResult
from pyllama_raw.engine.logs import step_fields
from pyllama_raw.engine.requests import OpenRequest, OpenRequests
from pyllama_raw.engine.watcher import StepRecord, Watcher, Watchers
from pyllama_raw.errors import PyllamaError

Tell = Callable[[list[Event]], None]

_log = getLogger(__name__)


class _Run(NamedTuple):
    """A step that has run and is not logged yet. Moments are those of the clock."""

    plan: StepPlan
    result: StepResult
    planned: float
    ended: float
    warms_up: bool  # a request of it only warms the engine up


class Driver:
    """
    Runs requests, a step at a time, in the thread of its caller.

    Args:
        tell: step() calls it with new events, before a decode with those that do not wait for
            it.
        records: of all requests that have not ended; None: of its own.
        watchers: are told what becomes of requests and steps; one that raises is let go of.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        tell: Tell = lambda *_: None,
        *,
        records: OpenRequests | None = None,
        watchers: Iterable[Watcher] = (),
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.records = OpenRequests() if records is None else records
        self.watchers = Watchers(watchers)
        self.last_step_at: float | None = None  # when its result was taken in
        self.running_plan: StepPlan | None = (
            None  # the executor has not returned from it
        )
        self._tell = tell
        self._began = 0.0  # when the latest step was planned
        self._run: _Run | None = None
        self._n_preempted = 0  # before that step
        scheduler.watch(self.watchers.changed)

    # -- a step ----------------------------------------------------------------------------

    def step(self) -> bool:
        """Plan a step, run it, tell what came of it; False if there was nothing to do."""
        plan, events = self.plan()
        if events:
            self._tell_all(events)
        if plan:
            self._tell_all(self.run(plan))
            if self.watchers.wants_steps:
                self.log_step()
        return bool(plan or events)

    def _tell_all(self, events: list[Event]) -> None:
        """Tell *events*, and close the requests that have ended."""
        events = [self.closed(e) if type(e) is Finished else e for e in events]
        self._tell(events)
        for event in events:
            if type(event) is Finished:
                self.records.pop(event.request_id, None)

    def plan(self) -> tuple[StepPlan, list[Event]]:
        """
        The plan of the next step, an empty one if there is nothing to do.

        With it come events that do not wait for the step.
        """
        self._n_preempted = self.scheduler.counters.preempted
        self._began = self.clock()
        plan = self.scheduler.schedule(self._began)
        return plan, self.scheduler.take_events()

    def run(self, plan: StepPlan) -> list[Event]:
        """Execute *plan* and take its result in; returns what came of it."""
        planned, wants_steps = self.clock(), self.watchers.wants_steps
        # Logs say which steps only warm the engine up. Its requests may be gone afterwards.
        warms_up = wants_steps and any(
            self.records.warms_up(work.request_id) for work in plan.works
        )
        # An exception of the executor leaves the scheduler as it was before the step, and
        # `running_plan` tells that it was the executor's. Any other one is a bug of ours.
        self.running_plan = plan
        result = self.executor.execute(plan)
        self.running_plan = None
        self.last_step_at = ended = self.clock()
        self._run = None
        if wants_steps:
            self._run = _Run(plan, result, planned, ended, warms_up)
        return self.scheduler.apply(plan, result, ended)

    def log_step(self) -> None:
        """Tell watchers of the step that has run. Its events have been delivered."""
        if self._run is None:  # whoever watches has come since the step began
            return
        plan, result, planned, ended, warms_up = self._run
        record = StepRecord(
            **step_fields(plan, result, self.scheduler.occupancy),
            at_s=self._began,
            seconds=ended - self._began,
            host_s=planned - self._began + self.clock() - ended,
            n_preempted=self.scheduler.counters.preempted - self._n_preempted,
            warms_up=warms_up,
        )
        self.watchers.stepped(record)

    def give_up(self, error: PyllamaError) -> list[Event]:
        """
        Let all go on after a failure, when the executor has another context.

        Args:
            error: the failure, for requests whose fault it seems to be.
        """
        # A rebuild that failed between two steps has no plan: only what slots held is lost.
        plan, self.running_plan = self.running_plan, None
        if plan is None:  # no step was running
            self.scheduler.lose_reading()
            self.scheduler.lose_slots()
            return self.scheduler.take_events()
        return self.scheduler.give_up(plan, error, self.clock())

    def last_steps(self) -> Iterator[list[Event]]:
        """Write idle slots to files when no request is left, one step for each item."""
        for plan in self.scheduler.last_plans():
            self._n_preempted = self.scheduler.counters.preempted
            self._began = self.clock()
            yield self.run(plan)
            if self.watchers.wants_steps:
                self.log_step()

    # -- requests --------------------------------------------------------------------------

    def add(self, requests: Iterable[Request], submitted: float) -> None:
        """As take_on(), for requests that have no records yet."""
        records = [OpenRequest(request, submitted) for request in requests]
        self.records.update((record.request.request_id, record) for record in records)
        self.take_on(records)

    def take_on(self, records: Sequence[OpenRequest]) -> None:
        """
        Take on requests of one caller, submitted together.

        If that raises anything, withdraw() all of them.
        """
        requests, first = [record.request for record in records], records[0]
        # Samplers come first, because a request that cannot be sampled is not queued.
        for request in requests:
            self.executor.open(request)
        self.scheduler.add_all(requests, first.submitted)
        first.context.run(self.watchers.came, requests, first.submitted)

    def closed(self, end: Finished) -> Finished:
        """
        Close the request that has ended, and tell watchers; returns all that is known of the end.

        Watchers hear of the end before its reader does.
        """
        sampler = self.executor.close(end.request_id)
        record = self.records.get(end.request_id)
        if record is not None:  # else a program has used the scheduler itself
            record.context.run(self.watchers.ended, record.request, end)
        return end if sampler is None else replace(end, sampler=sampler)

    def withdraw(self, request_id: int) -> bool:
        """Free what take_on() made. True: its last event does that, and will come."""
        # The scheduler has it already, so its end comes as an event.
        if self.cancel(request_id):
            return True
        self.records.pop(request_id, None)
        try:
            self.executor.close(request_id)
        except BaseException:  # noqa: BLE001 - it is told in the log
            _log.exception("request %d left something behind", request_id)
        return False

    def cancel(
        self, request_id: int, reason: FinishReason = FinishReason.CANCELLED
    ) -> bool:
        """End a request before the next step; False if it has ended already."""
        return self.scheduler.cancel(request_id, self.clock(), reason)

    def fail(self, request_id: int, error: PyllamaError) -> bool:
        """End a request by *error*, before the next step; False if it has ended already."""
        return self.scheduler.fail(request_id, error, self.clock())
