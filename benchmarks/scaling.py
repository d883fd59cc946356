"""
When one engine is not enough, and what a router makes of several: the tables of docs/scaling.md.

Simulated with the scheduler that serves and the rule that routes live; --cost takes a cost
model that `pyllama-raw simulate --fit` made of a step log of the machine in question.

Run: python benchmarks/scaling.py
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

from pyllama_raw.engine.logs import StepLog
from pyllama_raw.lab.arrivals import Arrival
from pyllama_raw.lab.report import table
from pyllama_raw.lab.sim import CostModel, Machine, RouterName, Trace, simulate

MACHINE = Machine(n_slots=8, n_ctx_slot=2048, cached_tokens=2**15)
BLOCK = 32  # tokens
N_TURNS, N_OUTPUT, THINK_S = 4, 50, 20.0
SYSTEM, TURN = (
    256 // BLOCK,
    128 // BLOCK,
)  # blocks that a chat begins with, and a turn adds
N_SYSTEMS = 4  # different beginnings
ONE_RATES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
ROUTERS: tuple[RouterName, ...] = ("round_robin", "least_load", "prefix_affinity")
N_REPLICAS = (1, 2, 4, 8, 16, 32, 64)


def chats(n_chats: int, rate: float, seed: int = 0, think_s: float = THINK_S) -> Trace:
    """
    Chats whose turns come at *rate* a second together; users think for a while.

    Each begins with one of a few system prompts. A turn has all that came before it, but
    the answers, because a trace does not tell which tokens those were.
    """
    arrivals = sorted(
        _arrivals(n_chats, rate, seed, think_s), key=lambda arrival: arrival.at_s
    )
    return Trace(arrivals)


def _arrivals(
    n_chats: int, rate: float, seed: int, think_s: float
) -> Iterator[Arrival]:
    rng = Random(seed)  # noqa: S311 - it is to be repeated
    start, number = 0.0, N_SYSTEMS * SYSTEM
    for _ in range(n_chats):
        start += rng.expovariate(rate / N_TURNS)
        first = rng.randrange(N_SYSTEMS) * SYSTEM
        blocks = list(range(first, first + SYSTEM))
        at_s = start
        for _ in range(N_TURNS):
            blocks += range(number, number + TURN)
            number += TURN
            n_output = max(1, round(rng.expovariate(1 / N_OUTPUT)))
            n_prompt = len(blocks) * BLOCK
            yield Arrival(at_s, n_prompt, n_output, tuple(blocks), block=BLOCK)
            at_s += rng.expovariate(1 / think_s)


def alone(machine: Machine, n_chats: int) -> Iterator[dict[str, object]]:
    """One engine, at more and more load; steps count while chats begin at an even rate."""
    for rate in ONE_RATES:
        log = StepLog()
        row = simulate(chats(n_chats, rate), machine, log=log).row()
        end_s = n_chats * N_TURNS / rate
        steps = [step for step in log if end_s / 4 < step.at_s < end_s]
        span_s = steps[-1].at_s - steps[0].at_s
        yield {
            "turns/s": rate,
            "busy %": 100 * sum(step.seconds for step in steps) / span_s,
            "running": fmean(step.n_running for step in steps),
            "waiting": fmean(step.n_waiting for step in steps),
            **_shown(row),
        }


def together(
    machine: Machine, n_chats: int, rate: float, max_replicas: int
) -> Iterator[dict[str, object]]:
    """More and more engines under each router; load grows with their number."""
    for n in (n for n in N_REPLICAS if n <= max_replicas):
        trace = chats(n * n_chats, n * rate)
        for router in ROUTERS if n > 1 else ("prefix_affinity",):
            figures = simulate(trace, machine, n_replicas=n, router=router)
            yield {"replicas": n, "router": router, **_shown(figures.row())}


def _shown(row: dict[str, float]) -> dict[str, float]:
    names = ("cached %", "ttft p50", "ttft p99", "e2e p50", "e2e p99")
    return {name: row[name] for name in names}


def main() -> int:
    """Print both tables."""
    parser = ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--cost", type=Path, help="a cost model as --fit writes it")
    parser.add_argument("--chats", type=int, default=100, help="for each engine (100)")
    text = "turns a second for each of several engines (2.0)"
    parser.add_argument("--rate", type=float, default=2.0, help=text)
    parser.add_argument("--replicas", type=int, default=64, help="at most (64)")
    options = parser.parse_args()
    cost = CostModel() if options.cost is None else CostModel.load(options.cost)
    machine = replace(MACHINE, cost=cost)
    rows = together(machine, options.chats, options.rate, options.replicas)
    for rows_of_part in (alone(machine, 3 * options.chats), rows):
        print("\n".join(table(list(rows_of_part))), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
