"""
What the default length of steps and the default order of prompts give, on simulated machines.

Three machines: one that takes long for a step, one that takes long for a row, and one whose rows
cost half beyond the 32nd. Two loads for 8 slots: 60 calls that come as a Poisson process, 20 to 100
tokens in and 16 to 96 out, every sixth 1,200 in; and 64 calls of 100 to 128 in and 16 out at once.
Equal arguments give equal figures, however busy the machine is.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from load.measure import Report, arguments, percentile, run_script
from load.workloads import generator

from pyllama_raw.core.request import Request
from pyllama_raw.engine.logs import Size
from pyllama_raw.lab.arrivals import (
    FIRST_TOKEN,
    Answer,
    coming,
    cut,
    make_pool,
)
from pyllama_raw.lab.sim import CostModel, Guessed, Machine, simulate

TARGETS_S = (0.05, 0.1, 0.2, 0.4)
N_ALLOWED = 128  # tokens that every request allows, so that no policy knows its output


class TiledCost(CostModel):
    """A machine whose products are twice as fast from the 33rd row of a step on."""

    __slots__ = ()

    def seconds(self, size: Size) -> float:
        """Seconds that a step of *size* takes."""
        n_rows = size.n_prefill + size.n_decode
        n_paid = min(n_rows, 32) + max(n_rows - 32, 0) / 2
        by_cells_s = self.context_cell * size.n_context
        return self.step + self.prefill_token * n_paid + by_cells_s


MACHINES: dict[str, tuple[CostModel, float]] = {  # with arrivals a second: an overload
    "long steps": (CostModel(0.015, 0.0009, 0.0012, 1e-7), 2.4),
    "long rows": (CostModel(0.005, 0.004, 0.0042, 3e-7), 1.0),
    "tiles": (TiledCost(0.006, 0.005, 0.005, 2e-7), 1.0),
}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Calls at random or, without a rate, at once; every sixth may be a long one."""

    n_requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    n_long: int | None = None
    rate: float | None = None
    seed: int = 0

    def requests(self, n_most: int) -> Iterator[tuple[float, Request]]:  # noqa: ARG002
        """Like `Workload.requests`; all fit."""
        rng = generator(self.seed)
        pool, now = make_pool(rng), 0.0
        for index in range(self.n_requests):
            now += rng.expovariate(self.rate) if self.rate else 0.0
            is_long = self.n_long is not None and index % 6 == 5
            n_prompt = self.n_long if is_long else rng.randint(*self.prompt)
            tokens = cut(pool, rng, n_prompt or 1)
            tokens[0] = FIRST_TOKEN + index  # no two are equal
            answer = Answer(rng.randint(*self.output), FIRST_TOKEN + index)
            yield coming(index, now, tokens, answer)


def load(name: str, rate: float, seed: int) -> Arrivals:
    """The load of that name."""
    if name == "at once":
        return Arrivals(64, (100, 128), (16, 16), seed=seed)
    return Arrivals(60, (20, 100), (16, 96), n_long=1200, rate=rate, seed=seed)


def figures(machine: Machine, requests: Arrivals) -> dict[str, float]:
    """Throughput, gaps and waits of one simulation."""
    gaps_s: list[float] = []
    run = simulate(
        Guessed(requests, max_tokens=N_ALLOWED),
        machine,
        on_end=lambda _, end: gaps_s.extend(end.timings.itl),
    )
    return {
        "tok_per_s": (run.n_prompt + run.n_output) / run.end_s,
        "ttft_p50_s": percentile(run.ttft_s, 50),
        "ttft_p99_s": percentile(run.ttft_s, 99),
        "e2e_p50_s": percentile(run.e2e_s, 50),
        "itl_p99_s": percentile(gaps_s, 99),
        "itl_max_s": max(gaps_s),
    }


def averages(name: str, kind: str, n_seeds: int, **options: object) -> dict[str, float]:
    """Means over seeds of the machine and the load of these names."""
    cost, rate = MACHINES[name]
    machine = Machine(n_ctx_slot=4096, n_cells=16384, cost=cost, **options)  # type: ignore[arg-type]
    runs = [figures(machine, load(kind, rate, seed)) for seed in range(n_seeds)]
    return {key: mean(run[key] for run in runs) for key in runs[0]}


async def measure(options: Namespace, report: Report) -> None:
    """All machines and loads with each length of steps, then each order of prompts."""
    for name in MACHINES:
        for kind in ("poisson", "at once"):
            targets = (None, *TARGETS_S)
            runs = {
                target_s: averages(name, kind, options.rounds, target_step_s=target_s)
                for target_s in targets
            }
            for target_s, run in runs.items():
                report.add(machine=name, load=kind, setting=f"step {target_s}", **run)
            best = max(runs[target_s]["tok_per_s"] for target_s in TARGETS_S)
            ratio = runs[None]["tok_per_s"] / best
            report.claim(f"{name}, {kind}: throughput to the best", ratio, ">=", 0.97)
        orders = {
            "turns": averages(name, "poisson", options.rounds, prefill_order="turns"),
            "shortest": averages(name, "poisson", options.rounds),
            "shortest, spf": averages(name, "poisson", options.rounds, policy="spf"),
        }
        for order, run in orders.items():
            report.add(machine=name, load="poisson", setting=order, **run)
        for key in ("ttft_p50_s", "ttft_p99_s"):
            ratio = orders["shortest"][key] / orders["turns"][key]
            report.claim(f"{name}: {key}, shortest to turns", ratio, "<=", 1.1)


def main() -> int:
    """Run the script."""
    return run_script("step_simulated", measure, arguments(__doc__), timed=False)


if __name__ == "__main__":
    sys.exit(main())
