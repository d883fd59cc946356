"""
How well a simulation predicts an engine: three workloads, each run live and simulated.

A workload runs six times, each time with other requests. A cost model is fitted to the steps of
each run, and predicts the five others: their request logs are replayed on the machine that the
engine was, and a request arrives when it arrived live. Compared are throughput, TTFT, and the
order in which requests end. The ratio of what was predicted to what was live is one if the
simulator is right and the machine as fast as before. Its speed drifts, so the median over all
pairs of runs counts: each pair is there both ways round. `spread` is the median of |ratio - 1|,
and `of medians` compares the median of all predictions with the median of the live runs. `own`
is the spread of predictions from the steps of the same run: what of it is not drift.

Run: python benchmarks/fidelity.py --rounds 5 --out fidelity.json
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from statistics import median
from typing import NamedTuple

import anyio
from load.client import fixed_length
from load.measure import Report, arguments, percentile, run_script, say
from load.workloads import generator, token_prompts

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    LogConfig,
    SchedulerConfig,
)
from pyllama_raw.engine.logs import WARM_UP, RequestLog, RequestRecord
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.lab.sim import (
    CostModel,
    Fit,
    Machine,
    Trace,
    fit,
    simulate,
    until_next,
)

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


class Live(NamedTuple):
    """A run, and the cost model of its steps."""

    load: Load
    requests: list[RequestRecord]
    fit: Fit


async def run(options: Namespace, load: Load, seed: int) -> Logs:
    """What one live run logs."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=load.n_ctx, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
        log=LogConfig(max_steps=10**5, max_requests=10**4),
    )
    prompts = token_prompts(options.model, seed, load.prompts)
    async with AsyncEngine.open(options.model, config) as engine:
        await engine.complete(prompts[0][:8], fixed_length(4), policy_data=WARM_UP)
        async with anyio.create_task_group() as group:
            for prompt, n, gap_s in zip(
                prompts, load.outputs, load.gaps_s, strict=True
            ):
                await anyio.sleep(gap_s)
                group.start_soon(engine.complete, prompt, fixed_length(n))
        requests = [record for record in engine.request_log() if not record.warms_up]
        return requests, engine.step_log()


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


def same_order(live: Sequence[RequestRecord], logged: Sequence[RequestRecord]) -> float:
    """Share of pairs that ended in the same order; ties live count as right."""
    ends = [r.finished_s for r in sorted(live, key=_came)]
    then = [r.finished_s for r in sorted(logged, key=_came)]
    pairs = list(combinations(range(len(ends)), 2))
    right = [(ends[a] - ends[b]) * (then[a] - then[b]) >= 0 for a, b in pairs]
    return sum(right) / len(right)


def _came(record: RequestRecord) -> tuple[float, int]:
    return record.submitted_s, record.request_id


async def measure(options: Namespace, report: Report) -> None:
    """Run each load several times, then predict each run from each other one."""
    for name in options.loads:
        runs = []
        for seed in range(options.rounds + 1):
            load = loads(seed)[name]
            live, steps = await run(options, load, seed)
            say(f"{name}: {figures(live)}")
            runs.append(Live(load, live, fit(until_next(steps))))
        judge(report, name, runs)


def judge(report: Report, name: str, runs: Sequence[Live]) -> None:
    """What the cost model of each run says of the others."""
    ratios: dict[str, list[float]] = {key: [] for key in LIMITS}
    predictions: dict[str, list[float]] = {key: [] for key in LIMITS}
    own: dict[str, list[float]] = {key: [] for key in LIMITS}
    orders = []
    for fitted, live in product(runs, runs):
        log = list(predicted(live.load, fitted.fit.cost, live.requests))
        was, simulated = figures(live.requests), figures(log)
        if fitted is live:
            for key, misses in own.items():
                misses.append(abs(simulated[key] / was[key] - 1))
            continue
        for key, values in ratios.items():
            values.append(simulated[key] / was[key])
            predictions[key].append(simulated[key])
        orders.append(same_order(live.requests, log))
    for key, limit in LIMITS.items():
        live_median = median(figures(live.requests)[key] for live in runs)
        errors = {
            "error": median(ratios[key]) - 1,
            "of medians": median(predictions[key]) / live_median - 1,
        }
        spreads = {
            "spread": median(abs(ratio - 1) for ratio in ratios[key]),
            "own": median(own[key]),
        }
        report.add(load=name, figure=key, live=live_median, **errors, **spreads)
        for figure, error in errors.items():
            report.claim(f"{name}: {key}, {figure}", abs(error), "<=", limit)
    report.claim(f"{name}: pairs in the same order", median(orders), ">=", 0.95)
    report.details[name] = {
        "runs": [
            figures(live.requests)
            | {"preempted": sum(record.n_preempted for record in live.requests)}
            | {"r2": live.fit.r2, "cost": asdict(live.fit.cost)}
            for live in runs
        ],
        "ratios": ratios,
        "orders": orders,
    }


def main() -> int:
    """Run the script."""
    parser, names = arguments(__doc__), tuple(loads(0))
    parser.add_argument("--loads", nargs="+", choices=names, default=names)
    return run_script("fidelity", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
