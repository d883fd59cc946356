"""
What bounds of steps cost: throughput, gaps and waits of 8 slots by default and with fixed times.

16 calls at once, 64 to 256 tokens in, with the default bound of a step and with `target_step_s` of
0.05 to 0.4: a burst, in which all have 24 tokens out, and one in which they have 8 to 40, so that
prompts come beside streams. All engines are open from the start and have learned from other calls;
rounds alternate, each with new text. The default is to have 0.97 of the best throughput, while
its gaps need not be those of the longest steps. Seven rounds take four minutes.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter

import anyio
from load.client import Call, EngineTarget, Record, Target, ask, open_engine
from load.measure import Report, arguments, median_ratio, percentile, run_script, say
from load.workloads import generator, token_prompts

from pyllama_raw import AsyncEngine

N_SLOTS, N_CTX, N_CALLS = 8, 8192, 16
OUTPUTS = {"burst": (24, 24), "staggered": (8, 40)}  # least and most tokens of a call
TARGETS_S = (0.05, 0.1, 0.2, 0.4)
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round of one setting."""

    tok_per_s: float  # prompt and output
    itl_p99_s: float
    itl_max_s: float
    ttft_p50_s: float
    ttft_p99_s: float


async def run(target: Target, calls: list[Call]) -> Outcome:
    """All *calls* at once."""
    records: list[Record] = []

    async def send(call: Call) -> None:
        records.append(await ask(target, call))

    started = perf_counter()
    async with anyio.create_task_group() as group:
        for call in calls:
            group.start_soon(send, call)
    wall_s = perf_counter() - started
    gaps = [gap for record in records for gap in record.itl_s]
    waits = [record.ttft_s for record in records]
    return Outcome(
        sum(len(call.prompt) + call.max_tokens for call in calls) / wall_s,
        percentile(gaps, 99),
        max(gaps),
        percentile(waits, 50),
        percentile(waits, 99),
    )


def calls_of(model: Path, load: str, seed: int) -> list[Call]:
    """The calls of one round."""
    rng = generator(load, seed)
    lengths = [rng.randrange(64, 257) for _ in range(N_CALLS)]
    prompts = token_prompts(model, rng.randrange(2**31), lengths)
    return [Call(prompt, rng.randint(*OUTPUTS[load])) for prompt in prompts]


async def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds of all settings; the first one changes from round to round."""
    settings: dict[str, dict[str, float]] = {DEFAULT: {}}
    settings |= {f"{target_s} s": {"target_step_s": target_s} for target_s in TARGETS_S}
    outcomes: dict[str, dict[str, list[Outcome]]] = {load: {} for load in OUTPUTS}
    async with AsyncExitStack() as stack:
        engines: dict[str, AsyncEngine] = {}
        for name, setting in settings.items():
            engine = open_engine(options, n_slots=N_SLOTS, n_ctx=N_CTX, **setting)
            engines[name] = await stack.enter_async_context(engine)
        for index, load in product(range(-1, options.rounds), OUTPUTS):
            calls, first = calls_of(options.model, load, index), index % len(engines)
            for name in [*engines][first:] + [*engines][:first]:
                outcome = await run(EngineTarget(engines[name]), calls)
                # The first round is to learn from.
                if index >= 0:
                    outcomes[load].setdefault(name, []).append(outcome)
                    pace = f"{outcome.tok_per_s:.0f} tokens/s"
                    say(f"round {index + 1}, {load}, {name}: {pace}")
        for name, engine in engines.items():
            report.details[name] = engine.stats().step_cost
            say(f"{name}: {report.details[name]}")
    for load, runs in outcomes.items():
        conclude(report, load, runs)


def conclude(report: Report, load: str, outcomes: dict[str, list[Outcome]]) -> None:
    """Medians of the rounds; ratios are those of the default, by round."""
    for name, runs in outcomes.items():
        report.add(
            load=load,
            target=name,
            **{
                key: median(getattr(run, key) for run in runs)
                for key in Outcome.__dataclass_fields__
            },
        )
    paces = {name: [run.tok_per_s for run in runs] for name, runs in outcomes.items()}
    for name in (name for name in paces if name != DEFAULT):
        ratio = median_ratio(paces[DEFAULT], paces[name])
        report.claim(f"{load}: throughput to {name}", ratio, ">=", 0.97)


def main() -> int:
    """Run the script."""
    return run_script("step_times", measure, arguments(__doc__))


if __name__ == "__main__":
    sys.exit(main())
