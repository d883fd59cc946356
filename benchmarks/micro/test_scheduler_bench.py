"""
Cost of planning and of taking results in: no model, no thread.

Run: python -m pytest benchmarks/micro -q (tests/ does not collect it).
"""

from __future__ import annotations

import pytest

from benchmarks.fakes import answer, request, running_scheduler

slots = pytest.mark.parametrize("n_running", [1, 8, 64, 256])
waiting = pytest.mark.parametrize("n_waiting", [10, 1000, 10_000])


@pytest.mark.benchmark(group="schedule and apply, all slots decoding")
@slots
@waiting
def test_step(benchmark, n_running, n_waiting):
    """One schedule() and one apply(); the answer of the executor is made in between."""
    scheduler = running_scheduler(n_running, n_waiting)
    benchmark.extra_info.update(n_running=n_running, n_waiting=n_waiting)

    def step() -> None:
        plan = scheduler.schedule(0.0)
        scheduler.apply(plan, answer(plan), 0.0)

    benchmark.pedantic(step, rounds=300)


@pytest.mark.benchmark(group="schedule, all slots decoding")
@slots
def test_schedule(benchmark, n_running):
    """schedule() alone."""
    scheduler = running_scheduler(n_running, 1000)
    plans = []

    def take_in() -> None:
        for plan in plans:
            scheduler.apply(plan, answer(plan), 0.0)
        plans.clear()

    benchmark.pedantic(
        lambda: plans.append(scheduler.schedule(0.0)), setup=take_in, rounds=300
    )


@pytest.mark.benchmark(group="submit one request, 256 running")
@waiting
def test_submit_and_cancel(benchmark, n_waiting):
    """add() to a queue that holds n_waiting, then cancel()."""
    scheduler = running_scheduler(256, n_waiting)
    new = request(10**6)

    def submit() -> None:
        scheduler.add(new, 0.0)
        scheduler.cancel(new.request_id, 0.0)
        scheduler.take_events()

    benchmark(submit)


@pytest.mark.benchmark(group="a slot changes hands, all others decode")
@slots
def test_turnover(benchmark, n_running):
    """A step in which one sequence leaves and a waiting one gets its slot and prefills."""
    scheduler = running_scheduler(n_running, 2000)
    turn = iter(range(2000))

    def step() -> None:
        scheduler.cancel(next(turn), 0.0)
        plan = scheduler.schedule(0.0)
        scheduler.apply(plan, answer(plan), 0.0)

    benchmark.pedantic(step, rounds=300)
