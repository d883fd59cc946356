"""What hooks see, and when they are told."""

import pytest

from pyllama_raw.core.policies import SchedulerView, SchedulingPolicy
from tests.core.policies.support import LastComeFirst, views_of, waiting, with_policy
from tests.core.support import answer, make_request, run_until_idle, step


def test_a_view_says_how_a_request_stands():
    """
    It follows the request, also when a policy keeps it, and cannot be written to.
    """
    seen = []

    class Reading(SchedulingPolicy):
        name = "reading"

        def on_scheduled(self, done, now):
            [(self.kept, n_tokens)] = done
            seen.append((repr(self.kept), n_tokens, now))

    scheduler, _ = with_policy(policy := Reading(), n_slots=1, n_batch=8)
    data = {"plan": "free"}
    request = make_request(
        7, 12, 2, client="me", policy_data=data, priority=3, deadline=1e9
    )
    scheduler.add(request, 1.0)
    run_until_idle(scheduler)

    view = (
        "RequestView(request_id=7, client='me', priority=3, submitted=1.0, "
        "admitted=0.0, deadline=1000000000.0, n_prompt=12, max_tokens=2, n_computed={}, n_behind={}, "
        "n_output={}, n_preempted=0, data={{'plan': 'free'}})"
    )
    assert seen == [
        (view.format(0, 12, 0), 8, 0.5),
        (view.format(8, 4, 0), 4, 1.5),
        (view.format(12, 1, 1), 1, 2.5),
    ]
    assert (policy.kept.n_computed, policy.kept.n_output) == (0, 2)
    with pytest.raises(AttributeError):
        policy.kept.n_prompt = 1
    with pytest.raises(AttributeError):
        del policy.kept.n_prompt


def test_nothing_is_kept_of_who_has_ended():
    """
    However requests end, the scheduler forgets what a policy was shown of them.
    """
    scheduler, _ = with_policy(LastComeFirst(), n_slots=1)
    for request_id in range(3):
        scheduler.add(make_request(request_id), 0.0)
    sequences = list(scheduler._roster.alive.values())
    step(scheduler)
    views = scheduler._policy._views
    shown = [sequence in views for sequence in sequences]
    scheduler.cancel(0, 0.0)
    run_until_idle(scheduler)

    assert shown == [True] * 3
    assert views == {}


def test_the_scheduler_is_seen_as_it_is_when_a_step_begins():
    """
    A view tells the time, slots, queue and cells.
    """
    policy, seen = views_of("order_key")
    scheduler, _ = with_policy(policy, n_slots=2)
    for request_id in range(3):
        scheduler.add(make_request(request_id), 0.0)
    scheduler.schedule(5.0)

    view = seen[0][1]
    assert (view.now, view.n_slots, view.n_running) == (5.0, 2, 0)
    assert (view.n_waiting, view.n_cells, view.n_cells_used) == (3, 128, 0)
    assert view.n_cached(seen[0][0]) == 0
    assert SchedulerView().n_cached(seen[0][0]) == 0


def test_a_batch_that_is_refused_leaves_no_trace_in_the_queue():
    """
    Requests that are taken back are not asked about, and others wait as before.
    """
    scheduler, _ = with_policy(LastComeFirst(), n_slots=1)
    scheduler.add(make_request(0), 0.0)
    again = [make_request(1), make_request(0)]

    with pytest.raises(AssertionError):
        scheduler.add_all(again, 0.0)

    scheduler.check_integrity()
    assert [s.request.request_id for s in scheduler._roster.waiting] == [0]


def test_hooks_have_defaults():
    """
    What a policy does not decide is left to the core, in the order of fcfs.
    """
    base, view = SchedulingPolicy(), SchedulerView()
    request = waiting(4, 1.0, priority=2)

    assert base.order_key(request, view) == 2
    assert base.prefill_quota((request,), view) == {}
    assert base.victim_key(request, view) == (2, 1.0, 4)


@pytest.mark.parametrize("n_before", [0, 1, 2])
def test_who_left_during_a_step_is_not_told_of(n_before):
    """
    Tokens of a request that ended while they were computed count for nobody.
    """
    seen = []

    class Counting(SchedulingPolicy):
        name = "counting"

        def on_scheduled(self, done, now):
            seen.extend((view.request_id, n_tokens) for view, n_tokens in done)

    scheduler, _ = with_policy(Counting())
    for request_id in range(2):
        scheduler.add(make_request(request_id), 0.0)
    for _ in range(n_before):
        step(scheduler)
    seen.clear()
    plan = scheduler.schedule(0.0)
    scheduler.cancel(0, 0.0)
    scheduler.apply(plan, answer(plan), 0.0)

    assert seen == [(1, 1 if n_before else 4)]
    assert scheduler.occupancy[:3] == (1, 0, 4 + n_before)


def test_each_step_tells_of_those_that_it_computed():
    """
    Views of its requests, each with the tokens that it gets.
    """
    told = []

    class Counting(SchedulingPolicy):
        name = "counting"

        def on_scheduled(self, done, now):
            told.append([(view.request_id, n_tokens) for view, n_tokens in done])

    scheduler, _ = with_policy(Counting(), n_slots=2)
    for request_id, n_tokens in enumerate((4, 7, 3)):
        scheduler.add(make_request(request_id, n_prompt=4, max_tokens=n_tokens), 0.0)
    plans = []
    while scheduler.alive:
        plans.append(step(scheduler)[0])

    assert told == [[(w.request_id, len(w.tokens)) for w in p.works] for p in plans]
