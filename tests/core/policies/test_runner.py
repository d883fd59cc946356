"""What a policy decides: who is next, which prompt goes on, and who is preempted."""

from collections import Counter
from math import nan
from typing import ClassVar

import pytest

from pyllama_raw.core.policies import SchedulingPolicy
from tests.core.policies.support import (
    ByTurn,
    LastComeFirst,
    order_of,
    views_of,
    with_policy,
)
from tests.core.support import finished, make_request, run_until_idle, step


def test_a_policy_decides_who_is_next():
    """
    The smallest key gets the slot.
    """
    order = order_of(LastComeFirst(), map(make_request, range(5)))

    assert order == [4, 3, 2, 1, 0]


def test_the_first_by_rank_is_passed_a_bounded_number_of_times():
    """
    After max_overtakes others the request that came first goes next.
    """
    order = order_of(LastComeFirst(), map(make_request, range(6)), max_overtakes=2)

    assert order == [5, 4, 0, 3, 2, 1]


def test_without_overtakes_the_order_is_that_of_arrival():
    """
    With max_overtakes=0 no policy changes who goes first.
    """
    order = order_of(LastComeFirst(), map(make_request, range(4)), max_overtakes=0)

    assert order == [0, 1, 2, 3]


def test_an_overdue_request_that_does_not_fit_holds_all_others():
    """
    When the first by rank has been passed often enough, nobody starts before it does.
    """
    scheduler, _ = with_policy(
        LastComeFirst(), n_slots=3, n_ctx_slot=64, n_cells=64, max_overtakes=2
    )
    scheduler.add(make_request(9, n_prompt=8, max_tokens=30), 0.0)
    step(scheduler)
    scheduler.add(make_request(0, n_prompt=40, max_tokens=2), 0.0)
    for request_id in range(1, 6):
        scheduler.add(make_request(request_id, n_prompt=2, max_tokens=2), 0.0)

    plans, _ = run_until_idle(scheduler)

    order = dict.fromkeys(work.request_id for plan in plans for work in plan.works)
    assert list(order) == [9, 5, 4, 0, 3, 2, 1]


def test_keys_may_change_while_a_request_waits():
    """
    A step asks for the keys of the first ones and of some others in turn: all at last.
    """
    scheduler, _ = with_policy(ByTurn(), n_slots=1, n_ctx_slot=512, max_overtakes=999)
    for request_id in range(99):
        scheduler.add(make_request(request_id, n_prompt=2, max_tokens=1), 0.0)
    step(scheduler, 0.0)
    starts = []

    for _ in range(12):
        plan, _ = step(scheduler, 40.0)
        starts.append(plan.works[0].request_id)
        scheduler.check_integrity()

    assert starts[-4:] == [64, 65, 66, 67]


@pytest.mark.parametrize("keys", ["fixed", "changing", "by_client"])
def test_a_step_asks_for_few_keys(keys):
    """
    However many wait, a step asks for the keys of 24 at most once each has one.
    """
    asked = []

    class Counting(SchedulingPolicy):
        name = "counting"

        def order_key(self, request, view):
            asked.append(request.request_id)
            return 0

    Counting.keys = keys
    scheduler, _ = with_policy(Counting(), n_slots=1)
    for request_id in range(1000):
        request = make_request(request_id, max_tokens=1, client=str(request_id % 500))
        scheduler.add(request, 0.0)
    step(scheduler)
    n_first = len(asked)
    step(scheduler)

    expected = {"fixed": (1000, 0), "changing": (1000, 24), "by_client": (500, 25)}
    n_least, n_most = expected[keys]
    assert n_first == n_least
    assert len(asked) - n_first <= n_most


def test_requests_of_a_client_keep_their_order():
    """
    With keys by client only the first of each client is asked about, by rank.
    """

    class Alternating(SchedulingPolicy):
        name = "alternating"
        keys = "by_client"
        n_served: ClassVar = Counter()

        def order_key(self, request, view):
            return self.n_served[request.client]

        def on_admitted(self, request, now):
            self.n_served[request.client] += 1

    requests = [make_request(i, client="ab"[i > 2]) for i in range(6)]
    requests += [make_request(6, client="a", priority=-1)]

    assert order_of(Alternating(), requests) == [6, 3, 0, 4, 1, 5, 2]


def test_who_was_preempted_goes_first():
    """
    A request that lost its slot gets the next one, whatever the keys say.
    """
    policy, seen = views_of("on_admitted")
    scheduler, _ = with_policy(policy, n_slots=2, max_overtakes=99)
    for request_id in range(2):
        scheduler.add(make_request(request_id, n_prompt=8, max_tokens=12), 0.0)
    step(scheduler)
    scheduler._roster.make_room(0.0)
    scheduler.add(make_request(2, n_prompt=2, max_tokens=1, priority=-5), 0.0)

    run_until_idle(scheduler)

    admitted = [view.request_id for view, _ in seen]
    assert admitted == [0, 1, 1, 2]


def test_a_policy_chooses_the_victim():
    """
    The running request with the largest key loses its slot; None is never chosen first.
    """

    class OldestVictim(SchedulingPolicy):
        name = "oldest victim"

        def victim_key(self, request, view):
            return None if request.request_id == 0 else -request.request_id

    scheduler, _ = with_policy(OldestVictim(), n_slots=3)
    for request_id in range(3):
        scheduler.add(make_request(request_id, n_prompt=6, max_tokens=12), 0.0)
    step(scheduler)
    scheduler._roster.make_room(0.0)

    (victim,) = scheduler._roster.waiting
    assert victim.request.request_id == 1


@pytest.mark.parametrize("key", [None, nan])
def test_without_an_answer_the_worst_rank_is_preempted(key):
    """
    If a policy names nobody, or fails, the last by rank gives its slot up.
    """

    class Undecided(SchedulingPolicy):
        name = "undecided"

        def victim_key(self, request, view):
            return key

    scheduler, faults = with_policy(Undecided(), n_slots=3)
    for request_id in range(3):
        scheduler.add(make_request(request_id, n_prompt=6, max_tokens=12), 0.0)
    step(scheduler)
    scheduler._roster.make_room(0.0)

    (victim,) = scheduler._roster.waiting
    assert victim.request.request_id == 2
    assert len(faults) == scheduler.stats().policy_faults == (key is not None)


def test_nobody_is_preempted_for_ever():
    """
    After three times others are preempted first, so a cruel policy starves nobody.
    """

    class Cruel(SchedulingPolicy):
        name = "cruel"

        def victim_key(self, request, view):
            return request.request_id == 0

    scheduler, _ = with_policy(Cruel(), n_slots=2)
    for request_id in range(2):
        scheduler.add(make_request(request_id, n_prompt=6, max_tokens=16), 0.0)
    for now in range(8):
        step(scheduler, now)
        scheduler._roster.make_room(now)
    _, events = run_until_idle(scheduler)

    ends = finished(events)
    assert (ends[0].n_preempted, ends[1].n_preempted) == (3, 5)


# -- prompts ---------------------------------------------------------------------


def quota_policy(quota):
    class Quotas(SchedulingPolicy):
        name = "quotas"

        def prefill_quota(self, prompts, view):
            return quota

    return Quotas()


def prompt_tokens(scheduler, n_steps):
    """Tokens by request_id of the next steps."""
    plans = [step(scheduler)[0] for _ in range(n_steps)]
    return [{w.request_id: len(w.tokens) for w in plan.works} for plan in plans]


def test_a_quota_limits_a_prompt():
    """
    A prompt gets no more tokens than the policy allows; others share the rest.
    """
    turns = {"prefill_order": "turns", "prefill_quantum": 8}
    scheduler, _ = with_policy(quota_policy({0: 4}), token_budget=16, **turns)
    for request_id in range(2):
        scheduler.add(make_request(request_id, n_prompt=40), 0.0)

    assert prompt_tokens(scheduler, 2) == [{0: 4, 1: 12}, {0: 4, 1: 12}]


def test_a_prompt_is_held_for_a_bounded_number_of_steps():
    """
    A prompt that the policy gives nothing gets tokens in every ninth step.
    """
    scheduler, _ = with_policy(quota_policy({0: 0}), n_batch=8)
    for request_id in range(2):
        scheduler.add(make_request(request_id, n_prompt=60), 0.0)

    steps = prompt_tokens(scheduler, 10)

    assert [0 in tokens for tokens in steps] == [False] * 8 + [True] + [False]


def test_a_policy_that_picks_no_prompt_is_not_asked():
    """
    Where there is nothing else to compute, prompts go on as if there were no quota.
    """
    scheduler, _ = with_policy(quota_policy({0: 0, 1: 1}), n_batch=8)
    for request_id in range(2):
        scheduler.add(make_request(request_id, n_prompt=20, max_tokens=3), 0.0)

    _, events = run_until_idle(scheduler)

    assert len(finished(events)) == 2
