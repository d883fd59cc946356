"""
How well a simulation predicts an engine: three workloads, each run live and simulated.

Runs of one workload follow each other, each with other requests. The cost model is fitted to the
steps of one run. Then the request log of the next run is replayed on the machine that the engine
was: throughput, TTFT, and the order in which requests end. A request arrives in the simulation
when it arrived live. The speed of a machine drifts, so an error is the median over the rounds of
what was predicted, divided by what was live, less one.

Run: python benchmarks/fidelity.py --rounds 5 --out fidelity.json
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import anyio
from load.client import fixed_length
from load.measure import Report, arguments, median_ratio, parse, percentile, say
from load.workloads import generator, token_prompts

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    LogConfig,
    SchedulerConfig,
)
from pyllama_raw.engine.request_log import RequestLog, RequestRecord
from pyllama_raw.engine.step_log import StepRecord
from pyllama_raw.sim import CostModel, Machine, Trace, fit, simulate, until_next

N_SLOTS = 8
CACHED_TOKENS = 40_000  # the default host memory holds more than a run has
LIMITS = {"throughput": 0.05, "ttft p50": 0.1, "ttft p99": 0.2}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and the context they run in."""

    n_ctx: int
    prompts: tuple[int, ...]  # tokens of each
    outputs: tuple[int, ...]
    gaps_s: tuple[float, ...]  # before each


def loads(seed: int) -> dict[str, Load]:
    """All at once; streams that long prompts come between; outputs that outgrow the cells."""
    rng = generator(seed)
    short = tuple(rng.randrange(16, 200) for _ in range(48))
    outputs = tuple(rng.randrange(8, 64) for _ in range(48))
    mixed = tuple(900 if i % 6 == 5 else rng.randrange(16, 64) for i in range(24))
    gaps = tuple(rng.expovariate(4.0) for _ in range(24))
    return {
        "offline": Load(8192, short, outputs, (0.0,) * 48),
        "interference": Load(8192, mixed, (32,) * 24, gaps),
        "pressure": Load(1024, short[:20], (120,) * 20, (0.0,) * 20),
    }


Logs = tuple[list[RequestRecord], list[StepRecord]]


async def run(options: Namespace, load: Load, seed: int) -> Logs:
    """What one live run logs."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=load.n_ctx, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
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
        n_slots=N_SLOTS,
        n_ctx_slot=load.n_ctx,
        n_cells=load.n_ctx,
        cached_tokens=CACHED_TOKENS,
        cost=cost,
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
    """Fit to each run of a load, and predict the next one."""
    for name in options.loads:
        _, steps = await run(options, loads(0)[name], 0)
        rows: list[dict[str, Any]] = []
        for round_ in range(1, options.rounds + 1):
            load, found = loads(round_)[name], fit(until_next(steps))
            live, steps = await run(options, load, round_)
            log = list(predicted(load, found.cost, live))
            row: dict[str, Any] = {"load": name, "round": round_}
            was, said = figures(live), figures(log)
            for key in LIMITS:
                row |= {f"live {key}": was[key], f"said {key}": said[key]}
            row |= {"r2": found.r2, "order": same_order(live, log)}
            row["preempted"] = sum(record.n_preempted for record in live)
            say(str(row))
            report.add(**row)
            rows.append(row)
        for key, limit in LIMITS.items():
            found_, live_ = (
                [r[f"{who} {key}"] for r in rows] for who in ("said", "live")
            )
            error = abs(median_ratio(found_, live_) - 1)
            report.claim(f"{name}: error of {key}", error, "<=", limit)
        order = median(row["order"] for row in rows)
        report.claim(f"{name}: pairs in the same order", order, ">=", 0.95)


def main() -> int:
    """Run the script."""
    parser, names = arguments(__doc__), tuple(loads(0))
    parser.add_argument("--loads", nargs="+", choices=names, default=names)
    options = parse(parser)
    report = Report("fidelity", options)
    anyio.run(measure, options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
