"""
What it costs to be observed: logs of steps and requests, metrics, and the hooks of a policy.

`fake` is 64 slots on the fake executor and twice as many requests, and a task that reads each, all
in one thread. A driver that is observed and a plain one do equal steps in turn, several times
over. Of each step, until its tokens are read, the least CPU time counts, because others can only
slow it; that of the thread that writes files is added. `model` is 8 streams of a real model on an
engine of each kind: output tokens a second, the best of several times. `files` are logs in files;
`all` has logs in memory. Figures are ratios to what is plain, the medians of the rounds. `again`
is plain itself: what is no nearer to one than its ratios cannot be told from noise.
"""

# ruff: noqa: ARG002 - a hook takes what all policies are given

from __future__ import annotations

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import cast

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from fakes import limits, request
from load.measure import NO_DRAFTS, Report, arguments, run_script, say

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    LogConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.api.facts import Facts
from pyllama_raw.api.metrics import EngineMetrics
from pyllama_raw.core.request import Event, Finished
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.logs import NO_LOGS, Logs, open_logs
from pyllama_raw.engine.mailbox import Stream, wake
from pyllama_raw.engine.requests import OpenRequest
from pyllama_raw.policy import Key, RequestView, SchedulerView, SchedulingPolicy
from pyllama_raw.testing import FakeExecutor, FakeVocab

N_SLOTS = 64
N_TOKENS = 100  # of each request on the fake executor
N_STREAMS = 8
STREAM_TOKENS = 48
N_REPEATS = 4  # of each in a round
KINDS = ("again", "logs", "files", "metrics", "hooks", "all")
OF_MODEL = ("plain", "again", "all")


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

    def on_scheduled(self, done: Sequence[object], now: float) -> None:
        for _ in done:
            pass

    def on_preempted(self, request: RequestView, now: float) -> None: ...

    def on_finished(self, request: RequestView, now: float) -> None: ...


def log_config(kind: str, folder: Path) -> LogConfig:
    """Logs in memory or in files, or none."""
    if kind == "files":
        return LogConfig(step_log=folder / "steps", request_log=folder / "requests")
    n_records = 4096 if kind in ("logs", "all") else 0
    return LogConfig(max_steps=n_records, max_requests=n_records)


class Fake:
    """A driver with all requests, and their readers."""

    def __init__(self, kind: str, logs: Logs, readers: TaskGroup) -> None:
        policy = Listening() if kind in ("hooks", "all") else None
        scheduler = Scheduler(
            limits(N_SLOTS),
            FakeVocab().pieces,
            token_budget=N_SLOTS * 16,
            policy=policy,
        )
        self.driver = Driver(
            scheduler,
            FakeExecutor(limits(N_SLOTS)),
            time.monotonic,
            self._deliver,
            watchers=logs.watchers,
        )
        if kind in ("metrics", "all"):
            EngineMetrics(
                cast("Facts", SimpleNamespace(watch=self.driver.watchers.add))
            )
        for number in range(2 * N_SLOTS):
            stream = Stream()
            record = OpenRequest(request(number, N_TOKENS), time.monotonic(), stream)
            readers.start_soon(self._read, stream)
            self.driver.records[number] = record
            self.driver.take_on([record])

    def _deliver(self, events: list[Event]) -> None:
        """As the engine thread does: one wake-up for all streams."""
        streams = []
        for event in events:
            stream = self.driver.records[event.request_id].stream
            stream.events.append(event)
            streams.append(stream)
        if streams:
            wake(streams[0].loop, streams)

    async def _read(self, stream: Stream) -> None:
        event: object = None
        while type(event) is not Finished:
            await stream.wait()
            while stream.events:
                event = stream.events.popleft()

    async def step(self) -> float:
        """CPU seconds until the tokens are read."""
        started = time.thread_time()
        self.driver.step()
        for _ in range(3):  # the loop is woken, then the readers, then they read
            await checkpoint()
        return time.thread_time() - started


async def fake_ratio(kind: str, folder: Path) -> float:
    """CPU seconds of what is plain by those of what is observed."""
    runs = [await fake_run(kind, folder, index % 2) for index in range(N_REPEATS)]
    plain, observed, other_s = zip(*runs, strict=True)
    seconds = [sum(map(min, *steps)) for steps in (plain, observed)]
    return seconds[0] / (seconds[1] + min(other_s))


async def fake_run(
    kind: str, folder: Path, first: int
) -> tuple[list[float], list[float], float]:
    """
    CPU seconds of each step of what is plain and of what is observed, and of files.

    Args:
        first: which of the two is made and does a step first; each is in half of the runs.
    """
    logs = open_logs(log_config(kind, folder))
    kinds = [("plain", NO_LOGS), (kind, logs)]
    seconds: tuple[list[float], list[float]] = [], []
    gc.collect()
    gc.disable()  # it would take the time of one for what both have left
    other_s = time.process_time() - time.thread_time()
    async with anyio.create_task_group() as readers:
        fakes = {index: Fake(*kinds[index], readers) for index in (first, 1 - first)}
        await checkpoint()
        while fakes[0].driver.scheduler.alive:
            for index in (first, 1 - first):
                seconds[index].append(await fakes[index].step())
            first = 1 - first
    gc.enable()
    logs.close()
    return *seconds, time.process_time() - time.thread_time() - other_s


def opened(options: Namespace, kind: str) -> AsyncEngine:
    """An engine of the model, to be entered."""
    policy = f"{Listening.__module__}:Listening" if kind == "all" else "fcfs"
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=N_STREAMS * 256, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_STREAMS, policy=policy),
        log=log_config(kind, Path()),
    )
    return AsyncEngine.open(options.model, config)


async def model_rate(engine: AsyncEngine) -> float:
    """Output tokens a second."""
    params = SamplingParams(max_tokens=STREAM_TOKENS, temperature=0, ignore_eos=True)
    prompts = [f"{number} is a number. The next one" for number in range(N_STREAMS)]
    started = time.monotonic()
    await engine.complete_many(prompts, params)
    return N_STREAMS * STREAM_TOKENS / (time.monotonic() - started)


async def model_ratios(engines: dict[str, AsyncEngine]) -> dict[str, float]:
    """Each kind's best rate by that of the plain engine."""
    rates: dict[str, list[float]] = {kind: [] for kind in engines}
    for repeat in range(N_REPEATS):
        for kind in engines if repeat % 2 else reversed(engines):
            rates[kind].append(await model_rate(engines[kind]))
    best = {kind: max(values) for kind, values in rates.items()}
    return {kind: rate / best["plain"] for kind, rate in best.items()}


async def measure(options: Namespace, report: Report) -> None:
    """Each part, and what it claims."""
    if options.part != "model":
        ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with TemporaryDirectory() as name:
            for index in range(options.rounds):
                say(f"round {index + 1} of {options.rounds}")
                for kind, values in ratios.items():
                    values.append(await fake_ratio(kind, Path(name)))
        judge(report, "fake", ratios)
    if options.part != "fake":
        ratios = {kind: [] for kind in OF_MODEL}
        async with AsyncExitStack() as stack:
            engines = {}
            for kind in OF_MODEL:
                engine = await stack.enter_async_context(opened(options, kind))
                engines[kind] = engine
            EngineMetrics(engines["all"])
            for index in range(options.rounds):
                say(f"round {index + 1} of {options.rounds}")
                for kind, ratio in (await model_ratios(engines)).items():
                    ratios[kind].append(ratio)
        judge(report, "model", ratios)


def judge(report: Report, where: str, ratios: dict[str, list[float]]) -> None:
    """The medians of the rounds."""
    for kind, values in ratios.items():
        figures = {"ratio": median(values), "least": min(values), "most": max(values)}
        report.add(where=where, kind=kind, **figures)
    report.claim(f"{where}_ratio", median(ratios["all"]), ">=", 0.98)
    report.details[where] = ratios


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--part", choices=("fake", "model"), help="only that one")
    parser.set_defaults(rounds=10)
    return run_script("observing", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
