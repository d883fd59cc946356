"""How far a plan may be continued before it is asked for."""

import pytest

from pyllama_raw.core.request import Delta, Finished
from pyllama_raw.core.step import StepResult
from pyllama_raw.core.stop_strings import StopStrings
from pyllama_raw.errors import SamplingFailed
from tests.core.support import STOP_TOKEN, answer, make_request, make_scheduler


def goes_on(scheduler, *requests, n_steps=1, now=0.0):
    """Of the plan after *requests* have prefilled and *n_steps* - 1 steps decoded."""
    scheduler.add_all(requests, now)
    for _ in range(n_steps):
        plan = scheduler.schedule(now)
        assert plan.goes_on < 2 or n_steps > 1
        scheduler.apply(plan, answer(plan), now)
    return scheduler.schedule(now).goes_on


def test_prompts_that_end_go_on_with_a_token_each():
    """
    Not before all have ended; what follows then is only likely.
    """
    scheduler = make_scheduler(token_budget=4)
    scheduler.add_all([make_request(0, n_prompt=10), make_request(1, n_prompt=2)], 0.0)

    found = []
    for _ in range(3):
        plan = scheduler.schedule(0.0)
        scheduler.apply(plan, answer(plan), 0.0)
        found.append((plan.goes_on, plan.n_tokens))

    assert found == [(0, 4), (0, 4), (1, 4)]


def prompt_beside_stream(*, stream_first):
    """A stream, and a request that gets the slot before or behind it."""
    scheduler = make_scheduler(n_slots=2)
    scheduler.add(make_request(0, max_tokens=30 if stream_first else 1), 0.0)
    scheduler.add(make_request(1, max_tokens=1 if stream_first else 30), 0.0)
    for _ in range(2):
        plan = scheduler.schedule(0.0)
        scheduler.apply(plan, answer(plan), 0.0)
    scheduler.add(make_request(2, max_tokens=30), 0.0)
    return scheduler


@pytest.mark.parametrize("stream_first", [True, False])
def test_prompts_go_on_in_the_order_of_slots(stream_first):
    """
    Streams come first in a batch, but by slot in the next one.
    """
    plan = prompt_beside_stream(stream_first=stream_first).schedule(0.0)

    assert len(plan.chunks) == 2
    assert plan.goes_on == stream_first


def test_a_scored_prompt_does_not_go_on():
    """
    Its rows are read after the step.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(0, n_prompt=4, scores_prompt=True), 0.0)

    assert scheduler.schedule(0.0).goes_on == 0


def test_until_the_first_one_has_its_last_token():
    """
    max_tokens less the token of the prompt's step, the one of this step, and none to end.
    """
    requests = make_request(0, max_tokens=9), make_request(1, max_tokens=30)

    assert goes_on(make_scheduler(), *requests) == 7


def test_several_steps_of_a_plan_are_as_many_plans():
    """
    Their tokens come one step after the other; one of the last may end a request.
    """
    scheduler = make_scheduler()
    scheduler.add_all([make_request(i, max_tokens=30) for i in range(2)], 0.0)
    prompts = scheduler.schedule(0.0)
    scheduler.apply(prompts, answer(prompts), 0.0)
    plan = scheduler.schedule(0.0)

    events = scheduler.apply(
        plan, StepResult(tokens=(11, 12, 13, 14, 15, STOP_TOKEN)), 0.0
    )

    told = [(e.request_id, e.tokens) for e in events if type(e) is Delta]
    assert told == [(0, (11, 13, 15)), (1, (12, 14, STOP_TOKEN))]
    assert [e.request_id for e in events if type(e) is Finished] == [1]
    assert scheduler.stats().steps == 4
    scheduler.check_integrity()


def test_several_steps_tell_nothing_about_prompts():
    """
    Together they have as many tokens as a prompt, but are not as fast.
    """
    scheduler = make_scheduler()
    scheduler.add_all([make_request(i, max_tokens=30) for i in range(2)], 0.0)
    prompts = scheduler.schedule(0.0)
    scheduler.apply(prompts, answer(prompts), 0.0)
    plan = scheduler.schedule(0.0)

    scheduler.apply(plan, StepResult(tokens=(97,) * 16), 9.0)

    assert scheduler._speed.tokens_per_s is None


def test_a_sampler_that_fails_in_the_last_step_takes_only_its_token():
    """
    What its request has got before is told.
    """
    scheduler = make_scheduler()
    scheduler.add_all([make_request(i, max_tokens=30) for i in range(2)], 0.0)
    prompts = scheduler.schedule(0.0)
    scheduler.apply(prompts, answer(prompts), 0.0)
    plan = scheduler.schedule(0.0)
    error = SamplingFailed("llama_sampler_sample", None, "injected")

    events = scheduler.apply(
        plan, StepResult(tokens=(11, 12, 13, None), row_errors={1: error}), 0.0
    )

    assert events[:2] == [Delta(0, (11, 13)), Delta(1, (12,))]
    assert [(end.request_id, end.error) for end in events[2:]] == [(1, error)]
    scheduler.check_integrity()


def test_not_beyond_the_last_token():
    """
    A step in which one ends is followed by another plan.
    """
    assert goes_on(make_scheduler(), make_request(max_tokens=2)) == 0


def test_not_beyond_the_slot():
    """
    Nor by one that finds the slot full.
    """
    scheduler = make_scheduler(n_ctx_slot=12)

    assert goes_on(scheduler, make_request(n_prompt=4, max_tokens=100)) == 6


@pytest.mark.parametrize(("n_cells", "expected"), [(20, 15), (6, 1), (5, 1)])
def test_not_beyond_the_cells(n_cells, expected):
    """
    One that runs alone may want more than there are; the next plan then is only likely.
    """
    scheduler = make_scheduler(n_slots=1, n_cells=n_cells)

    assert goes_on(scheduler, make_request(n_prompt=4, max_tokens=100)) == expected


@pytest.mark.parametrize("fields", [{"deadline": 9.0}, {"stop": StopStrings((b"x",))}])
def test_one_likely_step_if_something_else_may_end_a_request(fields):
    """
    A deadline, or a stop string, which only Python sees.
    """
    assert goes_on(make_scheduler(), make_request(max_tokens=30, **fields)) == 1


def test_one_likely_step_if_somebody_could_start():
    """
    Who waits for cells may find some; who waits for a slot has to wait for an end.
    """
    large = make_request(1, n_prompt=40, max_tokens=30)
    waits_for_cells = make_scheduler(n_cells=64)
    waits_for_slot = make_scheduler(n_slots=1)

    request = make_request(0, n_prompt=4, max_tokens=30)
    assert goes_on(waits_for_cells, request, large) == 1
    assert goes_on(waits_for_slot, request, large) > 1
