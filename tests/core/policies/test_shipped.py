"""The policies that come with the package, and what holds for each of them."""

import os
from array import array
from collections import Counter
from dataclasses import replace
from itertools import count, islice
from random import Random

import pytest

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.policies import (
    OUTPUT_COST,
    SHIPPED,
    RequestView,
    SchedulerView,
    Vtc,
)
from pyllama_raw.core.request import Request
from pyllama_raw.core.sequence import Sequence
from tests.core.policies.support import order_of, waiting, with_policy
from tests.core.support import (
    STOP_TOKEN,
    answer,
    finished,
    make_request,
    run_until_idle,
    step,
)

every = pytest.mark.parametrize("name", SHIPPED)
CASES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "8"))  # a policy


@every
def test_the_more_urgent_priority_goes_first(name):
    """
    Under every policy a lower number gets the slot first, among those that came together.
    """
    requests = [make_request(i, priority=p) for i, p in enumerate([5, 0, 5, -1])]

    assert order_of(SHIPPED[name](), requests) == [3, 1, 0, 2]


@every
def test_equals_go_in_the_order_of_arrival(name):
    """
    Requests that differ in nothing keep their order.
    """
    assert order_of(SHIPPED[name](), map(make_request, range(40))) == list(range(40))


def test_priority_ages():
    """
    A request that came half a minute earlier is as urgent as one of the next priority.
    """
    scheduler, _ = with_policy(SHIPPED["priority"](), n_slots=1)
    for request_id, priority, came in ((0, 2, 0.0), (1, 1, 29.0), (2, 1, 31.0)):
        scheduler.add(make_request(request_id, priority=priority), came)

    plans, _ = run_until_idle(scheduler)

    assert [plan.works[0].request_id for plan in plans[::4]] == [1, 0, 2]


def test_sjf_takes_the_shortest_job():
    """
    Jobs are as long as their prompt and twice their output, guessed by the caller or not.
    """
    requests = [
        make_request(0, n_prompt=20, max_tokens=20),
        make_request(1, n_prompt=50, max_tokens=2),
        make_request(2, n_prompt=20, max_tokens=50, policy_data={"n_output": 4}),
        make_request(3, n_prompt=4, max_tokens=20, policy_data={"n_output": "?"}),
    ]

    assert order_of(SHIPPED["sjf"](), requests) == [2, 3, 1, 0]


def test_edf_takes_the_earliest_deadline():
    """
    Who has no deadline is last.
    """
    deadlines = [None, 900.0, 800.0]
    requests = [make_request(i, deadline=d) for i, d in enumerate(deadlines)]

    assert order_of(SHIPPED["edf"](), requests) == [2, 1, 0]


def test_edf_lets_hopeless_requests_go_last():
    """
    Once it knows how long requests take, who cannot be in time is behind all others.
    """
    scheduler, _ = with_policy(SHIPPED["edf"](), n_slots=1, n_ctx_slot=256)
    scheduler.add(make_request(0, n_prompt=4, max_tokens=8, deadline=1e3), 0.0)
    now = 0.0
    while scheduler.alive:
        step(scheduler, now)
        now += 10.0
    for request_id, deadline in enumerate((now + 2.0, None, now + 1e4), 1):
        request = make_request(request_id, 4, max_tokens=8, deadline=deadline)
        scheduler.add(request, now)
    seen = []
    while scheduler.alive:
        plan, _ = step(scheduler, now)
        seen += [work.request_id for work in plan.works]
        now += 0.01

    assert list(dict.fromkeys(seen)) == [3, 2, 1]


def test_edf_learns_nothing_of_who_was_cut():
    """
    A request that ends by its deadline does not say how long others take.
    """
    policy = SHIPPED["edf"]()
    sequence = Sequence(make_request(0, deadline=5.0), 0, 0.0)
    view = RequestView(sequence, {}.get)
    sequence.admitted = 0.0
    sequence.tokens.append(1)
    for now in (4.0, 5.0):
        policy.on_finished(view, now)

    assert policy.order_key(view, SchedulerView(now=0.9))[1] == 0
    assert policy.order_key(view, SchedulerView(now=1.1))[1] == 2


def test_hrrn_lets_a_long_job_go_when_it_has_waited():
    """
    A job twice as long goes before one that has waited less than half as long.
    """
    scheduler, _ = with_policy(SHIPPED["hrrn"](), n_slots=1, n_ctx_slot=256)
    scheduler.add(make_request(0, n_prompt=100, max_tokens=50), 0.0)
    scheduler.add(make_request(1, n_prompt=50, max_tokens=25), 40.0)
    scheduler.add(make_request(2, n_prompt=50, max_tokens=25), 60.0)

    plan = scheduler.schedule(100.0)
    scheduler.apply(plan, answer(plan), 100.0)
    scheduler.cancel(1, 100.0)
    plan = scheduler.schedule(200.0)

    assert plan.works[0].request_id == 2
    assert next(iter(scheduler._slots.running.values())).request.request_id == 2


def test_spf_starts_prompts_that_are_soon_computed():
    """
    Short ones, whatever their outputs, and long ones that are cached or have waited longer.
    """
    cache = PrefixCache(SnapshotKind.RANGE, max_bytes=0, max_entries=0)
    scheduler, _ = with_policy(SHIPPED["spf"](), n_slots=1, n_ctx_slot=256, cache=cache)
    scheduler.add(make_request(0, n_prompt=100, max_tokens=1), 0.0)
    run_until_idle(scheduler)
    lengths = {1: 100, 2: 100, 3: 20}
    patient, long, short = (
        replace(make_request(i), tokens=array("i", range(1000 * i, 1000 * i + n)))
        for i, n in lengths.items()
    )
    scheduler.add(patient, 30.0)
    scheduler.add(long, 80.0)
    scheduler.add(make_request(4, n_prompt=110), 90.0)  # most of these are cached
    scheduler.add(short, 90.0)

    admitted = []
    for _ in range(4):
        plan = scheduler.schedule(100.0)
        [request_id] = {work.request_id for work in plan.works}
        admitted.append(request_id)
        scheduler.apply(plan, answer(plan), 100.0)
        scheduler.cancel(request_id, 100.0)

    assert admitted == [4, 1, 3, 2]


def test_lpm_takes_what_is_cached():
    """
    A prompt whose beginning a slot still holds goes before those that came earlier.
    """
    cache = PrefixCache(SnapshotKind.RANGE, max_bytes=0, max_entries=0)
    scheduler, _ = with_policy(SHIPPED["lpm"](), n_slots=1, cache=cache)
    scheduler.add(make_request(0, n_prompt=20, max_tokens=2), 0.0)
    run_until_idle(scheduler)
    others = array("i", range(500, 520))
    for request_id in (1, 2):
        other = make_request(request_id, max_tokens=2)
        scheduler.add(type(other)(request_id, others, 2), 0.0)
    scheduler.add(make_request(3, n_prompt=24, max_tokens=2), 0.0)

    plans, _ = run_until_idle(scheduler)

    order = dict.fromkeys(work.request_id for plan in plans for work in plan.works)
    assert list(order) == [3, 1, 2]


# -- fairness ------------------------------------------------------------------


def test_vtc_serves_clients_alike():
    """
    Two clients with work differ by what the paper bounds; one sends ten times as much.

    The bound is 2 max(w_p * L_input, w_q * M), where M is the tokens of a full batch.
    """
    n_slots, n_prompt, n_output = 4, 10, 6
    policy = Vtc()
    scheduler, _ = with_policy(policy, n_slots=n_slots)
    for request_id in range(220):
        client = "light" if request_id % 11 == 0 else "heavy"
        scheduler.add(make_request(request_id, n_prompt, n_output, client=client), 0.0)
    bound = 2 * max(n_prompt, OUTPUT_COST * n_slots * (n_prompt + n_output))
    gaps = []

    for _ in range(1000):
        step(scheduler)
        if len(policy._waiting) < 2:
            break
        gaps.append(abs(policy.served["light"] - policy.served["heavy"]))

    assert len(gaps) > 20
    assert max(gaps) <= bound


def test_vtc_gives_nothing_for_idle_time():
    """
    A client that comes back counts from the least of those that wait.
    """
    policy = Vtc()
    first = waiting(0, n_prompt=100, client="old")
    policy.on_arrival(first, 0.0)
    policy.on_admitted(first, 0.0)

    policy.on_arrival(waiting(1, client="old"), 0.0)
    policy.on_arrival(waiting(2, client="new"), 0.0)

    assert policy.served == {"old": 100.0, "new": 100.0}


def test_vtc_forgets_clients_that_are_gone():
    """
    Counters of those that neither wait nor are ahead are dropped.
    """
    policy = Vtc()
    for request_id in range(5000):
        view = waiting(request_id, n_prompt=3, client=f"c{request_id}")
        policy.on_arrival(view, 0.0)
        policy.on_admitted(view, 0.0)
        policy.on_preempted(view, 0.0)
        policy.on_finished(view, 0.0)

    assert len(policy.served) < 2000
    assert not policy._waiting


# -- the bound -----------------------------------------------------------------


def drawn(rng: Random, request_id: int):
    """Of one of five prompts the beginning; some have too little time."""
    start = 100 * rng.randint(1, 5)
    return Request(
        request_id,
        array("i", range(start, start + rng.randint(1, 40))),
        max_tokens=rng.randint(1, 12),
        stop_token_ids=frozenset({STOP_TOKEN}),
        priority=rng.choice([0, 0, 0, 1]),
        deadline=rng.choice([None, 1e9, rng.uniform(50, 500)]),
        client=rng.choice(["a", "b", "c", None]),
    )


class Watched:
    """A scheduler that checks for each admission who has waited for how many."""

    def __init__(self, scheduler, max_overtakes):
        self.scheduler, self.roster = scheduler, scheduler._roster
        self.most_each = max_overtakes + 1
        self.n_waited, self.allowed = Counter(), {}  # of those that wait
        self.n_admitted = self.n_passed = 0
        self.worst = 0.0  # wait, as a share of what was allowed
        self._start, self.roster.start = self.roster.start, self.start

    def start(self, sequence, now):
        others = [s for s in self.roster.waiting if s is not sequence]
        self.n_admitted += 1
        self.n_passed += any(other.rank < sequence.rank for other in others)
        for request_id in (other.request.request_id for other in others):
            self.n_waited[request_id] += 1
            share = self.n_waited[request_id] / self.allowed[request_id]
            self.worst = max(self.worst, share)
            assert share <= 1
        for known in (self.n_waited, self.allowed):
            known.pop(sequence.request.request_id, None)
        self._start(sequence, now)

    def allow(self):
        """Who has come before somebody since the last look allows that one to wait longer."""
        n_new = 0
        for n_before, sequence in enumerate(self.roster.waiting):
            request_id = sequence.request.request_id
            if request_id in self.allowed:
                self.allowed[request_id] += n_new * self.most_each
            else:
                self.allowed[request_id] = (n_before + 1) * self.most_each
                n_new += 1


def play(name: str, seed: int, n_requests: int = 40) -> Watched:
    """A drawn workload under pressure; steps are long or short."""
    rng = Random(f"{name} {seed}")  # noqa: S311
    scheduler, faults = with_policy(
        SHIPPED[name](),
        n_slots=rng.choice([1, 3]),
        max_overtakes=3,
        token_budget=rng.choice([16, 64]),
        cache=PrefixCache(SnapshotKind.RANGE, max_bytes=0, max_entries=0),
    )
    watched, events = Watched(scheduler, 3), []
    coming, step_s = iter(range(n_requests)), rng.choice([1.0, 10.0])
    for n_steps in count():
        if len(finished(events)) == n_requests:
            break
        assert n_steps < 2000
        now = n_steps * step_s
        for request_id in islice(coming, rng.choice([0, 0, 1, 5])):
            scheduler.add(drawn(rng, request_id), now)
        watched.allow()
        events += step(scheduler, now)[1]
        if len(scheduler._slots.running) > 1 and rng.random() < 0.1:
            watched.roster.make_room(now)
        if n_steps % 8 == 0:
            scheduler.check_integrity()
    assert not faults
    return watched


@pytest.mark.chance
@every
def test_nobody_waits_longer_than_the_bound(name):
    """
    Who has r others before it by rank waits for (r + 1) * (max_overtakes + 1) admissions.

    PYLLAMA_RAW_TEST_CASES workloads are drawn for each policy.
    """
    played = [play(name, seed) for seed in range(CASES)]

    assert sum(watched.n_admitted for watched in played) >= 30 * CASES
    assert any(watched.n_passed for watched in played) is (name != "fcfs")
