"""Steps that fail, are aborted or find no memory."""

from dataclasses import replace

from pyllama_raw.core.request import Finished, FinishReason, Moments, NewTokens
from pyllama_raw.core.step import (
    DecodeStatus,
    Lost,
    PartlyComputed,
    Release,
    RowFailed,
    Sampled,
    StepResult,
    Trim,
)
from pyllama_raw.errors import (
    DecodeFailed,
    NoKVSpace,
    QueueFull,
    SamplingFailed,
)
from tests.core.support import (
    answer,
    finished,
    make_request,
    make_scheduler,
    run_until_idle,
    shape,
    step,
)


def test_lack_of_cells_preempts_the_worst_rank():
    """
    When streams outgrow the pool the last one leaves and is computed again later.
    """
    scheduler = make_scheduler(n_slots=2, n_ctx_slot=512, n_cells=200)
    scheduler.add(make_request(0, n_prompt=10, max_tokens=120), 0.0)
    scheduler.add(make_request(1, n_prompt=10, max_tokens=120), 0.0)

    _, events = run_until_idle(scheduler)

    ends = finished(events)
    assert [ends[i].n_output for i in (0, 1)] == [120, 120]
    assert (ends[0].n_preempted, ends[1].n_preempted) == (0, 1)


def test_no_space_shrinks_prefill_then_preempts_then_ends():
    """
    NO_SPACE halves the prefill, then preempts, and ends only a request that is alone.
    """
    scheduler = make_scheduler(n_slots=2)
    scheduler.add(make_request(0, n_prompt=4), 0.0)
    scheduler.add(make_request(1, n_prompt=4), 0.0)
    sizes = []

    def refuse(plan):
        sizes.append([len(c.tokens) for c in plan.works])
        return StepResult(DecodeStatus.NO_SPACE)

    _, events = run_until_idle(scheduler, refuse)

    assert sizes[:4] == [[4, 4], [4], [2], [1]]
    ends = finished(events)
    assert all(isinstance(end.error, NoKVSpace) for end in ends.values())
    assert scheduler.stats().preempted >= 1


def test_a_request_that_finds_no_space_once_goes_on():
    """
    Alone, it is computed anew, because its cells may have lain badly; it ends the second time.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(0, n_prompt=1, max_tokens=3), 0.0)
    refusals = iter([True])

    def refuse_once(plan):
        if next(refusals, False):
            return StepResult(DecodeStatus.NO_SPACE)
        return answer(plan)

    _, events = run_until_idle(scheduler, refuse_once)

    assert [end.reason for end in finished(events).values()] == [FinishReason.LENGTH]
    assert scheduler.stats().no_space_steps == 1


def test_an_aborted_step_goes_on_from_what_memory_holds():
    """
    After ABORTED the slot continues at its true position, the last two tokens once more.
    """
    scheduler = make_scheduler(n_slots=3)
    for request_id in range(3):
        scheduler.add(make_request(request_id, n_prompt=4), 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.cancel(2, 0.0)
    result = StepResult(
        DecodeStatus.ABORTED, (PartlyComputed(3), PartlyComputed(4), PartlyComputed(4))
    )

    scheduler.apply(plan, result, 1.0)
    plan = scheduler.schedule(2.0)

    assert plan.moves == (Release(2), Trim(0, 2), Trim(1, 2))
    assert [(w.slot, w.pos) for w in plan.works] == [(0, 2), (1, 2)]


def test_an_aborted_step_that_lost_a_slot_begins_anew():
    """
    What was lost with the step is computed from its first token.
    """
    scheduler = make_scheduler(n_slots=1)
    scheduler.add(make_request(0, n_prompt=4), 0.0)
    plan = scheduler.schedule(0.0)

    scheduler.apply(plan, StepResult(DecodeStatus.ABORTED, (Lost(),)), 1.0)
    plan = scheduler.schedule(2.0)

    assert [(w.slot, w.pos, len(w.tokens)) for w in plan.works] == [(0, 0, 4)]


def test_a_failed_step_rewinds_all():
    """
    The context is new after FAILED, so those outside the batch start over, too.
    """
    scheduler = make_scheduler(n_slots=2, token_budget=4, prefill_quantum=4)
    scheduler.add(make_request(0, n_prompt=8), 0.0)
    scheduler.add(make_request(1, n_prompt=8, max_tokens=1), 0.0)
    step(scheduler)
    plan = scheduler.schedule(0.0)
    error = DecodeFailed("llama_decode", -3, "injected")

    events = scheduler.apply(plan, StepResult(DecodeStatus.FAILED, error=error), 1.0)

    assert events == []
    plan = scheduler.schedule(2.0)
    assert plan.moves == ()
    assert [work.pos for work in plan.works] == [0]


def test_a_row_that_cannot_be_sampled_ends_its_request_only():
    """
    A sampler's failure has its request's name on it; the other row goes on.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(0), 0.0)
    scheduler.add(make_request(1), 0.0)
    plan = scheduler.schedule(0.0)
    error = SamplingFailed("llama_sampler_sample", None, "injected")
    result = StepResult(outputs=(RowFailed(error), Sampled((97,))))

    events = scheduler.apply(plan, result, 1.0)

    assert events[0].error is error
    assert events[1] == NewTokens(1, (97,))


def test_no_space_for_requests_that_ended_meanwhile():
    """
    NO_SPACE for a step whose requests were all cancelled has nobody to preempt.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(n_prompt=1), 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.cancel(0, 0.0)

    scheduler.apply(plan, StepResult(DecodeStatus.NO_SPACE), 1.0)

    assert not scheduler.alive


def test_an_aborted_chunk_leaves_two_tokens():
    """
    Where a single token would get other last digits.
    """
    scheduler = make_scheduler(deterministic=True)
    scheduler.add(make_request(0, n_prompt=10), 0.0)
    plan = scheduler.schedule(0.0)

    aborted = StepResult(DecodeStatus.ABORTED, (PartlyComputed(9),))
    scheduler.apply(plan, aborted, 0.0)

    assert shape(scheduler.schedule(0.0)) == [(0, 8, 2, True)]


def test_an_end_says_why_in_one_word():
    """
    The finish reason, or the code of the error.
    """
    moments = Moments(0.0, None, None, 1.0, ())
    stopped = Finished(0, FinishReason.STOP, None, 1, 0, 0, None, 0, moments)
    failed = replace(stopped, reason=None, error=QueueFull("max_waiting", 9, 8))

    assert (stopped.why, failed.why) == ("stop", "queue_full")
