"""
Runs a workload on simulated machines, a step after the other, and counts what came of it.

Each machine has a clock of its own. The one that is furthest behind goes on next, so a
request is sent when all that comes before it has happened.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from math import nan
from typing import NoReturn

from pyllama_raw.api.results import percentile
from pyllama_raw.core.policies.checks import PolicyAnswerError
from pyllama_raw.core.policies.runner import PolicyFault, pass_on_interrupts
from pyllama_raw.core.request import Event, Finished, FinishReason, Request
from pyllama_raw.core.stats import SchedulerStats
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.notices import PolicyLog
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.errors import PolicyFailed, shown
from pyllama_raw.lab.checked import Count, check_value
from pyllama_raw.lab.sim.machine import TOKEN_BYTES, Machine, SimExecutor, VirtualClock
from pyllama_raw.lab.sim.workload import Requests
from pyllama_raw.lab.table import table as aligned
from pyllama_raw.routing import ROUTERS, RoutedRequest, Router, RouterName, prefixes

OnEnd = Callable[[Request, Finished], None]
OnFault = Callable[[PolicyFault], None]
BLOCK = 64  # tokens, of the prefixes that a router knows


class Simulated:
    """One machine: a driver with its clock, and what is open on it."""

    def __init__(
        self,
        name: str,
        machine: Machine,
        tell: OnEnd,
        on_fault: OnFault,
        watchers: Iterable[Watcher],
    ) -> None:
        self.name = name
        self.clock = clock = VirtualClock()
        self.scheduler = machine.scheduler(on_fault)
        executor = SimExecutor(machine.cost, clock, TOKEN_BYTES)
        self.driver = Driver(
            self.scheduler, executor, clock, self._take, watchers=watchers
        )
        self.n_cells = self.scheduler.limits.n_cells
        self.n_open = self.n_open_tokens = 0
        self._tell = tell

    def add(self, request: Request, at_s: float) -> None:
        """*request* comes; an idle machine has waited for it."""
        if not self.n_open:
            self.clock.now = max(self.clock.now, at_s)
        self.n_open += 1
        self.n_open_tokens += request.n_prompt + request.max_tokens
        self.driver.add((request,), at_s)

    def _take(self, events: list[Event], ended: bool) -> None:
        for event in events if ended else ():
            if type(event) is Finished:
                request = self.driver.records[event.request_id].request
                self.n_open -= 1
                self.n_open_tokens -= request.n_prompt + request.max_tokens
                self._tell(request, event)


def simulate(
    workload: Requests,
    machine: Machine,
    *,
    n_replicas: int = 1,
    router: RouterName = "round_robin",
    log: Watcher | None = None,
    watchers: Iterable[Watcher] = (),
    on_end: OnEnd = lambda *_: None,
    keep_going: bool = False,
) -> Figures:
    """
    Run all requests of *workload* to their end.

    Args:
        n_replicas: machines, each like *machine*.
        router: names the rule by which one of them gets a request.
        log: watches the first machine only, as a `StepLog` does.
        watchers: are told of the requests of all machines.
        on_end: called with each request that has ended, and how.
        keep_going: whether the scheduler decides as `fcfs` where a hook of the policy
            fails, as live; then the figures count the faults.

    Raises:
        ConfigError: there is no such policy or router, or no machine.
        PolicyFailed: a hook of the policy failed.
    """
    check_value("n_replicas", n_replicas, Count)
    check_value("router", router, RouterName)
    figures, rule = Figures(machine.policy), ROUTERS[router]()

    def tell(request: Request, end: Finished) -> None:
        figures.add(request, end)
        on_end(request, end)

    watchers = tuple(watchers)
    of_first = watchers if log is None else (*watchers, log)
    on_fault = PolicyLog() if keep_going else _refuse
    replicas = [
        Simulated(str(index), machine, tell, on_fault, watchers if index else of_first)
        for index in range(n_replicas)
    ]
    requests = workload.requests(replicas[0].scheduler.limits.n_ctx_slot)
    coming = next(requests, None)
    while True:
        busy = [replica for replica in replicas if replica.scheduler.has_work]
        behind = min(busy, key=lambda replica: replica.clock.now, default=None)
        if coming is not None and (behind is None or coming[0] <= behind.clock.now):
            at_s, request = coming
            target = _choose(rule, request, replicas) if n_replicas > 1 else replicas[0]
            target.add(request, at_s)
            coming = next(requests, None)
        elif behind is None:
            break
        else:
            behind.driver.step()
    for replica in replicas:
        figures.close(replica.scheduler.stats(), replica.clock.now)
    return figures


def _choose(rule: Router, request: Request, replicas: Sequence[Simulated]) -> Simulated:
    """The replica that *request* is sent to."""
    tokens = request.tokens
    blocks = prefixes(tokens.tobytes(), BLOCK * tokens.itemsize)
    summary = RoutedRequest(request.n_prompt + request.max_tokens, blocks)
    replica = replicas[rule.rank(summary, replicas)[0]]
    rule.sent(summary, replica.name)
    return replica


def _refuse(fault: PolicyFault) -> NoReturn:
    pass_on_interrupts(fault)
    error = fault.error
    is_answer = isinstance(error, PolicyAnswerError)
    reason = str(error) if is_answer else f"raised {shown(error)}"
    raise PolicyFailed(fault.policy, fault.hook, reason) from error


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
