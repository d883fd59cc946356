"""How requests for vectors end, and what fails alone."""

import pytest

from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.request import Embedded, FinishReason
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import (
    DecodeStatus,
    RowFailed,
    StepPlan,
    StepResult,
    Written,
)
from pyllama_raw.errors import EmbeddingFailed, InvalidBatch
from tests.core.embedding_support import (
    ERROR,
    compute,
    ends_of,
    make_request,
    make_scheduler,
    run,
    shown,
)


def test_a_request_can_be_cancelled():
    """
    It ends at once, also with a part of a text computed; the others go on.
    """
    scheduler = make_scheduler(
        make_request(1, [25], may_cut=True), make_request(2, [5])
    )
    plan = scheduler.schedule(0.0)
    scheduler.apply(plan, compute(plan), 0.0)

    assert scheduler.cancel(1, 0.0)
    assert not scheduler.cancel(1, 0.0)
    steps, events = run(scheduler)

    assert steps == [[(2, 0, 5)]]
    assert ends_of(events) == {1: FinishReason.CANCELLED, 2: FinishReason.STOP}


def test_a_request_can_be_failed():
    """
    It ends with the error.
    """
    scheduler = make_scheduler(make_request(0, [2]))
    error = InvalidBatch("llama_decode", -1, "as told")

    told = [scheduler.fail(0, error, 1.0), scheduler.fail(0, error, 1.0)]

    assert told == [True, False]
    assert ends_of(scheduler.take_events()) == {0: error}


def test_a_deadline_ends_a_request():
    """
    It is told with the first step after it.
    """
    scheduler = make_scheduler(make_request(1, [5], deadline=3.0))

    assert scheduler.next_deadline == 3.0
    assert not scheduler.schedule(3.0)
    assert ends_of(scheduler.take_events()) == {1: FinishReason.DEADLINE}
    assert scheduler.next_deadline is None


def test_an_aborted_step_is_repeated():
    """
    A text that was cut begins anew, because nobody knows what is left of it.
    """
    scheduler = make_scheduler(make_request(1, [25], may_cut=True))
    plan = scheduler.schedule(0.0)
    scheduler.apply(plan, compute(plan), 0.0)
    plan = scheduler.schedule(0.0)

    scheduler.apply(plan, StepResult(DecodeStatus.ABORTED), 0.0)

    assert shown(scheduler.schedule(0.0)) == [(1, 0, 10)]
    assert scheduler.schedule(0.0).works[0].pos == 0


@pytest.mark.parametrize("status", [DecodeStatus.FAILED, DecodeStatus.INVALID])
def test_after_a_failure_texts_are_computed_alone(status):
    """
    The one that fails again ends its request; all others have their vectors.
    """
    scheduler = make_scheduler(*(make_request(i, [2, 2]) for i in range(3)))
    events = []

    while plan := scheduler.schedule(0.0):
        wrong = any(who == 1 and text == 1 for who, text, _ in shown(plan))
        result = StepResult(status, error=ERROR) if wrong else compute(plan)
        events += scheduler.apply(plan, result, 1.0)

    assert ends_of(events) == {0: FinishReason.STOP, 1: ERROR, 2: FinishReason.STOP}
    assert [
        e.index for e in events if isinstance(e, Embedded) and e.request_id == 1
    ] == [0]
    assert scheduler.stats().failed_steps >= 2


def test_a_row_that_failed_ends_its_request_only():
    """
    Its other texts in the step count for nothing.
    """
    error = EmbeddingFailed()
    scheduler = make_scheduler(make_request(1, [2, 2]), make_request(2, [2, 2]))
    plan = scheduler.schedule(0.0)
    assert shown(plan) == [(1, 0, 2), (2, 0, 2), (1, 1, 2), (2, 1, 2)]
    outputs = (RowFailed(error), *compute(plan).outputs[1:])

    events = scheduler.apply(plan, StepResult(outputs=outputs), 1.0)

    assert ends_of(events) == {1: error, 2: FinishReason.STOP}
    assert scheduler.stats().failed == 1


def test_the_budget_follows_the_speed():
    """
    A step takes half of the target, because streams of others have steps of their own.
    """
    limits = ContextLimits(n_slots=8, n_ctx_slot=100, n_batch=1000, n_cells=1100)
    scheduler = Scheduler(limits, (), target_step_s=1.0)
    scheduler.add_all([make_request(1, [16] * 99)], 0.0)
    sizes = []

    for _ in range(2):
        plan = scheduler.schedule(0.0)
        sizes.append(plan.n_tokens)
        scheduler.apply(plan, compute(plan), plan.n_tokens / 200)

    assert sizes == [64, 96]  # tokens, at 200 a second


def test_stats_count_requests_and_tokens():
    """
    A request runs once it was in a step.
    """
    scheduler = make_scheduler(make_request(1, [9, 9]), make_request(2, [9]))

    before = scheduler.stats()
    plan = scheduler.schedule(0.0)
    scheduler.apply(plan, compute(plan), 1.0)
    after = scheduler.stats()

    assert (before.running, before.waiting, before.waiting_tokens) == (0, 2, 27)
    assert (after.running, after.waiting, after.waiting_tokens) == (1, 1, 9)
    assert (after.submitted, after.steps, after.computed_tokens) == (2, 1, 9)
    assert after.finished["stop"] == 0


def test_nothing_is_kept_of_requests():
    """
    There is no cache, and no file.
    """
    scheduler = make_scheduler()

    assert (scheduler.cache_stats().n_entries, scheduler.clear_cache()) == (0, 0)
    assert (list(scheduler.last_plans()), scheduler.schedule(0.0)) == ([], StepPlan())
    assert scheduler.take_report(Written(1, None)) is None
