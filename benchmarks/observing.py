"""
What it costs to be observed: logs of steps and requests, metrics, and the hooks of a policy.

`fake` is 64 slots on the fake executor, twice as many requests: output tokens by the CPU seconds
of the process. `model` is 8 streams of a real model: output tokens a second. `files` are logs in
files, which a thread writes; `all` has logs in memory. In each round every kind does the same
work; figures are ratios to `plain`, the medians of the rounds.
"""

# ruff: noqa: ARG002 - a hook takes what all policies are given

from __future__ import annotations

import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import anyio
from fakes import ReadingLoop, limits, request
from load.measure import Report, arguments, median_ratio, parse, say

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    LogConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.engine.logs import open_logs
from pyllama_raw.engine.stream import Stream
from pyllama_raw.metrics import EngineMetrics
from pyllama_raw.policy import Key, RequestView, SchedulerView, SchedulingPolicy
from pyllama_raw.testing import FakeExecutor, fake_parts

N_SLOTS = 64
N_TOKENS = 100  # of each request on the fake executor
N_STREAMS = 8
STREAM_TOKENS = 96
KINDS = ("plain", "logs", "files", "metrics", "hooks", "all")
OF_MODEL = ("plain", "all")


class Listening(SchedulingPolicy):
    """Has every hook and does nothing."""

    name = "listening"
    keys = "changing"

    def order_key(self, request: RequestView, view: SchedulerView) -> Key:
        return request.priority

    def prefill_quota(self, prompts: object, view: SchedulerView) -> dict[int, int]:
        return {}

    def victim_key(self, request: RequestView, view: SchedulerView) -> Key | None:
        return request.priority

    def on_arrival(self, request: RequestView, now: float) -> None: ...

    def on_admitted(self, request: RequestView, now: float) -> None: ...

    def on_scheduled(self, request: RequestView, n_tokens: int, now: float) -> None: ...

    def on_preempted(self, request: RequestView, now: float) -> None: ...

    def on_finished(self, request: RequestView, now: float) -> None: ...


def log_config(kind: str, folder: Path) -> LogConfig:
    """Logs in memory or in files, or none."""
    if kind == "files":
        return LogConfig(step_log=folder / "steps", request_log=folder / "requests")
    kept = 4096 if kind in ("logs", "all") else 0
    return LogConfig(max_steps=kept, max_requests=kept)


def fake_rate(kind: str, folder: Path) -> float:
    """Output tokens by CPU seconds."""
    parts = fake_parts(
        FakeExecutor(limits(N_SLOTS)),
        logs=open_logs(log_config(kind, folder)),
        policy=Listening() if kind in ("hooks", "all") else None,
        token_budget=N_SLOTS * 16,
    )
    engine, loop = AsyncEngine(parts), ReadingLoop()
    if kind in ("metrics", "all"):
        EngineMetrics(engine)
    started = time.process_time()
    for number in range(2 * N_SLOTS):
        wanted = (request(number, N_TOKENS),)
        engine._thread.submit_all(wanted, Stream(loop))
    engine._thread.close(drains=True)
    engine._thread.join()
    return 2 * N_SLOTS * N_TOKENS / (time.process_time() - started)


async def model_rate(model: Path, threads: int, kind: str, folder: Path) -> float:
    """Output tokens a second, once all streams have begun to run."""
    policy = f"{Listening.__module__}:Listening" if kind in ("hooks", "all") else "fcfs"
    config = EngineConfig(
        context=ContextConfig(n_ctx=N_STREAMS * 256, n_threads=threads),
        scheduler=SchedulerConfig(n_slots=N_STREAMS, policy=policy),
        log=log_config(kind, folder),
    )
    params = SamplingParams(max_tokens=STREAM_TOKENS, temperature=0, ignore_eos=True)
    prompts = [f"{number} is a number. The next one" for number in range(N_STREAMS)]
    async with AsyncEngine.open(model, config) as engine:
        if kind in ("metrics", "all"):
            EngineMetrics(engine)
        await engine.complete_many(prompts, SamplingParams(max_tokens=2))
        started = time.monotonic()
        await engine.complete_many(prompts, params)
        return N_STREAMS * STREAM_TOKENS / (time.monotonic() - started)


def measure(options: Namespace, report: Report) -> None:
    """Each kind once a round; less than the spread of `plain` cannot be seen."""
    rates: dict[str, dict[str, list[float]]] = {"fake": {}, "model": {}}
    with TemporaryDirectory() as name:
        folder = Path(name)
        for index in range(options.rounds):
            say(f"round {index + 1} of {options.rounds}")
            for kind in KINDS if options.part != "model" else ():
                rates["fake"].setdefault(kind, []).append(fake_rate(kind, folder))
            for kind in OF_MODEL if options.part != "fake" else ():
                run = partial(model_rate, options.model, options.threads, kind, folder)
                rates["model"].setdefault(kind, []).append(anyio.run(run))
    for where, found in rates.items():
        for kind, values in found.items():
            ratio = median_ratio(values, found["plain"])
            spread = (max(values) - min(values)) / median(values)
            figures = {"tok_per_s": median(values), "spread": spread, "ratio": ratio}
            report.add(where=where, kind=kind, **figures)
            if kind == "all":
                report.claim(f"{where}_ratio", ratio, ">=", 0.98)
    report.details["rates"] = rates


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--part", choices=("fake", "model"), help="only that one")
    parser.set_defaults(rounds=10)
    options = parse(parser)
    report = Report("observing", options)
    measure(options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
