"""
Send the calls of a workload: closed loop by so many clients, open loop by the clock.

A call that follows an earlier turn waits for it in both. In a closed loop a slow target
is asked less often; in an open loop calls come when they come, and queues grow.

Gaps of an open loop are gamma distributed: burstiness 1 is a Poisson process, below 1 calls
come in bursts, above 1 more evenly. The last of n calls comes at n / rate for every seed, so
that runs with the same rate last equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from time import perf_counter
from typing import Self

import anyio

from pyllama_raw.api.results import percentile
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.bench.call import Call, CallFailed, Prompt, Record, Target, attempt


@dataclass(frozen=True, slots=True)
class Run:
    """The calls of one workload, from the first send to the last token."""

    records: list[Record]  # in the order of the calls
    wall_s: float
    started: float = 0.0  # on the clock of the records
    lag_s: float = 0.0  # open loop: the latest send after its time

    @property
    def n_output(self) -> int:
        return sum(record.n_output for record in self.records)

    @property
    def output_tok_per_s(self) -> float:
        return self.n_output / self.wall_s

    @property
    def n_cached(self) -> int:
        return sum(record.n_cached or 0 for record in self.records)

    def ttft_s(self, percent: float) -> float:
        """A percentile over calls."""
        return percentile((record.ttft_s for record in self.records), percent)

    def checked(self) -> Self:
        """
        Returns:
            This run, for use where every call has to succeed.

        Raises:
            CallFailed: of the first that did not.
        """
        for record in self.records:
            if record.error is not None:
                raise CallFailed(record.error)
        return self


class _Turns:
    """Makes calls, each after the turn it follows."""

    def __init__(self, target: Target, calls: Sequence[Call]) -> None:
        self._target, self._calls = target, calls
        self._done = [anyio.Event() for _ in calls]
        self.records: dict[int, Record] = {}

    async def make(self, index: int) -> None:
        call = self._calls[index]
        before: Prompt | None = None
        if call.after is not None:
            await self._done[call.after].wait()
            before = _said(self.records[call.after])
        self.records[index] = await attempt(self._target, call, before)
        self._done[index].set()

    def run(self, started: float, lag_s: float = 0.0) -> Run:
        wall_s = perf_counter() - started
        records = [self.records[index] for index in range(len(self._calls))]
        return Run(records, wall_s, started, lag_s)


def _said(record: Record) -> Prompt:
    if isinstance(record.prompt, str):
        return record.prompt + record.text
    if len(record.tokens) != record.n_output:
        raise ConfigError("a target that does not name its tokens needs turns as text")
    return [*record.prompt, *record.tokens]


async def closed_loop(target: Target, calls: Sequence[Call], n_clients: int) -> Run:
    """Send *calls* in order; each of *n_clients* waits for its answer, then goes on."""
    turns = _Turns(target, calls)
    waiting = iter(range(len(calls)))

    async def client() -> None:
        for index in waiting:
            await turns.make(index)

    started = perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(n_clients):
            group.start_soon(client)
    return turns.run(started)


def arrivals(rng: Random, n: int, rate: float, burstiness: float = 1.0) -> list[float]:
    """
    Args:
        rate: calls a second, above 0.
        burstiness: the shape of the gamma distribution of gaps, above 0.

    Returns:
        Seconds after the start, in order.
    """
    times = list(accumulate(rng.gammavariate(burstiness, 1.0) for _ in range(n)))
    last = times[-1]
    return [time * (n / rate) / last for time in times] if last > 0 else [0.0] * n


async def open_loop(target: Target, calls: Sequence[Call]) -> Run:
    """Send each of *calls* at its time, whatever has become of those before."""
    turns = _Turns(target, calls)
    lag_s = 0.0
    started = perf_counter()
    async with anyio.create_task_group() as group:
        for index in sorted(range(len(calls)), key=lambda i: calls[i].at_s):
            await anyio.sleep(max(started + calls[index].at_s - perf_counter(), 0))
            lag_s = max(lag_s, perf_counter() - started - calls[index].at_s)
            group.start_soon(turns.make, index)
    return turns.run(started, lag_s)
