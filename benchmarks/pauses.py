"""
What Python's garbage collection, logging and metrics cost.

8 streams of 32 tokens in and 128 out, with everything on and with everything off, in
turn. On: collection as by default beside 100,000 objects of the host program, all of
Python's logging written to a file, statistics read ten times a second. What each takes is
clocked where it happens: that is exact where the ratio of two runs is not.
"""

from __future__ import annotations

import gc
import logging
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter

import anyio
from load.client import Call, EngineTarget, Run, closed_loop, open_engine
from load.measure import Report, arguments, median_ratio, run_script, say
from load.workloads import token_prompts

from pyllama_raw import AsyncEngine

N_SLOTS, N_CTX, N_PROMPT, N_OUTPUT = 8, 4096, 32, 128
STATS_S = 0.1  # between two readings, as of an eager exporter


@dataclass
class Pauses:
    """How long each thing took, every time it happened, in seconds."""

    collection: list[float] = field(default_factory=list)
    logging: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    _began: float = 0.0

    def on_collection(self, phase: str, _: dict[str, int]) -> None:
        """For gc.callbacks."""
        if phase == "start":
            self._began = perf_counter()
        else:
            self.collection.append(perf_counter() - self._began)

    @property
    def all_s(self) -> list[float]:
        return [*self.collection, *self.logging, *self.metrics]


class ClockedHandler(logging.FileHandler):
    """Writes records to a file, and clocks that."""

    pauses: Pauses

    def handle(self, record: logging.LogRecord) -> bool:
        began = perf_counter()
        handled = bool(super().handle(record))
        self.pauses.logging.append(perf_counter() - began)
        return handled


@contextmanager
def everything_on(pauses: Pauses) -> Iterator[None]:
    """Collection and logging; both are clocked."""
    root = logging.getLogger()
    level = root.level
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        handler = ClockedHandler(file.name)
        handler.pauses = pauses
        root.addHandler(handler)
        root.setLevel(logging.DEBUG)
        gc.callbacks.append(pauses.on_collection)
        gc.enable()
        try:
            yield
        finally:
            gc.disable()
            gc.callbacks.remove(pauses.on_collection)
            root.setLevel(level)
            root.removeHandler(handler)
            handler.close()


async def read_stats(engine: AsyncEngine, pauses: Pauses) -> None:
    """Read the statistics as an exporter would, until cancelled."""
    while True:
        began = perf_counter()
        asdict(engine.stats())
        pauses.metrics.append(perf_counter() - began)
        await anyio.sleep(STATS_S)


async def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds, after one that does not count."""
    host_program = [[index] for index in range(options.heap)]
    gc.disable()
    on: list[Run] = []
    off: list[Run] = []
    all_pauses: list[Pauses] = []
    async with open_engine(options, n_slots=N_SLOTS, n_ctx=N_CTX) as engine:
        for index in range(-1, options.rounds):
            say(f"round {index + 1} of {options.rounds}")
            pauses = Pauses()
            without = await _streams(engine, options, 2 * index)
            with everything_on(pauses):
                async with anyio.create_task_group() as group:
                    group.start_soon(read_stats, engine, pauses)
                    run = await _streams(engine, options, 2 * index + 1)
                    group.cancel_scope.cancel()
            gc.collect()
            if index >= 0:
                on.append(run)
                off.append(without)
                all_pauses.append(pauses)
    del host_program
    conclude(report, on, off, all_pauses)


async def _streams(engine: AsyncEngine, options: Namespace, seed: int) -> Run:
    prompts = token_prompts(options.model, seed, [N_PROMPT] * N_SLOTS)
    calls = [Call(prompt, N_OUTPUT) for prompt in prompts]
    return await closed_loop(EngineTarget(engine), calls, N_SLOTS)


def conclude(
    report: Report, on: list[Run], off: list[Run], all_pauses: list[Pauses]
) -> None:
    """Shares are of the wall time of the runs with everything on."""
    wall_s = sum(run.wall_s for run in on)
    step_s = median(g for run in on for record in run.records for g in record.itl_s)
    for name in ("collection", "logging", "metrics"):
        values = [value for pauses in all_pauses for value in getattr(pauses, name)]
        report.add(
            what=name,
            times=len(values),
            longest_ms=max(values, default=0.0) * 1e3,
            share=sum(values) / wall_s,
        )
    every = [value for pauses in all_pauses for value in pauses.all_s]
    speeds = [[run.output_tok_per_s for run in runs] for runs in (on, off)]
    report.add(what="tok/s on / off", share=median_ratio(*speeds))
    report.details |= {"on": speeds[0], "off": speeds[1], "median_step_s": step_s}
    report.claim("share_of_throughput", sum(every) / wall_s, "<=", 0.01)
    longest = max(every, default=0.0) / step_s
    report.claim("longest_pause_to_median_step", longest, "<=", 1.0)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--heap", type=int, default=100_000, help="objects (100000)")
    return run_script("pauses", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
