"""
Scheduling policies: what they decide, what they see, and what they may answer.

A policy is a class. An engine makes one instance and calls it in the engine thread: hooks
must return soon, because all streams wait for them. Anything else than an allowed answer is a fault
of the policy.
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
