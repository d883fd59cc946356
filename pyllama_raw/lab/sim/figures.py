"""Figures of a simulation, and those of several as a table."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import nan

from pyllama_raw.api.results import percentile
from pyllama_raw.core.request import Finished, FinishReason, Request
from pyllama_raw.core.stats import SchedulerStats
from pyllama_raw.lab.table import table as aligned


class Figures:
    """Latencies of all requests, and totals; 32 bytes a request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ttft_s, self.e2e_s = array("d"), array("d")
        self.by_client: dict[str | None, array[float]] = {}  # E2E
        self.n_late = 0  # ended by their deadline, or failed
        self.n_prompt = self.n_cached = self.n_output = self.n_preempted = 0
        self.n_faults = 0  # of the policy
        self.end_s = 0.0
        self.n_steps = 0

    def add(self, request: Request, end: Finished) -> None:
        """Take in a request that has ended."""
        times = end.timings
        e2e_s = times.finished - times.submitted
        self.e2e_s.append(e2e_s)
        self.by_client.setdefault(request.client, array("d")).append(e2e_s)
        if times.first_token is not None:
            self.ttft_s.append(times.first_token - times.submitted)
        self.n_late += end.reason in (None, FinishReason.DEADLINE)
        self.n_prompt += end.n_prompt
        self.n_cached += end.n_cached
        self.n_output += end.n_output

    def close(self, stats: SchedulerStats, now: float) -> None:
        """The last request of one machine has ended."""
        self.n_steps += stats.steps
        self.n_preempted += stats.preempted
        self.n_faults += stats.policy_faults
        self.end_s = max(self.end_s, now)

    @property
    def n_requests(self) -> int:
        return len(self.e2e_s)

    def row(self) -> dict[str, float]:
        """The figures of the table, by the name of their column."""
        medians = [percentile(times, 50) for times in self.by_client.values()]
        n_requests = max(self.n_requests, 1)
        return {
            "tok/s": self.n_output / self.end_s if self.end_s else nan,
            "ttft p50": percentile(self.ttft_s, 50),
            "ttft p99": percentile(self.ttft_s, 99),
            "e2e p50": percentile(self.e2e_s, 50),
            "e2e p99": percentile(self.e2e_s, 99),
            "cached %": 100 * self.n_cached / max(self.n_prompt, 1),
            "late %": 100 * self.n_late / n_requests,
            "unfair x": max(medians) / min(medians) if medians else nan,
            "preempted": self.n_preempted,
            "faults": self.n_faults,
        }


CAPTION = (
    "seconds; late: ended by the deadline; unfair: median E2E of the client that is served "
    "worst over that of the one served best; faults: of hooks of the policy"
)


def table(results: Sequence[Figures]) -> list[str]:
    """A line for each of *results*, under a heading; what the columns mean is below."""
    rows = [{"policy": result.name, **result.row()} for result in results]
    return [*aligned(rows), CAPTION]
