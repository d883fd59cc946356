"""Schedulers with a policy, and policies that misbehave."""

from collections.abc import Iterable

from pyllama_raw.core.policies import SHIPPED, RequestView, SchedulingPolicy
from pyllama_raw.core.policy_runner import PolicyFault
from pyllama_raw.core.request import Request
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.sequence import Sequence
from tests.core.support import make_request, make_scheduler, run_until_idle


def with_policy(
    policy: SchedulingPolicy, **options
) -> tuple[Scheduler, list[PolicyFault]]:
    """A scheduler, and the faults that will have been reported."""
    faults: list[PolicyFault] = []
    scheduler = make_scheduler(policy=policy, report=faults.append, **options)
    return scheduler, faults


def order_of(
    policy: SchedulingPolicy, requests: Iterable[Request], now: float = 0.0, **options
) -> list[int]:
    """The request ids in the order in which they get the one slot; they come at once."""
    options = {"n_slots": 1, "n_ctx_slot": 256, "n_batch": 256} | options
    scheduler, faults = with_policy(policy, **options)
    for request in requests:
        scheduler.add(request, now)
    plans, _ = run_until_idle(scheduler)
    assert not faults
    return list(dict.fromkeys(work.request_id for plan in plans for work in plan.works))


def waiting(request_id: int, now: float = 0.0, **fields) -> RequestView:
    """What a policy sees of a request that has come at *now*."""
    return RequestView(Sequence(make_request(request_id, **fields), 0, now), {}.get)


def shipped() -> list[SchedulingPolicy]:
    return [policy() for policy in SHIPPED.values()]


class LastComeFirst(SchedulingPolicy):
    name = "lcfs"

    def order_key(self, request, view):
        return -request.request_id


class ByTurn(SchedulingPolicy):
    """Keys change with the time."""

    name = "by turn"
    keys = "changing"

    def order_key(self, request, view):
        return (request.request_id + view.now) % 100


def views_of(hook):
    """A policy that keeps what *hook* sees."""
    seen = []

    class Keeping(SchedulingPolicy):
        name = "keeping"

    def keep(self, *arguments):
        seen.append(arguments)
        return getattr(SchedulingPolicy, hook)(self, *arguments)

    setattr(Keeping, hook, keep)
    return Keeping(), seen
