"""A policy that misbehaves loses no request."""

from math import nan

import pytest

from pyllama_raw.core.policies import SchedulingPolicy
from pyllama_raw.core.request import Finished
from tests.core.policies.support import ByTurn, LastComeFirst, with_policy
from tests.core.support import (
    finished,
    make_request,
    make_scheduler,
    run_until_idle,
    step,
)


class Odd(float):
    def __lt__(self, other):
        raise RuntimeError("compared")


def boom(*_):
    raise ValueError("boom")


def leave(*_):
    raise SystemExit(3)


def spoil(self, request, *_):
    """Try to change what was given."""
    request.n_prompt = 10**9


ALL = (
    *("order_key", "prefill_quota", "victim_key", "on_arrival", "on_admitted"),
    *("on_scheduled", "on_preempted", "on_finished"),
)
ANSWERS = {
    "raises": boom,
    "leaves": leave,
    "changes": spoil,
    "nan": lambda *_: nan,
    "text": lambda *_: "first",
    "class of its own": lambda *_: Odd(1),
    "empty": lambda *_: (),
    "long": lambda *_: (1,) * 100,
    "huge": lambda *_: 10**1000,
    "bad quota": lambda *_: dict.fromkeys(range(20), "all"),
    "odd mapping": lambda self, prompts, view: type("M", (dict,), {"get": boom})(),
}


@pytest.mark.parametrize("keys", ["fixed", "changing", "by_client"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_hostile_policy_loses_nothing(answer, keys):
    """
    Whatever a hook raises or returns, all requests end as without a policy.
    """
    hostile = type(
        "Hostile",
        (SchedulingPolicy,),
        {"name": "hostile", "keys": keys} | dict.fromkeys(ALL, ANSWERS[answer]),
    )
    scheduler, faults = with_policy(hostile(), n_slots=3, token_budget=8)
    for request_id in range(20):
        request = make_request(request_id, 5, 12, client=str(request_id % 3))
        scheduler.add(request, 0.0)
    step(scheduler)
    scheduler._roster.make_room(0.0)
    plans, events = run_until_idle(scheduler)

    ends = finished(events)
    assert len(ends) == 20
    assert all(isinstance(end, Finished) and end.error is None for end in ends.values())
    order = dict.fromkeys(work.request_id for plan in plans for work in plan.works)
    assert list(order) == list(range(20))
    assert {fault.policy for fault in faults} == {"hostile"}
    assert "order_key" in {fault.hook for fault in faults}
    assert scheduler.stats().policy_faults == len(faults)


def test_a_policy_that_recovers_is_used_again():
    """
    A fault costs the policy one step: it decides again in the next.
    """

    class Moody(LastComeFirst):
        calls = 0

        def order_key(self, request, view):
            self.calls += 1
            if self.calls == 1:
                raise ValueError
            return super().order_key(request, view)

    scheduler, faults = with_policy(Moody(), n_slots=1)
    for request_id in range(4):
        scheduler.add(make_request(request_id, max_tokens=1), 0.0)
    plans, _ = run_until_idle(scheduler)

    assert [plan.works[0].request_id for plan in plans] == [0, 3, 2, 1]
    assert len(faults) == 1


def test_a_policy_that_fails_when_asked_again_is_left_out_for_the_step():
    """
    The step in which a key of somebody who waits cannot be renewed is that of fcfs.
    """

    class Tiring(ByTurn):
        calls = 0

        def order_key(self, request, view):
            self.calls += 1
            return nan if self.calls == 7 else -request.request_id

    scheduler, faults = with_policy(Tiring(), n_slots=1)
    for request_id in range(4):
        scheduler.add(make_request(request_id, max_tokens=1), 0.0)
    plans, _ = run_until_idle(scheduler)

    assert [plan.works[0].request_id for plan in plans] == [3, 0, 2, 1]
    assert len(faults) == 1


@pytest.mark.parametrize("hook", ["order_key", "on_scheduled"])
def test_ctrl_c_is_not_a_fault_of_the_policy(hook):
    """
    KeyboardInterrupt comes from the user where nobody else takes faults.
    """

    def interrupt(*_):
        raise KeyboardInterrupt

    hooks = {"name": "interrupted", hook: interrupt}
    policy = type("Interrupted", (SchedulingPolicy,), hooks)()
    scheduler = make_scheduler(policy=policy)
    scheduler.add(make_request(), 0.0)

    with pytest.raises(KeyboardInterrupt):
        step(scheduler)
