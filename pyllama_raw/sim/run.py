"""Runs a workload on a simulated machine, a step after the other."""

from __future__ import annotations

from collections.abc import Callable

from pyllama_raw.core.request import Event, Finished, Request
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.step_log import StepLog
from pyllama_raw.sim.executor import SimExecutor, VirtualClock
from pyllama_raw.sim.figures import Figures
from pyllama_raw.sim.machine import TOKEN_BYTES, Machine
from pyllama_raw.sim.workload import Workload


def simulate(
    workload: Workload,
    machine: Machine,
    *,
    log: StepLog | None = None,
    on_end: Callable[[Request, Finished], None] = lambda *_: None,
) -> Figures:
    """
    Run all requests of *workload* to their end.

    Args:
        log: gets a record of each step.
        on_end: called with each request that has ended, and how.

    Raises:
        ConfigError: there is no such policy.
    """
    clock = VirtualClock()
    scheduler = machine.scheduler()
    executor = SimExecutor(machine.cost, clock, TOKEN_BYTES)
    figures = Figures(machine.policy)
    alive: dict[int, Request] = {}

    def tell(events: list[Event], ended: bool) -> None:
        if ended:
            for event in events:
                if type(event) is Finished:
                    request = alive.pop(event.request_id)
                    figures.add(request, event)
                    on_end(request, event)

    driver = Driver(scheduler, executor, clock, tell, log=log)
    requests = workload.requests(scheduler.limits.n_ctx_slot)
    coming = next(requests, None)
    while coming is not None or scheduler.has_work:
        while coming is not None and coming[0] <= clock.now:
            at_s, request = coming
            alive[request.request_id] = request
            driver.add((request,), at_s)
            coming = next(requests, None)
        if not driver.step() and coming is not None:
            clock.now = max(clock.now, coming[0])
    figures.close(scheduler.stats(), clock.now)
    return figures
