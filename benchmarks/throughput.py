"""
Tokens a second of full slots, against the C++ loop around llama_decode.

32 requests of 128 tokens in and 64 out over 8 slots. Ours is measured as one list of
prompts and as 32 streams, and samples its tokens; llama-batched-bench does not sample.
Every run has prompts of its own, and a run that found its tokens in a cache is an error.
The prefix cache is small, so that it is full and evicts, as in a server that has run for
a while.

Host time is what a step takes beside libllama and the sampler, waiting included. Where all CPUs compute,
Python takes it from them; so it is also measured with one thread fewer.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from statistics import median
from time import perf_counter
from typing import NamedTuple

import anyio
from load.client import Call, EngineTarget, closed_loop, fixed_length, open_engine
from load.measure import Report, arguments, median_ratio, run_script, say
from load.workloads import token_prompts
from peers.batched_bench import batched_bench

from pyllama_raw import AsyncEngine, ContextConfig
from pyllama_raw.api.results import EngineStats

N_PROMPT, N_OUTPUT, N_SLOTS, N_CTX = 128, 64, 8, 4096
N_BATCH = 2048
CACHE_BYTES = 64 * 2**20


Work = Callable[[AsyncEngine, list[list[int]]], Awaitable[None]]


class Speed(NamedTuple):
    """One run of ours."""

    tok_per_s: float  # prompt and output
    host_ms: float  # a step
    sample_ms: float  # a step, all rows


async def as_list(engine: AsyncEngine, prompts: list[list[int]]) -> None:
    """All prompts in one call."""
    await engine.complete_many(prompts, fixed_length(N_OUTPUT))


async def as_streams(engine: AsyncEngine, prompts: list[list[int]]) -> None:
    """A reader for each prompt, woken for every token."""
    calls = [Call(prompt, N_OUTPUT) for prompt in prompts]
    await closed_loop(EngineTarget(engine), calls, len(calls))


WORKS: dict[str, Work] = {"list": as_list, "streams": as_streams}


async def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds: list, streams, C++."""
    speeds: dict[str, list[Speed]] = {name: [] for name in WORKS}
    ceiling: list[float] = []
    async with _open(options, options.threads) as engine:
        await as_list(engine, _prompts(options, -1))
        for index in range(options.rounds):
            say(f"round {index + 1} of {options.rounds}")
            for name, work in WORKS.items():
                prompts = _prompts(options, 2 * index + (name == "streams"))
                speeds[name].append(await _timed(engine, work, prompts))
            if not options.no_peers:
                ceiling.append(await anyio.to_thread.run_sync(_ceiling, options))
    _conclude(report, speeds, ceiling)
    await measure_host(options, report)


async def measure_host(options: Namespace, report: Report) -> None:
    """Host time of a step, with a CPU that does not compute."""
    n_threads = max(min(options.threads, ContextConfig().threads - 1), 1)
    async with _open(options, n_threads) as engine:
        for name, work in WORKS.items():
            await work(engine, _prompts(options, -2)[:N_SLOTS])
            runs = []
            for index in range(options.rounds):
                say(f"host time, {name}, {index + 1} of {options.rounds}")
                prompts = _prompts(options, -3 - 2 * index - (name == "streams"))
                runs.append(await _timed(engine, work, prompts))
            report.details[f"{name}_free_cpu"] = [run._asdict() for run in runs]
            times = _times(runs)
            report.add(system=f"{name}, {n_threads} threads", **times)
            claim_times(report, f"{name}_free_cpu", times)


def claim_times(report: Report, name: str, times: dict[str, float]) -> None:
    """Of Python and the shim, and of both with the sampler."""
    report.claim(f"host_ms_{name}", times["host_ms"], "<=", 0.15)
    report.claim(f"host_and_sample_ms_{name}", sum(times.values()), "<=", 0.15)


def _times(runs: list[Speed]) -> dict[str, float]:
    return {
        "host_ms": median(run.host_ms for run in runs),
        "sample_ms": median(run.sample_ms for run in runs),
    }


def _open(
    options: Namespace, n_threads: int
) -> AbstractAsyncContextManager[AsyncEngine]:
    """With as large steps as the C++ loop has: no stream waits here for a bounded one."""
    return open_engine(
        options,
        n_threads=n_threads,
        n_slots=N_SLOTS,
        n_ctx=N_CTX,
        cache_bytes=CACHE_BYTES,
        token_budget=N_BATCH,
        prefill_quantum=N_BATCH,
    )


async def _timed(engine: AsyncEngine, work: Work, prompts: list[list[int]]) -> Speed:
    before, started = engine.stats(), perf_counter()
    await work(engine, prompts)
    wall_s, after = perf_counter() - started, engine.stats()
    n_tokens = len(prompts) * (N_PROMPT + N_OUTPUT)
    n_computed = after.computed_tokens - before.computed_tokens
    if n_computed < 0.98 * n_tokens:  # the last token of each is never computed
        raise RuntimeError(f"only {n_computed} of {n_tokens} tokens were computed")
    in_c_s = _in_libllama_s(after) - _in_libllama_s(before)
    host_s = (wall_s - in_c_s) / (after.steps - before.steps)
    sample_s = (after.sample_s - before.sample_s) / (after.steps - before.steps)
    return Speed(n_tokens / wall_s, host_s * 1e3, sample_s * 1e3)


def _in_libllama_s(stats: EngineStats) -> float:
    return stats.decode_s + stats.sample_s + stats.capture_s + stats.restore_s


def _prompts(options: Namespace, seed: int) -> list[list[int]]:
    return token_prompts(options.model, seed, [N_PROMPT] * options.requests)


def _ceiling(options: Namespace) -> float:
    return batched_bench(
        options.model,
        n_prompt=N_PROMPT,
        n_output=N_OUTPUT,
        n_slots=N_SLOTS,
        repeats=max(options.requests // N_SLOTS, 1),
        n_ctx=N_CTX,
        threads=options.threads,
    ).tok_per_s


def _conclude(
    report: Report, speeds: dict[str, list[Speed]], ceiling: list[float]
) -> None:
    for name, runs in speeds.items():
        times = _times(runs)
        row = {"tok_per_s": median(run.tok_per_s for run in runs), **times}
        report.details[name] = [run._asdict() for run in runs]
        if ceiling:
            ratio = median_ratio([run.tok_per_s for run in runs], ceiling)
            row["ratio"] = ratio
            report.claim(f"ratio_{name}", ratio, ">=", 0.98)
        claim_times(report, name, times)
        report.add(system=f"ours, {name}", **row)
    if ceiling:
        report.add(system="llama-batched-bench", tok_per_s=median(ceiling))
        report.details["llama-batched-bench"] = ceiling


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=32)
    return run_script("throughput", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
