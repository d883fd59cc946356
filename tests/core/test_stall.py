"""Work that no step can do: an error with counts, never a silent wait or a loop."""

import pytest

from pyllama_raw.core.request import FinishReason
from pyllama_raw.errors import EngineStalled, NoKVSpace
from tests.core.support import answer, make_request, make_scheduler


def test_work_that_cannot_be_planned_ends_with_counts():
    """
    A batch that takes no token ends all who are left, running or waiting.
    """
    scheduler = make_scheduler(n_slots=1, n_cells=64)
    object.__setattr__(scheduler.limits, "n_batch", 0)  # no context is like that
    for request_id in range(3):
        scheduler.add(make_request(request_id, n_prompt=8), 0.0)
    ends = []
    while scheduler.alive:
        plan = scheduler.schedule(0.0)
        ends += scheduler.take_events()
        if plan:
            ends += scheduler.apply(plan, answer(plan), 0.0)
    scheduler.check_integrity()

    assert [end.request_id for end in ends] == [0, 1, 2]
    for end in ends:
        assert isinstance(end.error, EngineStalled)
        assert vars(end.error) == {
            "n_running": 1,
            "n_waiting": 2,
            "n_slots": 1,
            "n_cells_used": 0,
            "n_cells": 64,
        }


@pytest.mark.parametrize("n_cells", [-5, -1, 0])
def test_planning_ends_whatever_the_context_says_it_has(n_cells):
    """
    A context without a cell, or with less, ends what runs there instead of looping.
    """
    scheduler = make_scheduler(n_cells=8)
    scheduler.add(make_request(0, max_tokens=9), 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.cancel(0, 0.0)
    object.__setattr__(scheduler.limits, "n_cells", n_cells)
    scheduler.add(make_request(1), 0.0)

    ends = []
    for _ in range(5):
        scheduler.schedule(1.0)
        ends += scheduler.take_events()

    assert plan.works
    assert [end.reason or type(end.error) for end in ends] == [
        FinishReason.CANCELLED,
        NoKVSpace,
    ]
