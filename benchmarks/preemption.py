"""
A request that lost its slot goes on sooner by a swap than computed again, where that is chosen.

One slot. A request with some history is preempted by an urgent one of a few tokens. Measured is
the time from then until its next token, once without host memory, so that its history is
computed again, and once with it. The first history of an engine is swapped in any case, because
nothing is known of copies; from then on the scheduler chooses.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

from load.measure import NO_DRAFTS, Report, arguments, run_script
from load.workloads import token_prompts

from pyllama_raw import (
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.core.request import Event, Finished, Request
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.opening import build

HISTORIES = (2, 16, 64, 256, 1024)  # prompt tokens of who is preempted
N_URGENT = 4
GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)


class Bench:
    """An engine with one slot, a step at a time."""

    def __init__(self, driver: Driver, events: list[Event]) -> None:
        self.driver = driver
        self.events = events
        self.n_requests = 0

    def add(self, tokens: list[int], max_tokens: int, priority: int) -> int:
        """A request; the lowest priority is the most urgent."""
        self.n_requests += 1
        request = Request(
            self.n_requests,
            array("i", tokens),
            max_tokens,
            sampling=GREEDY,
            priority=priority,
        )
        self.driver.add([request], perf_counter())
        return request.request_id

    def run_until_event(self, request_id: int) -> None:
        """Until the next token of *request_id*, or its end."""
        while True:
            self.events.clear()
            self.driver.step()
            if any(event.request_id == request_id for event in self.events):
                return

    def preempt(self, history: list[int], urgent: list[int]) -> tuple[float, bool]:
        """Seconds until who had *history* goes on, and whether it was swapped."""
        scheduler = self.driver.scheduler
        n_swapped = scheduler.stats().swapped
        victim = self.add(history, 4, priority=1)
        self.run_until_event(victim)
        self.run_until_event(victim)
        started = perf_counter()
        self.add(urgent, 1, priority=0)
        self.run_until_event(victim)
        seconds = perf_counter() - started
        while scheduler.alive:
            self.driver.step()
        stats = scheduler.stats()
        assert stats.preempted == self.n_requests // 2
        scheduler.clear_cache()  # a history is not to be found again
        return seconds, stats.swapped > n_swapped


@contextmanager
def opened(options: Namespace, max_bytes: int) -> Iterator[Bench]:
    """An engine whose snapshots have *max_bytes*."""
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=4096, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=1, preempt="priority"),
        cache=CacheConfig(max_bytes=max_bytes),
    )
    parts, events = build(options.model, config), list[Event]()

    def take(batch: list[Event]) -> None:
        events.extend(batch)
        errors = [e.error for e in batch if isinstance(e, Finished) and e.error]
        assert not errors

    try:
        yield Bench(Driver(parts.scheduler, parts.executor, perf_counter, take), events)
    finally:
        parts.release()


def measure(options: Namespace, report: Report) -> None:
    """The first round warms up, and measures what the choice stands on."""
    lengths = [
        n for _ in range(options.rounds + 1) for n in HISTORIES for _ in range(2)
    ]
    histories = iter(token_prompts(options.model, 1, lengths))
    urgents = iter(token_prompts(options.model, 2, [N_URGENT] * len(lengths)))
    figures: dict[tuple[int, str], list[tuple[float, bool]]] = {}
    with opened(options, 0) as without, opened(options, 2**30) as chooses:
        for round_ in range(options.rounds + 1):
            for n in HISTORIES:
                for name, bench in (("computed", without), ("chosen", chooses)):
                    sample = bench.preempt(next(histories), next(urgents))
                    if round_:
                        figures.setdefault((n, name), []).append(sample)
    for n in HISTORIES:
        computed_s = median(seconds for seconds, _ in figures[n, "computed"])
        chosen_s = median(seconds for seconds, _ in figures[n, "chosen"])
        n_swapped = sum(swapped for _, swapped in figures[n, "chosen"])
        report.add(
            history=n,
            computed_s=computed_s,
            chosen_s=chosen_s,
            swapped=f"{n_swapped} of {options.rounds}",
        )
        if n_swapped:
            ratio = chosen_s / computed_s
            report.claim(f"{n} tokens: swapped to computed", ratio, "<=", 1.0)


if __name__ == "__main__":
    sys.exit(run_script("preemption", measure, arguments(__doc__)))
