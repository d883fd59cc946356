"""
The policies that come with the package.

All but `priority` serve a more urgent `priority` first; what they say is about equal ones.

`vtc` is the virtual token counter: equal service for each client that has work. A client's counter
is what it was served: prompt tokens when they get a slot, output tokens as they come. The client
with the smallest counter is next. A client that comes back counts from the smallest of those that
wait, because nobody saves up for later by being idle.

Source: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyllama_raw.core.policies.interface import (
    Key,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
)

OUTPUT_COST = 2.0  # of an output token, in prompt tokens
MIN_KNOWN = 1024  # counters kept before those that say nothing are forgotten

Client = str | None


class Vtc(SchedulingPolicy):
    """Fair by `client`; requests without one are those of one client."""

    name = "vtc"
    keys = "by_client"

    def __init__(self) -> None:
        self.served: dict[Client, float] = {}
        self._waiting: dict[Client, set[int]] = {}  # request_ids
        self._last_left = 0.0  # counter of the client that was last to wait
        self._max_known = MIN_KNOWN

    def order_key(self, request: RequestView, view: SchedulerView) -> Key:
        return (request.priority, self.served.get(request.client, 0.0))

    def on_arrival(self, request: RequestView, now: float) -> None:
        # A client that was idle begins at least at the smallest counter of those that wait.
        client = request.client
        if client not in self._waiting:
            least = self._least()
            self.served[client] = max(self.served.get(client, 0.0), least)
            if len(self.served) > self._max_known:
                self._forget(least)
        self._wait(request)

    def on_admitted(self, request: RequestView, now: float) -> None:
        self._leave(request)
        # A prompt counts once, however often its request gets a slot.
        if not request.n_preempted:
            self._serve(request.client, request.n_prompt)

    def on_scheduled(self, done: Sequence[tuple[RequestView, int]], now: float) -> None:
        for request, n_tokens in done:
            # The step reaches the end of what there is, so it samples a token.
            if n_tokens == request.n_behind:
                self._serve(request.client, OUTPUT_COST)

    def on_preempted(self, request: RequestView, now: float) -> None:
        self._wait(request)

    def on_finished(self, request: RequestView, now: float) -> None:
        self._leave(request)

    def _wait(self, request: RequestView) -> None:
        self._waiting.setdefault(request.client, set()).add(request.request_id)

    def _serve(self, client: Client, cost: float) -> None:
        self.served[client] = self.served.get(client, 0.0) + cost

    def _least(self) -> float:
        """The smallest counter of those that wait, or of the last one that did."""
        waiting = [self.served.get(client, 0.0) for client in self._waiting]
        return min(waiting, default=self._last_left)

    def _leave(self, request: RequestView) -> None:
        request_ids = self._waiting.get(request.client)
        if request_ids is not None:
            request_ids.discard(request.request_id)
            if not request_ids:
                del self._waiting[request.client]
                self._last_left = self.served.get(request.client, 0.0)

    def _forget(self, least: float) -> None:
        """A counter that is not above the least one is set to that when its client comes."""
        self.served = {
            client: served
            for client, served in self.served.items()
            if served > least or client in self._waiting
        }
        self._max_known = max(2 * len(self.served), MIN_KNOWN)


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
