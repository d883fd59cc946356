"""
What Python's garbage collector takes of a run of streams, and of its longest step.

Streams of an engine as configured by default, each token read by an asyncio task. A
collection stops every thread that needs Python, whichever one triggered it, so each one
counts: `share` is all of them against the wall time, `max_ms` the longest against the
median gap between two tokens of a stream. Nothing is frozen or disabled: the collector
belongs to the program that uses the engine.
"""

from __future__ import annotations

import gc
import sys
from argparse import Namespace
from statistics import median
from time import perf_counter

import anyio
from load.measure import Report, arguments, parse, say

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)

N_PROMPT, N_OUTPUT = 64, 128


class Collections:
    """Seconds of each collection, by generation."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = {0: [], 1: [], 2: []}
        self._started = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """As gc.callbacks calls it, in the thread that collects."""
        if phase == "start":
            self._started = perf_counter()
        else:
            self.seconds[info["generation"]].append(perf_counter() - self._started)


async def run(engine: AsyncEngine, options: Namespace, seed: int) -> list[float]:
    """All requests; the gaps between tokens."""
    params = SamplingParams(max_tokens=N_OUTPUT, temperature=0, ignore_eos=True)
    gaps: list[float] = []
    numbers = iter(range(options.requests))

    async def client() -> None:
        for number in numbers:
            prompt = [1 + (seed + number) % 199, *range(1, N_PROMPT)]
            async with engine.generate(prompt, params) as generation:
                last = None
                async for _ in generation:
                    now = perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now

    async with anyio.create_task_group() as group:
        for _ in range(options.streams):
            group.start_soon(client)
    return gaps


async def measure(options: Namespace, report: Report) -> None:
    """Every round with the collector's times noted."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=options.streams * 512, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=options.streams),
    )
    shares, longest = [], []
    async with AsyncEngine.open(options.model, config) as engine:
        await run(engine, options, 0)
        for index in range(options.rounds):
            say(f"round {index + 1} of {options.rounds}")
            noted, started = Collections(), perf_counter()
            gc.callbacks.append(noted)
            gaps = await run(engine, options, 1 + index * options.requests)
            gc.callbacks.remove(noted)
            wall_s = perf_counter() - started
            pauses = [s for seconds in noted.seconds.values() for s in seconds]
            shares.append(sum(pauses) / wall_s)
            longest.append(max(pauses, default=0.0) / median(gaps))
            report.add(
                round=index + 1,
                share=shares[-1],
                max_ms=1e3 * max(pauses, default=0.0),
                step_ms=1e3 * median(gaps),
                **{f"gen{n}": len(seconds) for n, seconds in noted.seconds.items()},
            )
    report.details["n_objects"] = len(gc.get_objects())
    report.claim("share", median(shares), "<=", 0.01)
    # A step of the median length with the pause in it is less than twice as long.
    report.claim("longest_pause_to_median_step", max(longest), "<=", 1.0)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=int, default=8, help="at a time (8)")
    parser.add_argument("--requests", type=int, default=24)
    options = parse(parser)
    report = Report("gc_pauses", options)
    anyio.run(measure, options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
