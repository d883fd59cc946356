"""
The policies that come with the package.

All but `priority` serve a more urgent `priority` first; what they say is about equal ones.
"""

from __future__ import annotations

from pyllama_raw.core.policies.policy import Key, SchedulerView, SchedulingPolicy
from pyllama_raw.core.policies.vtc import OUTPUT_COST, Vtc
from pyllama_raw.core.view import RequestView

LEARNED = 0.1  # weight of the request that ended last


class Fcfs(SchedulingPolicy):
    """First come, first served."""

    name = "fcfs"


class Priority(SchedulingPolicy):
    """By priority, but none is passed by one that came long after."""

    name = "priority"
    aging_s = 30.0  # seconds of waiting that make up for one step of priority

    def order_key(self, request: RequestView, view: SchedulerView) -> Key:
        """Waiting makes all urgent at the same speed, so keys stay what they are."""
        return request.submitted + request.priority * self.aging_s


def service(request: RequestView) -> float:
    """
    The cost of *request*, in prompt tokens.

    `policy_data["n_output"]` is the caller's guess of the output; else it is `max_tokens`.
    """
    guess = request.data.get("n_output")
    n_output = guess if isinstance(guess, int) else request.max_tokens
    return request.n_prompt + OUTPUT_COST * min(max(n_output, 1), request.max_tokens)


class Sjf(SchedulingPolicy):
    """The shortest job first, which makes the median wait short."""

    name = "sjf"

    def order_key(self, request: RequestView, view: SchedulerView) -> Key:
        return (request.priority, service(request))


class Lpm(SchedulingPolicy):
    """The longest prefix match first, so that what is cached is used before it is lost."""

    name = "lpm"
    keys = "changing"

    def order_key(self, request: RequestView, view: SchedulerView) -> Key:
        return (request.priority, -view.n_cached(request))


class Edf(SchedulingPolicy):
    """
    The earliest deadline first that can be kept; then those without one; then those too late.

    How long a request takes is learned from those that ended. Without the last rule nearly
    all are late under overload, because each is begun when little time is left.
    """

    name = "edf"
    keys = "changing"

    def __init__(self) -> None:
        self._pace = 0.0  # seconds for one token of service

    def order_key(self, request: RequestView, view: SchedulerView) -> Key:
        if request.deadline is None:
            return (request.priority, 1, 0.0)
        ends = view.now + self._pace * service(request)
        return (request.priority, 2 * (ends > request.deadline), request.deadline)

    def on_finished(self, request: RequestView, now: float) -> None:
        started = request.admitted
        is_cut = request.deadline is not None and now >= request.deadline
        if started is not None and request.n_output and not is_cut:
            pace = (now - started) / service(request)
            weight = LEARNED if self._pace else 1.0
            self._pace += weight * (pace - self._pace)


class Hrrn(SchedulingPolicy):
    """The highest response ratio next: short jobs first, until a long one waited long."""

    name = "hrrn"
    keys = "changing"

    def order_key(self, request: RequestView, view: SchedulerView) -> Key:
        waited_s = view.now - request.submitted
        return (request.priority, -waited_s / service(request))


SHIPPED: dict[str, type[SchedulingPolicy]] = {
    policy.name: policy for policy in (Fcfs, Priority, Sjf, Lpm, Edf, Vtc, Hrrn)
}
