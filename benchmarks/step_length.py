"""
What shorter steps cost and gain: two or more values of target_step_s at 8 slots.

Three works, each in turn for all values, in every round; who is first rotates. `list` and
`streams` are 32 requests of 128 tokens in and 64 out, as one list and as 8 clients. `prompt` is 6
streams of 64 tokens and, once each has 8, a prompt of 900 words: its time to the first token, and
the longest gap of a stream. `alone_ttft_s` is that of such a prompt without streams. Ratios are
those of the second value to the first, by round.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from interference import N_LONG_OUTPUT, N_PROMPT, N_STREAMS, workload
from load.client import (
    Call,
    EngineTarget,
    ask,
    closed_loop,
    fixed_length,
    open_engine,
)
from load.measure import Report, arguments, median_ratio, run_script, say
from load.workloads import texts, token_prompts

from pyllama_raw import AsyncEngine

N_SLOTS, N_CTX = 8, 8192
N_REQUESTS, N_IN, N_OUT = 32, 128, 64


@dataclass(slots=True)
class Runs:
    """Figures of one value, by round."""

    list_tok_per_s: list[float] = field(default_factory=list)
    streams_tok_per_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    alone_ttft_s: list[float] = field(default_factory=list)

    async def add(self, options: Namespace, engine: AsyncEngine, seed: int) -> None:
        """One round on *engine*."""
        target = EngineTarget(engine)
        works = [
            token_prompts(options.model, 4 * seed + i, [N_IN] * N_REQUESTS)
            for i in range(2)
        ]
        n_tokens = N_REQUESTS * (N_IN + N_OUT)
        started = perf_counter()
        await engine.complete_many(works[0], fixed_length(N_OUT))
        self.list_tok_per_s.append(n_tokens / (perf_counter() - started))
        started = perf_counter()
        await closed_loop(target, [Call(p, N_OUT) for p in works[1]], N_SLOTS)
        self.streams_tok_per_s.append(n_tokens / (perf_counter() - started))
        long_texts = texts(4 * seed + 3, 2, options.words)
        long, alone = [list(await engine.tokenize(text)) for text in long_texts]
        short = token_prompts(options.model, 4 * seed + 2, [N_PROMPT] * N_STREAMS)
        times = await workload(target, [*short, long])
        self.ttft_s.append(times.long_ttft_s)
        self.gap_s.append(max(times.itl_s))
        self.alone_ttft_s.append((await ask(target, Call(alone, N_LONG_OUTPUT))).ttft_s)


async def measure(options: Namespace, report: Report) -> None:
    """Rounds of all values; an engine is open only while it is measured."""
    values: Sequence[float] = options.target_step_s
    runs = {value: Runs() for value in values}
    for index in range(options.rounds):
        first = index % len(values)
        for value in [*values[first:], *values[:first]]:
            say(f"round {index + 1} of {options.rounds}: target_step_s={value}")
            sizes = {"n_slots": N_SLOTS, "n_ctx": N_CTX, "cache_bytes": 0}
            async with open_engine(options, **sizes, target_step_s=value) as engine:
                warm_up = token_prompts(options.model, -1 - index, [N_IN] * N_SLOTS)
                await engine.complete_many(warm_up, fixed_length(N_OUT))
                await runs[value].add(options, engine, index)
    conclude(report, runs)


def conclude(report: Report, runs: dict[float, Runs]) -> None:
    """Medians of the rounds; throughput of each value is compared with the first one's."""
    before = next(iter(runs.values()))
    for value, values_of_run in runs.items():
        figures = {name: getattr(values_of_run, name) for name in Runs.__slots__}
        to_first = {
            f"{name}_to_first": median_ratio(
                getattr(values_of_run, name), getattr(before, name)
            )
            for name in ("list_tok_per_s", "streams_tok_per_s", "ttft_s")
        }
        worst = {"worst_gap_s": max(values_of_run.gap_s)}
        row = {name: median(times) for name, times in figures.items()} | worst
        report.details[str(value)] = figures
        report.add(target_step_s=value, **row, **to_first)
        if values_of_run is not before:
            for name in ("list_tok_per_s", "streams_tok_per_s"):
                ratio = to_first[f"{name}_to_first"]
                report.claim(f"{name} of {value} to the first", ratio, ">=", 0.98)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--target-step-s", type=float, nargs="+", default=[0.3, 0.1], metavar="S"
    )
    parser.add_argument("--words", type=int, default=900, help="of the long prompt")
    return run_script("step_length", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
