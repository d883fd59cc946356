"""
CPU time that a step costs in Python, by running sequences; no model is computed.

`schedule_apply_us` is the scheduler alone. `engine_us` is the engine thread around the
fake executor: scheduler, commands, delivery of one token to each of as many streams.
`native_us` is the engine thread on a tiny random model, with the filling of batches and
the call of the shim; the threads that compute and sample are not in it. With
`native_streams_us` an asyncio reader takes every token. Both are means, with collections
of garbage and with caches that the model has emptied, and are shown without a limit.

CPU time of the one thread, medians of the steps; of the rounds the median.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import median
from threading import enumerate as all_threads
from time import thread_time

import anyio
from fakes import N_WARMUP, answer, engine_host_s, running_scheduler
from load.measure import NO_DRAFTS, Report, arguments, run_script, say

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)

ROOT = Path(__file__).parents[1]
SEQUENCES = (1, 8, 64, 256)
N_WAITING = 10_000
N_STEPS = 500
MAX_TOKENS = 220  # of a sequence on the tiny model


def limit_us(n_sequences: int) -> float:
    """What Python may take of a step."""
    return 60 + 2 * n_sequences


def schedule_apply_us(n_running: int, n_waiting: int) -> float:
    """Median of one schedule() and one apply()."""
    scheduler = running_scheduler(n_running, n_waiting)
    times = []
    for _ in range(N_STEPS):
        started = thread_time()
        plan = scheduler.schedule(0.0)
        planned = thread_time() - started
        result = answer(plan)
        started = thread_time()
        scheduler.apply(plan, result, 0.0)
        times.append(planned + thread_time() - started)
    return 1e6 * median(times)


def engine_us(n_running: int) -> float:
    """Median of the steps of an engine thread."""
    return 1e6 * median(engine_host_s(n_running, N_STEPS))


async def native_us(model: Path, n_running: int, *, streams: bool) -> float:
    """Mean CPU time of the engine thread a step; *streams*: readers take every token."""
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=n_running * 256, n_threads=1),
        scheduler=SchedulerConfig(n_slots=n_running),
        cache=CacheConfig(mode="live"),
    )
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)

    async def read(index: int) -> None:
        prompt = [1 + index % 200] * 4
        async with engine.generate(prompt, params) as generation:
            if streams:
                async for _ in generation:
                    pass
            else:
                await generation.collect()

    async with (
        AsyncEngine.open(model, config) as engine,
        anyio.create_task_group() as readers,
    ):
        for index in range(n_running):
            readers.start_soon(read, index)
        n_before, before_s = await _moment(engine, N_WARMUP)
        n_after, after_s = await _moment(engine, MAX_TOKENS - N_WARMUP)
    return 1e6 * (after_s - before_s) / (n_after - n_before)


async def _moment(engine: AsyncEngine, n_steps: int) -> tuple[int, float]:
    """Steps done, at least *n_steps*, and the CPU time of the engine thread by then."""
    while True:
        await anyio.sleep(1e-3)  # stats() would be up to 0.25 s old
        n_done = engine._parts.scheduler.stats().steps
        if n_done >= n_steps:
            return n_done, _engine_thread_s()


def _run(model: Path, n_running: int, *, streams: bool) -> float:
    return anyio.run(partial(native_us, model, n_running, streams=streams))


def _engine_thread_s() -> float:
    """CPU time of the only engine thread so far."""
    (thread,) = (t for t in all_threads() if t.name == "pyllama-engine")
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def measure(options: Namespace, report: Report) -> None:
    """Every figure once a round, the median of the rounds is claimed."""
    rows: dict[int, dict[str, list[float]]] = {}
    for index in range(options.rounds):
        for n in SEQUENCES:
            say(f"round {index + 1} of {options.rounds}: {n} sequences")
            run = partial(_run, options.model, n)
            figures = {
                "schedule_apply_us": schedule_apply_us(n, 0),
                "with_10000_waiting_us": schedule_apply_us(n, N_WAITING),
                "engine_us": engine_us(n),
                "native_us": run(streams=False),
                "native_streams_us": run(streams=True),
            }
            for name, value in figures.items():
                rows.setdefault(n, {}).setdefault(name, []).append(value)
    for n, columns in rows.items():
        row = {name: median(values) for name, values in columns.items()}
        report.add(sequences=n, limit_us=limit_us(n), **row)
        report.claim(f"engine_us_{n}", row["engine_us"], "<=", limit_us(n))
    busiest = median(rows[max(SEQUENCES)]["with_10000_waiting_us"])
    report.claim("schedule_apply_us_256_10000", busiest, "<=", 400)
    report.details["rounds"] = rows


def main() -> int:
    """Run the script."""
    sys.path.append(str(ROOT))
    from tests.support.tiny import tiny_model

    parser = arguments(__doc__)
    parser.set_defaults(model=str(tiny_model("llama")))
    return run_script("host_time", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
