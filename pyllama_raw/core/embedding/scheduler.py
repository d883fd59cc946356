"""
Decides which texts become vectors next.

It makes the plans and takes the results that a `Scheduler` does, so executors, drivers and
the engine thread are the same for both. It has no memory: a text is computed in one step, or
in steps that follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from pyllama_raw.core.embedding.packer import TextPacker
from pyllama_raw.core.embedding.progress import Progress
from pyllama_raw.core.embedding.request import EmbedRequest
from pyllama_raw.core.memory.limits import ContextLimits
from pyllama_raw.core.request import Embedded, Event, FinishReason, Request
from pyllama_raw.core.scheduling.budget import StepBudget
from pyllama_raw.core.scheduling.deadlines import Deadlines
from pyllama_raw.core.scheduling.planner import Note, Planner
from pyllama_raw.core.speed import PrefillSpeed
from pyllama_raw.core.stats import Counters, Occupancy, SchedulerStats
from pyllama_raw.core.step import (
    DecodeStatus,
    Fetched,
    RowFailed,
    StepPlan,
    StepResult,
    Vector,
    Written,
)
from pyllama_raw.errors import PyllamaError

# A stream of another engine computes a step of its own between two of ours.
STREAM_SHARE = 0.5  # of target_step_s


class EmbedScheduler(Planner):
    """
    Texts of many requests, a step at a time.

    Args:
        limits: n_slots texts and n_batch tokens a step, n_ctx_slot tokens a text.
        token_budget: of a step; None: what `target_step_s` allows.
    """

    def __init__(
        self,
        limits: ContextLimits,
        *,
        token_budget: int | None = None,
        target_step_s: float = 0.1,
    ) -> None:
        self._limits = limits
        self._speed = PrefillSpeed()
        target_s = STREAM_SHARE * target_step_s
        self._budget = StepBudget(token_budget, target_s, limits.n_batch, self._speed)
        self._packer = TextPacker()
        self._requests: dict[int, Progress] = {}
        self._deadlines = Deadlines()
        self._counters = Counters()
        self._events: list[Event] = []
        self._planned = 0.0
        self._note: Note = lambda *_: None
        self._n_alone = 0  # steps to come with a single text, after one that failed

    @property
    def limits(self) -> ContextLimits:
        return self._limits

    def watch(self, note: Note) -> None:
        """Call *note*, and nobody else, when a request is in a step for the first time."""
        self._note = note

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines.next(self._requests)

    def add_all(self, requests: Iterable[Request], now: float) -> None:
        """Take on *requests*, all of them EmbedRequest, whose texts fit a slot."""
        for request in requests:
            assert isinstance(request, EmbedRequest)
            self._counters.submitted += 1
            progress = self._requests[request.request_id] = Progress(request, now)
            self._packer.add(progress)
            if request.deadline is not None:
                self._deadlines.add(request.deadline, request.request_id)

    def cancel(
        self,
        request_id: int,
        now: float,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> bool:
        """End a request; False if it has ended already."""
        return self._end(request_id, reason, now)

    def fail(self, request_id: int, error: PyllamaError, now: float) -> bool:
        """End a request by *error*; False if it has ended already."""
        return self._end(request_id, error, now)

    def take_events(self) -> list[Event]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    def schedule(self, now: float) -> StepPlan:
        """The next step; empty if there is nothing to do."""
        for request_id in self._deadlines.expired(now):
            self.cancel(request_id, now, FinishReason.DEADLINE)
        self._planned = now
        n_texts = 1 if self._n_alone else self._limits.n_slots
        plan = self._packer.pack(self._budget.limit(streams=True), n_texts)
        for work in plan.works:
            progress = self._requests[work.request_id]
            if not progress.has_begun:
                self._note("running", work.request_id, now)
                progress.begin(now)
        return plan

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[Event]:
        """Take in what came of *plan*; returns all events since the last ones."""
        self._n_alone = max(self._n_alone - 1, 0)
        counters = self._counters
        counters.steps += 1
        match result.status:
            case DecodeStatus.OK:
                counters.computed_tokens += plan.n_tokens
                self._speed.observe(plan.n_tokens, now - self._planned)
                self._take(plan, result, now)
            case DecodeStatus.ABORTED:
                counters.aborted_steps += 1
                self._packer.restart()
            case _:
                counters.failed_steps += 1
                counters.rebuilds += result.status is DecodeStatus.FAILED
                self._packer.restart()
                self._fail(plan, result, now)
        return self.take_events()

    def _take(self, plan: StepPlan, result: StepResult, now: float) -> None:
        served = {}
        for work, output in zip(plan.works, result.outputs, strict=True):
            progress = self._requests.get(work.request_id)
            if progress is None:
                continue  # another of its texts has failed
            served[work.request_id] = progress
            if isinstance(output, Vector):
                index = progress.complete(now)
                self._events.append(Embedded(work.request_id, index, output.values))
                if progress.is_done:
                    self._end(work.request_id, FinishReason.STOP, now)
            elif isinstance(output, RowFailed):
                self._end(work.request_id, output.error, now)
            else:
                progress.advance(len(work.tokens))
        self._packer.served(served.values())

    def _fail(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Nobody knows which text was the cause: each is computed alone."""
        if len(plan.works) > 1:
            self._n_alone = len(plan.works)
        else:
            assert result.error is not None
            self._end(plan.works[0].request_id, result.error, now)

    def _end(
        self, request_id: int, end: FinishReason | PyllamaError, now: float
    ) -> bool:
        """False if it has ended already."""
        progress = self._requests.pop(request_id, None)
        if progress is None:
            return False
        self._packer.remove(progress)
        if isinstance(end, FinishReason):
            self._counters.finished[end] += 1
            self._events.append(progress.end(end, None, now))
        else:
            self._counters.failed += 1
            self._events.append(progress.end(None, end, now))
        return True

    def take_report(self, report: Written | Fetched) -> None:
        """No file is ever asked for."""

    @property
    def occupancy(self) -> Occupancy:
        """Running and waiting requests; nobody keeps any cells."""
        n_running = sum(one.has_begun for one in self._requests.values())
        return Occupancy(n_running, len(self._requests) - n_running, 0)

    def stats(self) -> SchedulerStats:
        """Requests run once they were in a step."""
        counters, requests = self._counters, self._requests.values()
        return SchedulerStats(
            n_slots=self._limits.n_slots,
            running=self.occupancy.n_running,
            waiting=self.occupancy.n_waiting,
            waiting_tokens=sum(
                one.request.n_prompt for one in requests if not one.has_begun
            ),
            n_cells=self._limits.n_cells,
            **asdict(counters),
        )
