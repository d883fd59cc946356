"""
What bounds of steps cost: throughput, gaps and waits of 8 slots by default and with fixed times.

24 calls at once, 64 to 256 tokens in and 24 out, with the default bound of a step and with
`target_step_s` of 0.05 to 0.4. All engines are open from the start and have learned from a few other
calls; rounds alternate, each with new text. The default is to have 0.97 of the best throughput, while
its gaps need not be those of the longest steps. Ten rounds take four minutes.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import anyio
from load.client import Call, Record, Target, ask, engine_target
from load.measure import Report, arguments, median_ratio, percentile, run_script, say
from load.workloads import generator, token_prompts

N_SLOTS, N_CTX, N_CALLS, N_OUTPUT = 8, 8192, 24, 24
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


async def run(target: Target, prompts: list[list[int]]) -> Outcome:
    """All calls at once."""
    records: list[Record] = []

    async def call(prompt: list[int]) -> None:
        records.append(await ask(target, Call(prompt, N_OUTPUT)))

    started = perf_counter()
    async with anyio.create_task_group() as group:
        for prompt in prompts:
            group.start_soon(call, prompt)
    wall_s = perf_counter() - started
    gaps = [gap for record in records for gap in record.itl_s]
    waits = [record.ttft_s for record in records]
    return Outcome(
        (sum(map(len, prompts)) + len(prompts) * N_OUTPUT) / wall_s,
        percentile(gaps, 99),
        max(gaps),
        percentile(waits, 50),
        percentile(waits, 99),
    )


async def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds of all settings; the first one changes from round to round."""
    settings: dict[str, dict[str, float]] = {DEFAULT: {}}
    settings |= {f"{target_s} s": {"target_step_s": target_s} for target_s in TARGETS_S}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in settings}
    async with AsyncExitStack() as stack:
        targets: dict[str, Target] = {}
        for name, setting in settings.items():
            engine = engine_target(options, n_slots=N_SLOTS, n_ctx=N_CTX, **setting)
            targets[name] = await stack.enter_async_context(engine)
        for index in range(-1, options.rounds):
            # A few calls of each, whose figures do not count, come first.
            n_calls = N_CALLS if index >= 0 else N_SLOTS
            rng = generator(index)
            lengths = [rng.randrange(64, 257) for _ in range(n_calls)]
            prompts = token_prompts(options.model, index, lengths)
            first = index % len(targets)
            for name in [*targets][first:] + [*targets][:first]:
                outcome = await run(targets[name], prompts)
                if index >= 0:
                    outcomes[name].append(outcome)
                    say(f"round {index + 1}, {name}: {outcome.tok_per_s:.0f} tokens/s")
    for name, runs in outcomes.items():
        report.add(
            target=name,
            **{
                key: median(getattr(run, key) for run in runs)
                for key in Outcome.__dataclass_fields__
            },
        )
    paces = {name: [run.tok_per_s for run in runs] for name, runs in outcomes.items()}
    for target_s in TARGETS_S:
        ratio = median_ratio(paces[DEFAULT], paces[f"{target_s} s"])
        report.claim(f"throughput to {target_s} s", ratio, ">=", 0.97)


def main() -> int:
    """Run the script."""
    return run_script("step_times", measure, arguments(__doc__))


if __name__ == "__main__":
    sys.exit(main())
