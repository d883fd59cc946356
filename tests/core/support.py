"""Requests, schedulers and a loop for tests of the core; no thread, no model."""

from array import array
from collections.abc import Callable, Collection, Iterable

from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import Event, Finished, Request, TokenLogprobs
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import (
    Computed,
    Lost,
    Output,
    Sampled,
    Scored,
    ScoredPrefill,
    StepPlan,
    StepResult,
    Work,
)
from pyllama_raw.engine.driver import Driver

STOP_TOKEN = 2


class Pieces(dict[int, bytes]):
    """Token 97 reads "a"; every token has one letter or byte."""

    def __missing__(self, token: int) -> bytes:
        return bytes([token % 256])


def make_request(request_id=0, n_prompt=4, max_tokens=4, **fields) -> Request:
    tokens = array("i", range(100, 100 + n_prompt))
    fields.setdefault("stop_token_ids", frozenset({STOP_TOKEN}))
    return Request(request_id, tokens, max_tokens, **fields)


def make_scheduler(
    n_slots=2,
    n_ctx_slot=64,
    n_batch=64,
    n_cells=None,
    *,
    unified=True,
    deterministic=False,
    n_parked=0,
    kind=SnapshotKind.RANGE,
    n_outputs=None,
    n_swa=0,
    n_ubatch=0,
    **options,
) -> Scheduler:
    limits = ContextLimits(
        n_slots,
        n_ctx_slot,
        n_batch,
        n_slots * n_ctx_slot if n_cells is None else n_cells,
        n_parked=n_parked,
        unified=unified,
        deterministic=deterministic,
        kind=kind,
        n_outputs=n_outputs,
        n_swa=n_swa,
        n_ubatch=n_ubatch,
    )
    options.setdefault("token_budget", n_batch)
    return Scheduler(limits, Pieces(), **options)


def answer(plan: StepPlan, token: int = 97) -> StepResult:
    """All rows sample *token*."""
    return StepResult(outputs=tuple(output(work, token) for work in plan.works))


def output(work: Work, *tokens: int, lost: Collection[int] = ()) -> Output:
    """*work* samples *tokens*; its slot may be one of the *lost* ones."""
    if work.slot in lost:
        return Lost()
    sampled = Sampled(tokens) if work.samples else Computed()
    if isinstance(work, ScoredPrefill):
        first = work.pos + work.n_plain + 1
        return Scored(score(first, work.targets), sampled)
    return sampled


def score(index: int, tokens: Iterable[int]) -> tuple[TokenLogprobs, ...]:
    """The log-probability of the token with that index is -index."""
    return tuple(TokenLogprobs(t, -float(i), ()) for i, t in enumerate(tokens, index))


class Answering:
    """An executor that computes nothing; checks the scheduler's laws on the way."""

    def __init__(
        self, scheduler: Scheduler, execute: Callable[[StepPlan], StepResult] = answer
    ) -> None:
        self.plans: list[StepPlan] = []  # those with works
        self.now = 0.0  # between a plan and its result half a second passes
        self._scheduler = scheduler
        self._execute = execute

    def clock(self) -> float:
        return self.now

    def open(self, request: Request) -> None: ...

    def close(self, request_id: int) -> None: ...

    def stop(self, request_id: int | None = None) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        self._scheduler.check_integrity()
        self.now += 0.5
        if not plan.works:
            return StepResult()
        self.plans.append(plan)
        return self._execute(plan)


def run_until_idle(
    scheduler: Scheduler,
    execute: Callable[[StepPlan], StepResult] = answer,
    max_steps: int = 1000,
) -> tuple[list[StepPlan], list[Event]]:
    """Step until nothing is left; returns the plans with works and all events."""
    events: list[Event] = []
    executor = Answering(scheduler, execute)
    driver = Driver(scheduler, executor, executor.clock, events.extend)
    for now in range(max_steps):
        executor.now = float(now)
        if not driver.step():
            return executor.plans, events
        scheduler.check_integrity()
    raise AssertionError("not idle")


def finished(events: list[Event]) -> dict[int, Finished]:
    """The last event of each request; fails if one ended twice."""
    ends = [event for event in events if isinstance(event, Finished)]
    by_id = {end.request_id: end for end in ends}
    assert len(by_id) == len(ends)
    return by_id


def step(scheduler, now=0.0, token=97):
    """One plan and the events of its step."""
    plan = scheduler.schedule(now)
    return plan, scheduler.apply(plan, answer(plan, token), now)


def shape(plan):
    return [(w.slot, w.pos, len(w.tokens), w.samples) for w in plan.works]
