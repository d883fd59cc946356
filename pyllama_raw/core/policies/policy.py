"""
Scheduling policies: what they decide and what they see.

A policy is a class. An engine makes one instance and calls it in the engine thread: hooks
must return soon, because all streams wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pyllama_raw.core.view import RequestView

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
