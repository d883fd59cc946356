"""
How well a simulation predicts an engine: three workloads, each run live and simulated.

The cost model is fitted to the steps of runs of their own, which nothing is predicted of. Then
the request log of each live run is replayed on the machine that the engine was, and compared:
throughput, TTFT, and the order in which requests end. A request arrives in the simulation
when it arrived live.

Run: python benchmarks/fidelity.py --model FILE --rounds 5
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import anyio
from load.client import fixed_length
from load.measure import Report, arguments, parse, percentile, say
from load.workloads import generator, token_prompts

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    LogConfig,
    SchedulerConfig,
)
from pyllama_raw.engine.request_log import RequestLog, RequestRecord
from pyllama_raw.engine.step_log import StepRecord
from pyllama_raw.sim import CostModel, Machine, Trace, fit, simulate, until_next

N_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and the context they run in."""

    n_ctx: int
    prompts: tuple[int, ...]  # tokens of each
    outputs: tuple[int, ...]
    gaps_s: tuple[float, ...]  # before each


def loads(seed: int) -> dict[str, Load]:
    """All at once; streams that a long prompt comes between; cells for a half of them."""
    rng = generator(seed)
    short = tuple(rng.randrange(16, 200) for _ in range(48))
    outputs = tuple(rng.randrange(8, 64) for _ in range(48))
    mixed = tuple(900 if i % 6 == 5 else rng.randrange(16, 64) for i in range(24))
    gaps = tuple(rng.expovariate(4.0) for _ in range(24))
    return {
        "offline": Load(8192, short, outputs, (0.0,) * 48),
        "interference": Load(8192, mixed, (32,) * 24, gaps),
        "pressure": Load(1024, short[:32], (64,) * 32, (0.0,) * 32),
    }


Logs = tuple[list[RequestRecord], list[StepRecord]]


async def run(options: Namespace, load: Load, seed: int) -> Logs:
    """What one live run logs."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=load.n_ctx, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
        cache=CacheConfig(mode="live"),
        log=LogConfig(max_steps=10**5, max_requests=10**4),
    )
    prompts = token_prompts(options.model, seed, load.prompts)
    async with AsyncEngine.open(options.model, config) as engine:
        await engine.complete(prompts[0][:8], fixed_length(4))
        n_warm = len(engine.step_log())
        async with anyio.create_task_group() as group:
            for prompt, n, gap_s in zip(
                prompts, load.outputs, load.gaps_s, strict=True
            ):
                await anyio.sleep(gap_s)
                group.start_soon(engine.complete, prompt, fixed_length(n))
        return engine.request_log()[1:], engine.step_log()[n_warm:]


def predicted(load: Load, cost: CostModel, live: Sequence[RequestRecord]) -> RequestLog:
    """The request log of a simulation of what came to a live run."""
    log = RequestLog(10**4)
    machine = Machine(
        n_slots=N_SLOTS, n_ctx_slot=load.n_ctx, n_cells=load.n_ctx, cost=cost
    )
    simulate(Trace.of_log(live), machine, watchers=[log])
    return log


def figures(log: Sequence[RequestRecord]) -> dict[str, float]:
    """Seconds, and tokens a second."""
    ttft = [r.first_token_s - r.submitted_s for r in log if r.first_token_s is not None]
    wall_s = max(r.finished_s for r in log) - min(r.submitted_s for r in log)
    return {
        "throughput": sum(r.n_output for r in log) / wall_s,
        "ttft p50": percentile(ttft, 50),
        "ttft p99": percentile(ttft, 99),
    }


def same_order(live: Sequence[RequestRecord], found: Sequence[RequestRecord]) -> float:
    """Share of pairs that ended in the same order; ties live count as right."""
    ends = [r.finished_s for r in sorted(live, key=_came)]
    then = [r.finished_s for r in sorted(found, key=_came)]
    pairs = list(combinations(range(len(ends)), 2))
    right = [(ends[a] - ends[b]) * (then[a] - then[b]) >= 0 for a, b in pairs]
    return sum(right) / len(right)


def _came(record: RequestRecord) -> tuple[float, int]:
    return record.submitted_s, record.request_id


async def measure(options: Namespace, report: Report) -> None:
    """Fit to one run of each load, then predict the others."""
    steps: list[StepRecord] = []
    for load in loads(0).values():
        steps += until_next((await run(options, load, 0))[1])
    found = fit(steps)
    report.details["fit"] = found._asdict() | {"cost": str(found.cost)}
    rows: dict[str, list[dict[str, float]]] = {}
    for round_ in range(1, options.rounds + 1):
        for name, load in loads(round_).items():
            live, _ = await run(options, load, round_)
            log = list(predicted(load, found.cost, live))
            was, said = figures(live), figures(log)
            errors = {key: abs(said[key] / was[key] - 1) for key in was}
            row = errors | {"order": same_order(live, log)}
            rows.setdefault(name, []).append(row)
            shown = ", ".join(f"{key} {value:.3g}" for key, value in row.items())
            say(f"{name}: {shown}")
            report.add(
                load=name,
                round=round_,
                **{f"live {k}": v for k, v in was.items()},
                **row,
            )
    limits = {"throughput": 0.05, "ttft p50": 0.1, "ttft p99": 0.2}
    for name, found_rows in rows.items():
        for key, limit in limits.items():
            error = median(row[key] for row in found_rows)
            report.claim(f"{name}: error of {key}", error, "<=", limit)
        order = median(row["order"] for row in found_rows)
        report.claim(f"{name}: pairs in the same order", order, ">=", 0.95)


def main() -> int:
    """Run the script."""
    options = parse(arguments(__doc__))
    report = Report("fidelity", options)
    anyio.run(measure, options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
