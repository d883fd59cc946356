"""
What bounds of steps cost: throughput and gaps of 8 slots with learned and with fixed times.

24 calls at once, 64 to 256 tokens in and 24 out, with `target_step_s` of 0.05 to 0.4 and without.
Rounds alternate, each with new text. Learned times are to have 0.97 of the best throughput, while
its gaps need not be those of the longest steps.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import anyio
from load.client import Call, Record, ask, engine_target
from load.measure import Report, arguments, median_ratio, percentile, run_script, say
from load.workloads import generator, token_prompts

N_SLOTS, N_CTX, N_CALLS, N_OUTPUT = 8, 8192, 24, 24
TARGETS_S = (0.05, 0.1, 0.2, 0.4)
DEFAULT = "learned"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round of one setting."""

    tok_per_s: float  # prompt and output
    itl_p99_s: float
    itl_max_s: float
    ttft_p50_s: float


async def run(options: Namespace, seed: int, target_s: float | None) -> Outcome:
    """All calls at once, on an engine that has learned from a few others."""
    rng = generator(seed)
    lengths = [rng.randrange(64, 257) for _ in range(N_CALLS)]
    prompts = token_prompts(options.model, seed, lengths)
    warm_up = token_prompts(options.model, -1 - seed, lengths[:N_SLOTS])
    records: list[Record] = []
    async with engine_target(
        options, n_slots=N_SLOTS, n_ctx=N_CTX, target_step_s=target_s
    ) as target:

        async def call(prompt: list[int]) -> None:
            records.append(await ask(target, Call(prompt, N_OUTPUT)))

        for calls in (warm_up, prompts):
            records.clear()
            started = perf_counter()
            async with anyio.create_task_group() as group:
                for prompt in calls:
                    group.start_soon(call, prompt)
            wall_s = perf_counter() - started
    gaps = [gap for record in records for gap in record.itl_s]
    return Outcome(
        (sum(lengths) + N_CALLS * N_OUTPUT) / wall_s,
        percentile(gaps, 99),
        max(gaps),
        median(record.ttft_s for record in records),
    )


async def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds of all settings; the first one changes from round to round."""
    settings: dict[str, float | None] = {DEFAULT: None}
    settings |= {f"{target_s} s": target_s for target_s in TARGETS_S}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in settings}
    for seed in range(options.rounds):
        say(f"round {seed + 1} of {options.rounds}")
        names = [*settings][seed % len(settings) :] + [*settings][
            : seed % len(settings)
        ]
        for name in names:
            outcomes[name].append(await run(options, seed, settings[name]))
    for name, runs in outcomes.items():
        report.add(
            target=name,
            **{
                key: median(getattr(run, key) for run in runs)
                for key in Outcome.__dataclass_fields__
            },
        )
    paces = {name: [run.tok_per_s for run in runs] for name, runs in outcomes.items()}
    ratio = min(median_ratio(paces[DEFAULT], paces[f"{s} s"]) for s in TARGETS_S)
    report.claim("throughput to the best target", ratio, ">=", 0.97)


def main() -> int:
    """Run the script."""
    return run_script("step_times", measure, arguments(__doc__))


if __name__ == "__main__":
    sys.exit(main())
