"""
An engine without its thread: a scheduler, an executor, and the loop around the two.

The engine thread owns one; tests, benchmarks and simulators drive it themselves. The clock
may be any that does not go back: it is read before a step is planned and after it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from logging import getLogger

from pyllama_raw.core.request import Event, Finished, FinishReason, Request
from pyllama_raw.core.scheduling.planner import Planner
from pyllama_raw.core.step import Executor, StepPlan
from pyllama_raw.engine.step_log import StepLog
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.engine.watchers import Watchers
from pyllama_raw.errors import PyllamaError

_log = getLogger(__name__)


class Driver:
    """
    Runs requests, a step at a time, in the thread of its caller.

    Args:
        tell: called with new events, before a step with those that do not wait for it;
            and whether one of them is the last of its request.
        log: gets a record of each step.
        watchers: are told what becomes of requests.

    A log or a watcher that raises is let go of.
    """

    def __init__(
        self,
        scheduler: Planner,
        executor: Executor,
        clock: Callable[[], float],
        tell: Callable[[list[Event], bool], None],
        *,
        log: StepLog | None = None,
        watchers: Iterable[Watcher] = (),
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.log = log
        self.watchers = Watchers(watchers)
        self.last_step_at: float | None = None  # when its result was taken in
        self._tell = tell
        scheduler.watch(self.watchers.changed)

    def add(self, requests: Iterable[Request], submitted: float) -> None:
        """Take on *requests*. If that raises anything, withdraw() all of them."""
        requests = tuple(requests)
        for request in requests:
            self.executor.open(request)
        self.scheduler.add_all(requests, submitted)
        self.watchers.came(requests, submitted)

    def withdraw(self, request_id: int) -> bool:
        """Free what add() made; True: that is done by the last event, which comes."""
        if self.cancel(request_id):
            return True
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

    def media_ready(self, request_id: int, n_spans: int) -> bool:
        """The rows of its first *n_spans* spans are there; False if it has ended already."""
        return self.scheduler.media_ready(request_id, n_spans)

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
        if self.log is not None:
            self._run_logged(plan, start, self.log)
            return
        result = self.executor.execute(plan)
        self.last_step_at = end = self.clock()
        self._report(self.scheduler.apply(plan, result, end))

    def _run_logged(self, plan: StepPlan, start: float, log: StepLog) -> None:
        """As _run(); the clock is read twice more."""
        planned = self.clock()
        result = self.executor.execute(plan)
        self.last_step_at = end = self.clock()
        self._report(self.scheduler.apply(plan, result, end))
        host_s = planned - start + self.clock() - end
        step = (plan, self.scheduler, start, end)
        if not self.watchers.works(log, log.add, *step, result=result, host_s=host_s):
            self.log = None

    def _report(self, events: list[Event]) -> None:
        """Close who has ended, then tell."""
        ended = [i for i, event in enumerate(events) if type(event) is Finished]
        for index in ended:
            end = events[index]
            assert isinstance(end, Finished)
            used = self.executor.close(end.request_id)
            if used is not None:
                events[index] = replace(end, sampler=used)
            self.watchers.ended(end)
        self._tell(events, bool(ended))
