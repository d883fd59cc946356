"""
An engine without its thread: a scheduler, an executor, and the loop around the two.

The engine thread owns one; tests, benchmarks and simulators drive it themselves. The clock
may be any that does not go back: it is read before a step is planned and after it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from logging import getLogger

from pyllama_raw.core.request import Event, Finished, FinishReason, Request
from pyllama_raw.core.scheduling.roster import SlotChange
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import Executor, StepPlan
from pyllama_raw.engine.requests import OpenRequest, OpenRequests
from pyllama_raw.engine.step_log import step_record
from pyllama_raw.engine.watcher import Watcher, Watchers
from pyllama_raw.errors import PyllamaError

_log = getLogger(__name__)


class Driver:
    """
    Runs requests, a step at a time, in the thread of its caller.

    Args:
        tell: called with new events, before a step with those that do not wait for it;
            and whether one of them is the last of its request.
        opened: has all requests that have not ended; None: one of its own.
        watchers: are told what becomes of requests and steps; one that raises is let go of.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        tell: Callable[[list[Event], bool], None],
        *,
        opened: OpenRequests | None = None,
        watchers: Iterable[Watcher] = (),
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.opened = OpenRequests() if opened is None else opened
        self.watchers = Watchers(watchers)
        self.last_step_at: float | None = None  # when its result was taken in
        self._begun: StepPlan | None = None  # the executor has not returned from it
        self._tell = tell
        self._n_preempted = 0  # since the last step
        scheduler.watch(self._changed)

    def add(self, requests: Iterable[Request], submitted: float) -> None:
        """As take_on(), for requests that have no records yet."""
        opened = [OpenRequest(request, submitted) for request in requests]
        self.opened.add(opened)
        self.take_on(opened)

    def take_on(self, opened: Sequence[OpenRequest]) -> None:
        """
        Take on requests of one caller, submitted together.

        If that raises anything, withdraw() all of them.
        """
        requests, first = [each.request for each in opened], opened[0]
        self.open(requests)
        self.scheduler.add_all(requests, first.submitted)
        first.context.run(self.watchers.came, requests, first.submitted)

    def open(self, requests: Iterable[Request]) -> None:
        """Build the samplers of *requests*, which come to the scheduler later."""
        for request in requests:
            self.executor.open(request)

    def withdraw(self, request_id: int) -> bool:
        """Free what add() or open() made; True: that is done by the last event, which comes."""
        if self.cancel(request_id):
            return True
        self.opened.pop(request_id, None)
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

    def step(self) -> bool:
        """Plan a step, run it, tell what came of it; False if there was nothing to do."""
        start = self.clock()
        plan = self.scheduler.schedule(start)
        told = self.tell_rest()
        if plan:
            self._run(plan, start)
        return bool(plan) or told

    def expire(self) -> bool:
        """Without a step: end requests past their deadline; False if nothing was told."""
        self.scheduler.expire(self.clock())
        return self.tell_rest()

    @property
    def is_failed_by_executor(self) -> bool:
        """Whether the exception that step() raised came from the executor."""
        return self._begun is not None

    def give_up_step(self, error: PyllamaError) -> None:
        """After such an exception, when the executor has another context: all go on."""
        assert self._begun is not None
        plan, self._begun = self._begun, None
        self._report(self.scheduler.give_up(plan, error, self.clock()))

    def tell_rest(self) -> bool:
        """Tell what does not wait for a step; False if there is nothing."""
        events = self.scheduler.take_events()
        if events:
            self._report(events)
        return bool(events)

    def last_steps(self) -> Iterator[None]:
        """Write idle slots to files when no request is left, one step for each item."""
        for plan in self.scheduler.last_plans():
            self._run(plan, self.clock())
            yield

    def _run(self, plan: StepPlan, start: float) -> None:
        planned = self.clock()
        warms_up = self.watchers.wants_steps and any(
            self.opened.warms_up(work.request_id) for work in plan.works
        )
        self._begun = plan
        result = self.executor.execute(plan)
        self._begun = None
        self.last_step_at = end = self.clock()
        self._report(self.scheduler.apply(plan, result, end))
        n_preempted, self._n_preempted = self._n_preempted, 0
        if self.watchers.wants_steps:
            record = step_record(
                plan,
                result,
                self.scheduler.occupancy,
                at_s=start,
                seconds=end - start,
                host_s=planned - start + self.clock() - end,
                n_preempted=n_preempted,
                warms_up=warms_up,
            )
            self.watchers.stepped(record)

    def _changed(self, change: SlotChange, request_id: int, now: float) -> None:
        self._n_preempted += change == "preempted"
        self.watchers.changed(change, request_id, now)

    def _report(self, events: list[Event]) -> None:
        """Close the requests that have ended, then tell."""
        ended = [i for i, event in enumerate(events) if type(event) is Finished]
        for index in ended:
            end = events[index]
            assert isinstance(end, Finished)
            used = self.executor.close(end.request_id)
            if used is not None:
                events[index] = replace(end, sampler=used)
            opened = self.opened.get(end.request_id)
            if opened is not None:  # else a program has used the scheduler itself
                opened.context.run(self.watchers.ended, opened.request, end)
        self._tell(events, bool(ended))
        for index in ended:  # tell() takes those out whose readers know of the end
            self.opened.pop(events[index].request_id, None)
