"""
The protocol of a scheduler, as a driver sees it.

One without a memory keeps nothing of past requests, and none of its requests has spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import Literal, Protocol

from pyllama_raw.core.memory.cache_stats import CacheStats, Ledger
from pyllama_raw.core.memory.limits import ContextLimits
from pyllama_raw.core.request import Event, FinishReason, Request
from pyllama_raw.core.stats import Occupancy, SchedulerStats, SlotStats
from pyllama_raw.core.step import Fetched, StepPlan, StepResult, Written
from pyllama_raw.errors import PyllamaError

# Told when a request gets a slot, and when it gives one up and will get another.
SlotChange = Literal["running", "preempted"]
Note = Callable[[SlotChange, int, float], None]  # with its id and the time


class Planner(Protocol):
    """Decides what each step does. One thread makes all calls; `now` never goes back."""

    @property
    def limits(self) -> ContextLimits:
        """The limits of the context."""

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""

    @property
    def next_deadline(self) -> float | None:
        """The earliest one of a request that has not ended."""

    def watch(self, note: Note) -> None:
        """Call *note*, and nobody else, from now on; it must not raise."""

    def add_all(self, requests: Items[Request], now: float) -> None:
        """Queue all *requests*, or none if that raises."""

    def cancel(self, request_id: int, now: float, reason: FinishReason = ...) -> bool:
        """End a request before the next step; False if it has ended already."""

    def fail(self, request_id: int, error: PyllamaError, now: float) -> bool:
        """End a request by *error* before the next step; False if it has ended already."""

    def schedule(self, now: float) -> StepPlan:
        """The next step; empty if there is nothing to do."""

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[Event]:
        """Take in what came of *plan*; returns all events since the last ones."""

    def take_events(self) -> list[Event]:
        """Take out the events since the last call."""

    def take_report(self, report: Written | Fetched) -> None:
        """A file that a plan asked for is complete, or read."""

    @property
    def occupancy(self) -> Occupancy:
        """Counts of what there is to do and what is held, at little cost."""

    def stats(self) -> SchedulerStats:
        """The state of this moment and all totals."""

    # -- what a scheduler without a memory leaves as it is ------------------------

    def slots(self) -> tuple[SlotStats, ...]:
        """The slots that run a request, by number."""
        return ()

    def last_plans(self) -> Iterator[StepPlan]:
        """Plans that keep idle slots in files, when no request is left."""
        return iter(())

    def cache_stats(self) -> CacheStats:
        """Counts of what is kept of past requests."""
        return Ledger(0, 0).stats()

    def clear_cache(self, salt: str | None = None) -> int:  # noqa: ARG002
        """Forget what is kept of *salt*, or all; returns bytes freed."""
        return 0
