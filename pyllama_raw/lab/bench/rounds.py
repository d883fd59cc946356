"""
Several targets, interleaved round by round.

Rules:
1. In each round all targets do the same work, one after the other; the first one rotates.
2. The text of each round and point is new; only what a workload repeats can be cached.
3. A target is open only while it is measured: what idles beside it slows it. Each opening
   begins with calls that do not count, and that logs of the engine mark.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from pyllama_raw.engine.logs import WARM_UP
from pyllama_raw.lab.bench.call import Call, Target
from pyllama_raw.lab.bench.drive import Run, arrivals, closed_loop, open_loop
from pyllama_raw.lab.bench.engine_target import EngineTarget
from pyllama_raw.lab.bench.machine import watching
from pyllama_raw.lab.bench.result import Limits, Result, result_of
from pyllama_raw.lab.bench.writer import generator
from pyllama_raw.lab.checked import Checked, Count, Positive

WARM_UP_CLIENTS = 8


@dataclass(frozen=True, slots=True)
class ReadyTarget:
    """A target that is ready, and the process it runs in, if that is known."""

    target: Target
    pid: int | None = None


Opener = Callable[[], AbstractAsyncContextManager[ReadyTarget]]
MakeCalls = Callable[..., list[Call]]  # of a seed, and of a length of prompts


@dataclass(frozen=True, slots=True)
class Point(Checked):
    """One way to send the calls: by clients, at a rate, or at the calls' own times."""

    clients: Count | None = None
    rate: Positive | None = None  # calls a second
    burstiness: Positive = 1.0
    prompt_tokens: Count | None = None  # of each call; None: as the workload has it

    async def run(self, target: Target, calls: list[Call], seed: object) -> Run:
        if self.clients is not None:
            return await closed_loop(target, calls, self.clients)
        if self.rate is not None:
            rng = generator(seed, "arrivals")
            times = arrivals(rng, len(calls), self.rate, self.burstiness)
            calls = [
                replace(call, at_s=at_s)
                for call, at_s in zip(calls, times, strict=True)
            ]
        return await open_loop(target, calls)

    def keys(self) -> Result:
        """As vLLM names them."""
        return {
            "max_concurrency": self.clients,
            "request_rate": "inf" if self.clients else self.rate,
            "burstiness": self.burstiness,
            "prompt_tokens": self.prompt_tokens,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a measurement."""

    openers: Mapping[str, Opener]  # by the name of the target
    points: Sequence[Point]
    make_calls: MakeCalls
    rounds: int = 5
    warm_up: int = 8  # calls after each opening
    seed: int = 0
    limits: Limits = field(default_factory=dict)

    async def results(self) -> AsyncIterator[Result]:
        """One for each round, target and point, as soon as it is there."""
        names = list(self.openers)
        for index in range(self.rounds):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                async with self.openers[name]() as ready:
                    await self._warm_up(ready.target, index)
                    for point in self.points:
                        result = await self._measure(ready, point, index)
                        yield {"target": name, "round": index} | result

    async def _warm_up(self, target: Target, index: int) -> None:
        if self.warm_up:
            calls = self.make_calls((self.seed, "warm up", index))[: self.warm_up]
            await closed_loop(target, list(map(_warming, calls)), WARM_UP_CLIENTS)

    async def _measure(self, ready: ReadyTarget, point: Point, index: int) -> Result:
        seed = (self.seed, index, point)
        sizes = () if point.prompt_tokens is None else (point.prompt_tokens,)
        calls = self.make_calls(seed, *sizes)
        before = _counters(ready.target)
        with watching(ready.pid) as use:
            run = await point.run(ready.target, calls, seed)
        after = _counters(ready.target)
        has_process = ready.pid is not None
        return {
            **point.keys(),
            "num_prompts": len(calls),
            **result_of(run, self.limits),
            "peak_rss_bytes": use.peak_rss_bytes if has_process else None,
            "cpu_s": use.cpu_s if has_process else None,
            "cpu_includes_client": ready.pid == os.getpid(),
            "others_cpus": use.others_cpus if has_process else None,
            "engine": {name: after[name] - before[name] for name in after},
        }


def _warming(call: Call) -> Call:
    """*call* of nobody and as soon as possible."""
    return replace(call, priority=0, deadline_s=None, client=None, policy_data=WARM_UP)


def _counters(target: Target) -> dict[str, float]:
    return target.counters() if isinstance(target, EngineTarget) else {}
