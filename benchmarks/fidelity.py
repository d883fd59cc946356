"""
How well a simulation predicts an engine: four workloads, each run live and simulated.

A workload runs six times, each time with other requests. A cost model is fitted to the steps of
each run, and predicts the five others: their request logs are replayed on the machine that the
engine was, and a request arrives when it arrived live. Compared are throughput, TTFT, and the
order in which requests end. The ratio of what was predicted to what was live is one if the
simulator is right and the machine as fast as before. Its speed drifts, so the median over all
pairs of runs counts: each pair is there both ways round. `spread` is the median of |ratio - 1|,
and `of medians` compares the median of all predictions with the median of the live runs. `own`
is the spread of predictions from the steps of the same run: what of it is not drift.

The engine of `edits` speculates, and most of its requests edit a text that they have. Its prompts
and outputs are replayed token by token, so that drafts are right where they were.

Run: python benchmarks/fidelity.py --rounds 5 --out fidelity.json
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from statistics import median
from typing import Literal, NamedTuple

import anyio
from load.client import fixed_length
from load.measure import Report, arguments, percentile, run_script, say
from load.workloads import NOUNS, edit, generator, token_prompts

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    LogConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from pyllama_raw.engine.logs import WARM_UP, RequestLog, RequestRecord, StepLog
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.lab.arrivals import NO_TEXTS, RecordedText
from pyllama_raw.lab.sim import (
    CostModel,
    Fit,
    Machine,
    Trace,
    fit,
    simulate,
    until_next,
)

CACHED_TOKENS = 40_000  # the default host memory holds more than a run has
LIMITS = {"throughput": 0.05, "ttft p50": 0.1, "ttft p99": 0.2}
LIMITS_OF_DRAFTS = {"throughput": 0.08, "e2e p50": 0.08, "e2e p99": 0.08}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and the context they run in."""

    n_ctx: int
    prompts: tuple[int | str, ...]  # each a text, or so many tokens of any
    outputs: tuple[int, ...]
    gaps_s: tuple[float, ...]  # before each
    n_slots: int = 8
    speculation: Literal["off", "lookup"] = "off"

    @property
    def limits(self) -> dict[str, float]:
        """Errors that a prediction of each figure may have."""
        return LIMITS if self.speculation == "off" else LIMITS_OF_DRAFTS


def loads(seed: int) -> dict[str, Load]:
    """All at once; streams that long prompts come between; outputs that outgrow the cells; edits."""
    rng = generator(seed)
    short = tuple(rng.randrange(16, 200) for _ in range(48))
    outputs = tuple(rng.randrange(8, 64) for _ in range(48))
    mixed = tuple(900 if i % 6 == 5 else rng.randrange(16, 64) for i in range(24))
    gaps = tuple(rng.expovariate(4.0) for _ in range(24))
    edits = [edit(noun, verb) for noun in NOUNS for verb in ("load", "fetch")]
    works = rng.sample([*edits, *short[:8]], 24)
    return {
        "offline": Load(8192, short, outputs, (0.0,) * 48),
        "interference": Load(8192, mixed, (32,) * 24, gaps),
        "pressure": Load(1024, short[:20], (120,) * 20, (0.0,) * 20),
        "edits": Load(8192, tuple(works), (96,) * 24, (0.0,) * 24, 2, "lookup"),
    }


class Logs(NamedTuple):
    """What a run logs."""

    requests: list[RequestRecord]
    steps: list[StepRecord]
    texts: Mapping[int, RecordedText]  # of requests, by id, where drafts depend on them


class Live(NamedTuple):
    """A run, and the cost model of its steps."""

    load: Load
    logs: Logs
    fit: Fit


async def run(options: Namespace, load: Load, seed: int) -> Logs:
    """What one live run logs."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=load.n_ctx, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=load.n_slots),
        speculation=SpeculationConfig(mode=load.speculation),
        log=LogConfig(max_steps=10**5, max_requests=10**4),
    )
    lengths = [prompt for prompt in load.prompts if isinstance(prompt, int)]
    random_prompts = iter(token_prompts(options.model, seed, lengths))
    texts: dict[str | None, RecordedText] = {}  # by the client, of one request each
    async with AsyncEngine.open(options.model, config) as engine:
        prompts = [
            next(random_prompts)
            if isinstance(prompt, int)
            else await engine.tokenize(prompt)
            for prompt in load.prompts
        ]

        async def complete(number: int) -> None:
            params, client = fixed_length(load.outputs[number]), str(number)
            result = await engine.complete(prompts[number], params, client=client)
            texts[client] = RecordedText(tuple(prompts[number]), result.token_ids)

        await engine.complete(prompts[0][:8], fixed_length(4), policy_data=WARM_UP)
        async with anyio.create_task_group() as group:
            for number, gap_s in enumerate(load.gaps_s):
                await anyio.sleep(gap_s)
                group.start_soon(complete, number)
        requests = [record for record in engine.request_log() if not record.warms_up]
        steps = engine.step_log()
    if load.speculation == "off":
        return Logs(requests, steps, NO_TEXTS)
    by_id = {record.request_id: texts[record.client] for record in requests}
    return Logs(requests, steps, by_id)


def predicted(load: Load, cost: CostModel, live: Logs) -> tuple[RequestLog, StepLog]:
    """The logs of a simulation of what came to a live run."""
    requests, steps = RequestLog(10**4), StepLog(10**5)
    machine = Machine(
        n_slots=load.n_slots,
        n_ctx_slot=load.n_ctx,
        n_cells=load.n_ctx,
        cached_tokens=CACHED_TOKENS,
        speculation=load.speculation,
        cost=cost,
    )
    trace = Trace.of_log(live.requests, texts=live.texts)
    simulate(trace, machine, watchers=[requests, steps])
    return requests, steps


def figures(log: Sequence[RequestRecord]) -> dict[str, float]:
    """Seconds, and tokens a second."""
    ttft = [r.first_token_s - r.submitted_s for r in log if r.first_token_s is not None]
    e2e = [r.finished_s - r.submitted_s for r in log]
    wall_s = max(r.finished_s for r in log) - min(r.submitted_s for r in log)
    return {
        "throughput": sum(r.n_output for r in log) / wall_s,
        "ttft p50": percentile(ttft, 50),
        "ttft p99": percentile(ttft, 99),
        "e2e p50": percentile(e2e, 50),
        "e2e p99": percentile(e2e, 99),
    }


def drafts(steps: Sequence[StepRecord]) -> dict[str, int]:
    """Tokens that were drafted, and those of them that were right."""
    n_drafted = sum(step.n_drafted for step in steps)
    return {"drafted": n_drafted, "accepted": sum(step.n_accepted for step in steps)}


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
            logs = await run(options, load, seed)
            say(f"{name}: {figures(logs.requests)} {drafts(logs.steps)}")
            runs.append(Live(load, logs, fit(until_next(logs.steps))))
        judge(report, name, runs)


def judge(report: Report, name: str, runs: Sequence[Live]) -> None:
    """What the cost model of each run says of the others."""
    limits = runs[0].load.limits
    ratios: dict[str, list[float]] = {key: [] for key in limits}
    predictions: dict[str, list[float]] = {key: [] for key in limits}
    own: dict[str, list[float]] = {key: [] for key in limits}
    orders, drafted = list[float](), list[dict[str, int]]()
    for fitted, live in product(runs, runs):
        requests, steps = predicted(live.load, fitted.fit.cost, live.logs)
        log = list(requests)
        was, simulated = figures(live.logs.requests), figures(log)
        drafted.append(drafts(list(steps)))
        if fitted is live:
            for key, misses in own.items():
                misses.append(abs(simulated[key] / was[key] - 1))
            continue
        for key, values in ratios.items():
            values.append(simulated[key] / was[key])
            predictions[key].append(simulated[key])
        orders.append(same_order(live.logs.requests, log))
    for key, limit in limits.items():
        live_median = median(figures(live.logs.requests)[key] for live in runs)
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
            figures(live.logs.requests)
            | {"preempted": sum(record.n_preempted for record in live.logs.requests)}
            | {"r2": live.fit.r2, "cost": asdict(live.fit.cost)}
            | drafts(live.logs.steps)
            for live in runs
        ],
        "ratios": ratios,
        "orders": orders,
        "drafts": drafted,
    }


def main() -> int:
    """Run the script."""
    parser, names = arguments(__doc__), tuple(loads(0))
    parser.add_argument("--loads", nargs="+", choices=names, default=names)
    return run_script("fidelity", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
