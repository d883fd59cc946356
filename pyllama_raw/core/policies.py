"""
Scheduling policies: what they decide, what they see, what they may answer, and those that are here.

A policy is a class. An engine makes one instance and calls it in the engine thread: hooks
must return soon, because all streams wait for them. The core keeps budgets, memory, ties and the
bound of waits. Anything else than an allowed answer is a fault of the policy.

All policies here but `priority` serve a more urgent `priority` first; what they say is about equal
ones. `vtc` is the virtual token counter: equal service for each client that has work. A client's
counter is what it was served: prompt tokens when they get a slot, output tokens as they come. The
client with the smallest counter is next. A client that comes back counts from the smallest of those
that wait, because nobody saves up for later by being idle.

Source: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal

from pyllama_raw.core.request import Value
from pyllama_raw.core.sequence import Running, Sequence
from pyllama_raw.errors import shown

NO_DATA: Mapping[str, Value] = MappingProxyType({})


class RequestView:
    """
    A request as it is whenever it is looked at; no attribute can be set or deleted.

    It may be kept: then it keeps all of the request in memory. Thread: the engine's.
    """

    __slots__ = ("_running", "_sequence")
    _running: Callable[[int], Running | None]
    _sequence: Sequence

    def __init__(
        self, sequence: Sequence, running: Callable[[int], Running | None]
    ) -> None:
        """
        Args:
            running: finds by request_id what a slot has of it.
        """
        object.__setattr__(self, "_sequence", sequence)
        object.__setattr__(self, "_running", running)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{name} cannot be set: a policy keeps what it notes itself"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} cannot be deleted: a view is for reading")

    def __repr__(self) -> str:
        names = (n for n, field in vars(RequestView).items() if type(field) is property)
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"RequestView({fields})"

    @property
    def request_id(self) -> int:
        return self._sequence.request.request_id

    @property
    def client(self) -> str | None:
        """The client that sent it."""
        return self._sequence.request.client

    @property
    def priority(self) -> int:
        """Lower is more urgent."""
        return self._sequence.request.priority

    @property
    def submitted(self) -> float:
        """The moment it came, on the clock of `SchedulerView.now`."""
        return self._sequence.submitted

    @property
    def admitted(self) -> float | None:
        """The moment it first got a slot, on the same clock."""
        return self._sequence.admitted

    @property
    def deadline(self) -> float | None:
        """The moment it ends at the latest, on the same clock."""
        return self._sequence.request.deadline

    @property
    def n_prompt(self) -> int:
        """Tokens."""
        return self._sequence.request.n_prompt

    @property
    def max_tokens(self) -> int:
        """Tokens of the output, at most."""
        return self._sequence.request.max_tokens

    @property
    def n_computed(self) -> int:
        """Tokens whose memory is in the slot; 0 without a slot."""
        running = self._running(self.request_id)
        return 0 if running is None else running.n_computed

    @property
    def n_behind(self) -> int:
        """Tokens known but not computed; a running one with 1 decodes."""
        return len(self._sequence.tokens) - self.n_computed

    @property
    def n_output(self) -> int:
        """Tokens sampled."""
        return self._sequence.n_output

    @property
    def n_preempted(self) -> int:
        """The number of times it lost its slot."""
        return self._sequence.n_preempted

    @property
    def data(self) -> Mapping[str, Value]:
        """The caller's `policy_data`."""
        return self._sequence.request.policy_data or NO_DATA


MAX_NUMBERS = 8  # in a key
MAX_BITS = 64  # of a whole number in a key: longer ones take long to compare

# Plain ones, because a class of the policy could compare as it likes.
NUMBERS = (int, float, bool)


class PolicyAnswerError(ValueError):
    """A hook returned what it must not."""

    def __init__(self, answer: object, allowed: str) -> None:
        super().__init__(f"returned {shown(answer)}: return {allowed}")


def checked_key(key: object) -> tuple[float, ...]:
    """*key* as plain numbers that can be compared. Raises PolicyAnswerError."""
    if type(key) in NUMBERS:
        key = (key,)
    if type(key) is tuple and 1 <= len(key) <= MAX_NUMBERS and all(map(_is_fine, key)):
        return key
    allowed = f"a number, or a tuple of 1 to {MAX_NUMBERS} numbers, none of them NaN"
    raise PolicyAnswerError(key, allowed)


def _is_fine(number: object) -> bool:
    if type(number) is float:
        return number == number  # not so for NaN  # noqa: PLR0124
    return type(number) in NUMBERS and int.bit_length(number) <= MAX_BITS  # type: ignore[arg-type]


def checked_quota(quota: object, request_ids: Collection[int]) -> dict[int, int]:
    """The tokens of those of *request_ids* that *quota* limits."""
    if not isinstance(quota, Mapping):
        raise PolicyAnswerError(quota, "a mapping of request_id to tokens")
    limits = {}
    for request_id in request_ids:
        n_tokens = quota.get(request_id)
        if n_tokens is not None:
            if type(n_tokens) is not int:
                raise PolicyAnswerError(n_tokens, "whole numbers of tokens")
            limits[request_id] = n_tokens
    return limits


API_VERSION = 1

Key = float | tuple[float, ...]


def _nothing(request_id: int) -> int:  # noqa: ARG001 - without a cache
    return 0


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The scheduler at one moment."""

    now: float = 0.0  # seconds
    n_slots: int = 1
    n_running: int = 0
    n_waiting: int = 0
    n_cells: int = 0  # of all slots together
    n_cells_used: int = 0
    probe: Callable[[int], int] = field(default=_nothing, repr=False)

    def n_cached(self, request: RequestView) -> int:
        """Prompt tokens of a waiting *request* that slots and snapshots have right now."""
        return self.probe(request.request_id)


class SchedulingPolicy:
    """
    Base of all policies; every hook has a default, which is what `fcfs` does.

    Keys are a number or a tuple of numbers, without NaN. Among equal keys the lower
    `priority` goes first, then the earlier arrival. A hook that raises or returns something
    else is reported by name, and the core decides as `fcfs` for that step.
    """

    name: ClassVar[str]  # what `policy=` says
    api_version: ClassVar[int] = API_VERSION

    keys: ClassVar[Literal["fixed", "changing", "by_client"]] = "fixed"
    """
    Moments at which order_key() is asked: once a request; in each step, for the first
    ones and some others in turn; or so for the first request of each client only, which keeps
    those of a client in the order of `fcfs`.
    """

    def order_key(self, request: RequestView, view: SchedulerView) -> Key:
        """The waiting request with the smallest key gets the next slot."""
        return request.priority

    def prefill_quota(
        self,
        prompts: Items[RequestView],
        view: SchedulerView,
    ) -> Mapping[int, int]:
        """
        The most tokens that prompts get in this step, by request_id; none is no limit.

        Below two a prompt waits, but not for more than a bounded number of steps.
        """
        return {}

    def victim_key(self, request: RequestView, view: SchedulerView) -> Key | None:
        """The running request with the largest key is preempted first; None: the last."""
        return (request.priority, request.submitted, request.request_id)

    def on_arrival(self, request: RequestView, now: float) -> None:
        """A request has come."""

    def on_admitted(self, request: RequestView, now: float) -> None:
        """A waiting request has got a slot."""

    def on_scheduled(self, done: Items[tuple[RequestView, int]], now: float) -> None:
        """
        A step was computed: *done* has its requests, each with its tokens in the step.

        A request is as it was before the step. If these were all its tokens behind
        (`n_behind`), the step has also sampled one.
        """

    def on_preempted(self, request: RequestView, now: float) -> None:
        """A running request has lost its slot and waits."""

    def on_finished(self, request: RequestView, now: float) -> None:
        """A request has ended, wherever it was."""


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

    def on_scheduled(self, done: Items[tuple[RequestView, int]], now: float) -> None:
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


class Spf(SchedulingPolicy):
    """
    The shortest prefill first, until a long one waited long: most get their first token soon.

    It needs no guess of outputs, because only what is left to compute of a prompt counts.
    """

    name = "spf"
    keys = "changing"

    def order_key(self, request: RequestView, view: SchedulerView) -> Key:
        waited_s = view.now - request.submitted
        n_prefill = request.n_prompt - view.n_cached(request)
        return (request.priority, -waited_s / max(n_prefill, 1))


SHIPPED: dict[str, type[SchedulingPolicy]] = {
    policy.name: policy for policy in (Fcfs, Priority, Sjf, Lpm, Edf, Vtc, Hrrn, Spf)
}
