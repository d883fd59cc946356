from array import array
from dataclasses import astuple

import pytest

from pyllama_raw.core.costs import StepCost
from pyllama_raw.core.request import (
    FinishReason,
    LengthLimit,
    NewTokens,
    Span,
    StopString,
    StopToken,
)
from pyllama_raw.core.step import Release, Shift
from pyllama_raw.core.text import StopStrings
from pyllama_raw.errors import PromptTooLong, WaitedTooLong
from tests.core.support import (
    STOP_TOKEN,
    answer,
    finished,
    make_request,
    make_scheduler,
    run_until_idle,
    shape,
    step,
)

A = ord("a")  # its token and piece


def test_one_request_prefills_then_decodes():
    """
    A prompt is one chunk with one output row; then each step feeds the last token.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(n_prompt=4, max_tokens=3), 0.0)

    plans, events = run_until_idle(scheduler)

    assert [shape(p) for p in plans] == [
        [(0, 0, 4, True)],
        [(0, 4, 1, True)],
        [(0, 5, 1, True)],
    ]
    assert [e.tokens for e in events if type(e) is NewTokens] == [(97,)] * 3
    assert finished(events)[0].reason is FinishReason.LENGTH


def test_long_prompt_is_prefilled_in_chunks():
    """
    A prompt longer than the budget takes several steps; only the last samples.
    """
    scheduler = make_scheduler(token_budget=4)
    scheduler.add(make_request(n_prompt=10, max_tokens=1), 0.0)

    plans, _ = run_until_idle(scheduler)

    assert [shape(p) for p in plans] == [
        [(0, 0, 4, False)],
        [(0, 4, 4, False)],
        [(0, 8, 2, True)],
    ]


def test_decodes_come_first_and_prefill_never_starves():
    """
    With more streams than budget each stream advances and a prompt still gets tokens.
    """
    scheduler = make_scheduler(n_slots=4, token_budget=2)
    for request_id in range(3):
        scheduler.add(make_request(request_id, n_prompt=1, max_tokens=9), 0.0)
    step(scheduler)
    scheduler.add(make_request(3, n_prompt=5), 1.0)

    plan, _ = step(scheduler)

    assert shape(plan) == [
        (0, 1, 1, True),
        (1, 1, 1, True),
        (2, 1, 1, True),
        (3, 0, 1, False),
    ]


def test_prompts_take_turns_of_one_quantum():
    """
    A long prompt gives way after its quantum; the turn goes on where it ended.
    """
    scheduler = make_scheduler(
        n_slots=3, token_budget=4, prefill_order="turns", prefill_quantum=6
    )
    for request_id in range(3):
        scheduler.add(make_request(request_id, n_prompt=12, max_tokens=1), 0.0)

    plans, _ = run_until_idle(scheduler)

    assert [[(c.slot, len(c.tokens)) for c in p.works] for p in plans[:5]] == [
        [(0, 4)],
        [(0, 2), (1, 2)],
        [(1, 4)],
        [(2, 4)],
        [(0, 2), (2, 2)],
    ]


def test_waiting_requests_start_by_priority_then_arrival():
    """
    The lowest priority number starts first; equals in order of arrival.
    """
    scheduler = make_scheduler(n_slots=1)
    for request_id, priority in enumerate([1, 0, 1, 0]):
        scheduler.add(make_request(request_id, max_tokens=1, priority=priority), 0.0)

    _, events = run_until_idle(scheduler)

    assert list(finished(events)) == [1, 3, 0, 2]


def test_a_prompt_without_room_for_output_is_refused():
    """
    A prompt as long as the slot cannot be served.
    """
    scheduler = make_scheduler(n_ctx_slot=8)

    with pytest.raises(PromptTooLong) as caught:
        scheduler.add(make_request(n_prompt=8), 0.0)

    assert (caught.value.n_prompt, caught.value.n_ctx_slot) == (8, 8)
    assert not scheduler.alive


def test_a_blocked_head_is_overtaken_a_bounded_number_of_times():
    """
    Small requests pass a head that lacks cells, but only max_overtakes of them.
    """
    scheduler = make_scheduler(n_slots=8, n_ctx_slot=64, n_cells=64, max_overtakes=2)
    scheduler.add(make_request(0, n_prompt=30, max_tokens=9), 0.0)
    step(scheduler)
    scheduler.add(make_request(1, n_prompt=40), 0.0)
    for request_id in range(2, 6):
        scheduler.add(make_request(request_id, n_prompt=2, max_tokens=1), 0.0)

    scheduler.schedule(1.0)

    assert (scheduler.stats().running, scheduler.stats().waiting) == (3, 3)


def test_a_stop_token_ends_the_request():
    """
    The token that ends output is counted and shown as an id.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(), 0.0)

    _, events = step(scheduler, token=STOP_TOKEN)

    assert events[0] == NewTokens(0, (STOP_TOKEN,))
    assert (events[1].reason, events[1].n_output) == (FinishReason.STOP, 1)


def test_a_stop_string_ends_the_request():
    """
    The token that completes a stop string is the last one, also when tokens split it.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(stop=StopStrings((b"aa",)), max_tokens=9), 0.0)

    _, events = run_until_idle(scheduler)

    assert (finished(events)[0].reason, finished(events)[0].n_output) == ("stop", 2)


@pytest.mark.parametrize(
    ("options", "token", "reason", "detail"),
    [
        ({}, STOP_TOKEN, "stop", StopToken(STOP_TOKEN)),
        ({"stop": StopStrings((b"x", b"a", b"aa"))}, A, "stop", StopString("a")),
        ({"stop": StopStrings((b"aaa", b"aa"))}, A, "stop", StopString("aa")),
        ({"max_tokens": 2}, A, "length", LengthLimit.MAX_TOKENS),
        ({"max_tokens": 4}, A, "length", LengthLimit.MAX_TOKENS),
        ({"max_tokens": 5}, A, "length", LengthLimit.SLOT),
        ({"max_tokens": 1, "stop": StopStrings((b"a",))}, A, "stop", StopString("a")),
    ],
)
def test_the_end_tells_what_brought_it(options, token, reason, detail):
    """
    Which token, which string, or which limit; a stop goes before a limit met with it.
    """
    scheduler = make_scheduler(n_ctx_slot=8)
    scheduler.add(make_request(n_prompt=4, **{"max_tokens": 99} | options), 0.0)
    events = []
    while not finished(events):
        events += step(scheduler, token=token)[1]

    end = finished(events)[0]
    assert (end.reason, end.detail) == (reason, detail)


def test_a_request_that_was_left_has_no_detail():
    """
    No stop and no limit ended it, whatever it was near to.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(max_tokens=9), 0.0)
    step(scheduler)
    scheduler.cancel(0, 1.0)

    end = finished(scheduler.take_events())[0]

    assert (end.reason, end.detail) == (FinishReason.CANCELLED, None)


def test_a_full_slot_ends_the_request():
    """
    Prompt and output together never pass n_ctx_slot.
    """
    scheduler = make_scheduler(n_ctx_slot=8)
    scheduler.add(make_request(n_prompt=4, max_tokens=99), 0.0)

    _, events = run_until_idle(scheduler)

    assert finished(events)[0].n_output == 4
    assert finished(events)[0].reason is FinishReason.LENGTH


def test_a_full_slot_shifts_if_told_to():
    """
    With context_full="shift" the older half goes and the request continues.
    """
    scheduler = make_scheduler(n_ctx_slot=8, context_full="shift", n_keep=1)
    scheduler.add(make_request(n_prompt=4, max_tokens=12), 0.0)

    plans, events = run_until_idle(scheduler)

    assert [p.moves for p in plans if p.moves] == [(Shift(0, 1, 3),)] * 3
    assert finished(events)[0].n_output == 12
    assert scheduler.stats().shifted == 3


def test_nothing_left_to_shift_ends_the_request():
    """
    A slot that is all n_keep cannot shift.
    """
    scheduler = make_scheduler(n_ctx_slot=8, context_full="shift", n_keep=7)
    scheduler.add(make_request(n_prompt=4, max_tokens=12), 0.0)

    _, events = run_until_idle(scheduler)

    assert finished(events)[0].reason is FinishReason.LENGTH


def test_cancel_frees_the_slot_for_the_next_step():
    """
    A cancelled request gives its slot to the next one, cleared, in one step.
    """
    scheduler = make_scheduler(n_slots=1)
    scheduler.add(make_request(0), 0.0)
    scheduler.add(make_request(1), 0.0)
    step(scheduler)

    assert scheduler.cancel(0, 1.0)
    assert not scheduler.cancel(0, 1.0)
    plan = scheduler.schedule(1.0)

    assert plan.moves == (Release(0),)
    assert shape(plan) == [(0, 0, 4, True)]
    assert finished(scheduler.take_events())[0].reason is FinishReason.CANCELLED


def test_cancel_while_waiting():
    """
    A request that never had a slot ends too, with nothing to clear.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(), 0.0)

    scheduler.cancel(0, 1.0)

    assert not scheduler.schedule(1.0)
    assert finished(scheduler.take_events())[0].timings.admitted is None


def test_cancel_while_its_step_runs():
    """
    What a step computed for a request that ended meanwhile is dropped.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(0), 0.0)
    scheduler.add(make_request(1), 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.cancel(0, 0.5)

    events = scheduler.apply(plan, answer(plan), 1.0)

    assert [e.request_id for e in events] == [0, 1]
    assert scheduler.schedule(2.0).moves == (Release(0),)


def test_deadlines_end_waiting_and_running_requests():
    """
    A request past its deadline ends with what it has; the next deadline is known.
    """
    scheduler = make_scheduler(n_slots=1)
    scheduler.add(make_request(0, deadline=5.0, max_tokens=9), 0.0)
    scheduler.add(make_request(1, deadline=3.0), 0.0)
    scheduler.add(make_request(2, max_tokens=1), 0.0)
    scheduler.add(make_request(3, deadline=1.0), 0.0)
    step(scheduler)
    scheduler.cancel(3, 0.0)

    assert scheduler.next_deadline == 3.0
    step(scheduler, now=3.0)
    assert scheduler.next_deadline == 5.0
    _, events = step(scheduler, now=5.0)

    assert scheduler.next_deadline is None
    ends = finished(events)
    assert (ends[0].reason, ends[0].n_output) == (FinishReason.DEADLINE, 2)


def test_a_request_waits_for_a_slot_as_long_as_it_says():
    """
    It ends with an error that has the knob, the seconds and the limit. One that has had a
    slot goes on, and a deadline that is over, too, comes first.
    """
    scheduler = make_scheduler(n_slots=1)
    scheduler.add(make_request(0, max_wait_s=1.0, max_tokens=9), 0.0)
    scheduler.add(make_request(1, max_wait_s=2.0), 0.5)
    scheduler.add(make_request(2, max_wait_s=2.0, deadline=3.0), 0.5)
    step(scheduler, now=0.5)

    assert scheduler.next_deadline == 1.0
    _, events = step(scheduler, now=3.5)

    ends = finished(events)
    error = ends[1].error
    assert isinstance(error, WaitedTooLong)
    assert (error.knob, error.value, error.limit) == ("max_wait_s", 3.0, 2.0)
    assert ends[2].reason is FinishReason.DEADLINE
    assert 0 not in ends


def test_expired_ids_of_ended_requests_are_ignored():
    """
    A deadline that passes after its request ended does nothing.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(0, deadline=1.0), 0.0)
    scheduler.cancel(0, 0.5)

    scheduler.schedule(2.0)

    assert len(finished(scheduler.take_events())) == 1


def test_the_budget_follows_the_measured_speed():
    """
    A step with streams holds what the machine computes in target_step_s.
    """
    scheduler = make_scheduler(
        n_ctx_slot=4096, n_batch=2048, token_budget=None, target_step_s=0.5
    )
    scheduler.add(make_request(0, n_prompt=1, max_tokens=99), 0.0)
    scheduler.add(make_request(1, n_prompt=4000, max_tokens=1, priority=1), 0.0)
    sizes = []
    for now in range(4):
        plan = scheduler.schedule(float(now))
        sizes.append(plan.n_tokens)
        scheduler.apply(plan, answer(plan), now + plan.n_tokens / 256)

    assert sizes == [64, 128, 128, 128]


def test_a_formula_of_steps_is_learned_and_told():
    """
    Of all steps, those of streams, too: from then on the budget is what it allows.
    """
    scheduler = make_scheduler(
        n_ctx_slot=4096, n_batch=2048, token_budget=None, target_step_s=0.5
    )
    scheduler.add(make_request(0, n_prompt=1, max_tokens=99), 0.0)
    machine, now = StepCost(0.1, 0.001, 0.0, 0, 0.001), 0.0
    for request_id in (1, 2):
        scheduler.add(make_request(request_id, n_prompt=600, max_tokens=1), now)
        for _ in range(5):
            plan = scheduler.schedule(now)
            now += machine.seconds(plan.n_tokens)
            scheduler.apply(plan, answer(plan), now)
    scheduler.add(make_request(3, n_prompt=4000, max_tokens=1), now)

    plan = scheduler.schedule(now)

    cost = scheduler.stats().step_cost
    assert astuple(cost)[:2] == pytest.approx((0.1, 0.001), rel=0.01)
    assert plan.n_tokens == 400


def test_a_step_that_was_begun_ahead_takes_what_its_decode_took():
    """
    When it was planned most of it had run.
    """
    scheduler = make_scheduler(token_budget=None)
    scheduler.add(make_request(0, n_prompt=8, max_tokens=9), 0.0)
    plan = scheduler.schedule(0.0)
    result = answer(plan)._replace(decode_s=0.75, sample_s=0.25)

    scheduler.apply(plan, result, 0.125)

    assert scheduler.stats().step_cost.seconds(8, 1) == pytest.approx(1.0)


def test_rows_of_images_leave_streams_half_of_the_target():
    """
    A stream then goes on in every second step: both together take target_step_s.
    """
    scheduler = make_scheduler(
        n_ctx_slot=4096, n_batch=2048, token_budget=None, target_step_s=0.5
    )
    scheduler.add(make_request(0, n_prompt=1, max_tokens=99), 0.0)
    shows = make_request(1, n_prompt=4000, max_tokens=1, spans=(Span(0, 3990, 99),))
    shows.tokens[:3990] = array("i", [-1] * 3990)
    scheduler.add(shows, 0.0)
    sizes = []
    for now in range(6):
        plan = scheduler.schedule(float(now))
        sizes.append(plan.n_tokens)
        scheduler.apply(plan, answer(plan), now + plan.n_tokens / 512)

    assert sizes == [1, 64, 1, 128, 1, 128]


def test_split_memory_counts_no_cells():
    """
    In split memory a slot's own size is the only limit.
    """
    scheduler = make_scheduler(n_slots=2, n_ctx_slot=8, unified=False)
    for request_id in range(2):
        scheduler.add(make_request(request_id, n_prompt=7, max_tokens=9), 0.0)

    _, events = run_until_idle(scheduler)

    assert [end.n_output for end in finished(events).values()] == [1, 1]
    assert scheduler.stats().preempted == 0


def test_timings_are_moments_of_the_engine_clock():
    """
    Submitted, admitted, first token and the gaps between tokens.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(max_tokens=3), -1.0)

    _, events = run_until_idle(scheduler)

    timings = finished(events)[0].timings
    assert (timings.submitted, timings.admitted) == (-1.0, 0.0)
    assert (timings.first_token, timings.finished) == (0.5, 2.5)
    assert timings.itl == (1.0, 1.0)


def test_requests_do_not_share_tokens_with_their_caller():
    """
    The scheduler's copy grows; the request's prompt does not.
    """
    scheduler = make_scheduler()
    request = make_request(n_prompt=4)
    scheduler.add(request, 0.0)

    run_until_idle(scheduler)

    assert request.tokens == array("i", [100, 101, 102, 103])


def test_split_batches_hold_streams_or_one_prompt():
    """
    Where a batch must not mix, streams and prompts take turns, a prompt at a time.
    """
    scheduler = make_scheduler(n_slots=3, token_budget=4, deterministic=True)
    scheduler.add(make_request(0, n_prompt=1, max_tokens=5), 0.0)
    step(scheduler)
    for request_id in (1, 2):
        scheduler.add(make_request(request_id, n_prompt=4, max_tokens=1), 0.0)

    plans, _ = run_until_idle(scheduler)

    assert [shape(plan) for plan in plans] == [
        [(1, 0, 4, True)],
        [(0, 1, 1, True)],
        [(2, 0, 4, True)],
        [(0, 2, 1, True)],
        [(0, 3, 1, True)],
        [(0, 4, 1, True)],
    ]


def test_no_graph_of_a_prompt_has_a_single_token():
    """
    A prompt that is a micro-batch and one token longer takes two steps.
    """
    scheduler = make_scheduler(n_ubatch=16)
    scheduler.add(make_request(n_prompt=33, max_tokens=1), 0.0)

    plans, _ = run_until_idle(scheduler)

    assert [shape(p) for p in plans] == [[(0, 0, 31, False)], [(0, 31, 2, True)]]


def test_a_scheduler_without_sources_has_no_reading_to_lose():
    """
    What runs goes on as if nothing had been.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(0, n_prompt=2, max_tokens=2), 0.0)

    scheduler.lose_reading()

    assert len(scheduler.schedule(0.0).works) == 1
