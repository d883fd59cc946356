"""Texts to be embedded, and what a model would make of them."""

from array import array
from itertools import accumulate

from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.request import EmbedRequest, Finished, Lot
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import (
    Computed,
    Encode,
    StepPlan,
    StepResult,
    Vector,
)
from pyllama_raw.errors import InvalidBatch

BUDGET = 10
ERROR = InvalidBatch("llama_decode", -1, "no")
MEAN, LAST = (Lot(name, makes_vectors=True) for name in ("mean", "last"))


def make_request(
    request_id: int, sizes: list[int], *, may_cut: bool = False, **fields
) -> EmbedRequest:
    """Texts of *sizes*; a token tells its request, its text and its place."""
    tokens = [
        request_id * 10_000 + text * 100 + place
        for text, size in enumerate(sizes)
        for place in range(size)
    ]
    ends = tuple(accumulate(sizes))
    fields.setdefault("lot", MEAN)
    return EmbedRequest(
        request_id, array("i", tokens), ends=ends, may_cut=may_cut, **fields
    )


def make_scheduler(
    *requests: EmbedRequest, n_slots: int = 8, budget: int | None = BUDGET
) -> Scheduler:
    limits = ContextLimits(n_slots=n_slots, n_ctx_slot=100, n_batch=40, n_cells=140)
    scheduler = Scheduler(limits, (), token_budget=budget)
    scheduler.add_all(requests, 0.0)
    return scheduler


def compute(plan: StepPlan) -> StepResult:
    """The vector of a text is the tokens of its last run."""
    outputs = tuple(
        Vector(work.tokens.tobytes()) if work.is_last else Computed()
        for work in plan.works
        if isinstance(work, Encode)
    )
    return StepResult(outputs=outputs)


def shown(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Request, text and tokens of each work, which are those of its slot."""
    assert [work.slot for work in plan.works] == list(range(len(plan.works)))
    return [
        (work.request_id, work.tokens[0] % 10_000 // 100, len(work.tokens))
        for work in plan.works
    ]


def run(scheduler: Scheduler) -> tuple[list[list[tuple[int, int, int]]], list]:
    """All steps and all events."""
    steps, events = [], scheduler.take_events()
    while plan := scheduler.schedule(0.0):
        steps.append(shown(plan))
        events += scheduler.apply(plan, compute(plan), 1.0)
    return steps, events


def ends_of(events: list) -> dict[int, object]:
    """Why each request ended."""
    ends = [event for event in events if isinstance(event, Finished)]
    return {end.request_id: end.error or end.reason for end in ends}
