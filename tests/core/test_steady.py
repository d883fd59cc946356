"""When a plan says that the next one is expected to hold the same decodes."""

import pytest

from pyllama_raw.core.request import Scoring
from pyllama_raw.core.text import StopStrings
from tests.core.support import answer, make_request, make_scheduler


def hints(scheduler, *requests, n_steps):
    """Of each plan, whether it is steady, and how many tokens it has."""
    scheduler.add_all(requests, 0.0)
    found = []
    for _ in range(n_steps):
        plan = scheduler.schedule(0.0)
        scheduler.apply(plan, answer(plan), 0.0)
        found.append((plan.steady, plan.n_tokens))
    return found


def test_prompts_are_steady_when_all_have_ended():
    """
    Not before: the next plan goes on with the prompt.
    """
    requests = make_request(0, n_prompt=10), make_request(1, n_prompt=2)

    scheduler = make_scheduler(token_budget=4, prefill_order="turns")
    found = hints(scheduler, *requests, n_steps=3)

    assert found == [(False, 4), (False, 4), (True, 4)]


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
def test_prompts_are_steady_in_the_order_of_slots(stream_first):
    """
    Streams come first in a batch, but by slot in the next one.
    """
    plan = prompt_beside_stream(stream_first=stream_first).schedule(0.0)

    assert len(plan.works) == 2
    assert plan.steady == stream_first


def test_a_scored_prompt_is_not_steady():
    """
    Its rows are read after the step.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(0, n_prompt=4, scoring=Scoring()), 0.0)

    assert not scheduler.schedule(0.0).steady


def test_steady_until_the_first_one_has_its_last_token():
    """
    A step in which a request ends is followed by another plan.
    """
    requests = make_request(0, n_prompt=4, max_tokens=4), make_request(1, max_tokens=30)

    found = hints(make_scheduler(), *requests, n_steps=5)

    assert [steady for steady, _ in found] == [True, True, True, False, True]


def test_steady_until_a_slot_is_full():
    """
    The request of a full slot ends with the step that fills it.
    """
    request = make_request(n_prompt=4, max_tokens=100)

    found = hints(make_scheduler(n_ctx_slot=8), request, n_steps=4)

    assert [steady for steady, _ in found] == [True, True, True, False]


@pytest.mark.parametrize(
    "fields",
    [
        {"deadline": 9.0},
        {"stop": StopStrings((b"x",))},
        {"stop_token_ids": frozenset({5})},
    ],
)
def test_a_request_that_may_end_otherwise_is_steady(fields):
    """
    It is a hint: a deadline, a stop string or a stop token may still end the request.
    """
    found = hints(make_scheduler(), make_request(max_tokens=30, **fields), n_steps=2)

    assert [steady for steady, _ in found] == [True, True]


def test_an_empty_plan_is_not_steady():
    """
    Nothing follows it.
    """
    plan = make_scheduler().schedule(0.0)

    assert (bool(plan), plan.steady) == (False, False)
