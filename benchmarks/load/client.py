"""
One client for all systems: it sends calls and writes down when tokens come.

TTFT is the first streamed token minus the moment the call was sent, queueing included.
ITL is every gap between streamed tokens, pooled over calls. Output has a fixed length
(greedy, end-of-generation tokens forbidden), so that all systems do the same work.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import anyio
import httpx

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)

from .measure import percentile

TIMEOUT_S = 600.0  # without a byte

OnTokens = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    prompt: str | Sequence[int]
    max_tokens: int


@dataclass(slots=True)
class Trace:
    """When the tokens of one call came, on the client's clock."""

    sent: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    n_cached: int = 0  # prompt tokens that were not computed

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def itl_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def take(self, tokens: Iterable[int], text: str) -> None:
        """Something came in just now."""
        self.times.append(perf_counter())
        self.tokens += tokens
        self.texts.append(text)


@dataclass(frozen=True, slots=True)
class Run:
    """The calls of one workload, from the first send to the last token."""

    traces: list[Trace]
    wall_s: float

    @property
    def n_output(self) -> int:
        return sum(len(trace.tokens) for trace in self.traces)

    @property
    def output_tok_per_s(self) -> float:
        return self.n_output / self.wall_s

    @property
    def n_cached(self) -> int:
        return sum(trace.n_cached for trace in self.traces)

    def ttft_s(self, percent: float) -> float:
        """A percentile over calls."""
        return percentile((trace.ttft_s for trace in self.traces), percent)


class Target(Protocol):
    """Something that generates."""

    async def send(self, call: Call, on_tokens: OnTokens = ...) -> Trace:
        """Make one call; *on_tokens* is called whenever some came."""


class EngineTarget:
    """Ours, in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    async def send(self, call: Call, on_tokens: OnTokens = lambda: None) -> Trace:
        params = fixed_length(call.max_tokens)
        trace = Trace(perf_counter())
        async with self.engine.generate(call.prompt, params) as generation:
            async for delta in generation:
                trace.take(delta.token_ids, delta.text)
                on_tokens()
        trace.n_cached = generation.result.usage.cached_tokens
        _check_length(trace, call)
        return trace


class HttpTarget:
    """A server that speaks llama-server's protocol, over streaming HTTP."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def send(self, call: Call, on_tokens: OnTokens = lambda: None) -> Trace:
        body = {
            "prompt": call.prompt,
            "n_predict": call.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
        }
        trace = Trace(perf_counter())
        async with self._client.stream("POST", "/completion", json=body) as answer:
            answer.raise_for_status()
            async for event in _events(answer):
                if event["tokens"]:
                    trace.take(event["tokens"], event["content"])
                    on_tokens()
                if event["stop"]:
                    trace.n_cached = event["timings"]["cache_n"]
        _check_length(trace, call)
        return trace


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("error:"):
            raise RuntimeError(line)
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _check_length(trace: Trace, call: Call) -> None:
    if len(trace.tokens) != call.max_tokens:
        raise RuntimeError(f"{len(trace.tokens)} tokens came, not {call.max_tokens}")


@asynccontextmanager
async def http_target(url: str) -> AsyncIterator[HttpTarget]:
    """A client of the server at *url*."""
    # The servers drop idle connections, so each call has one of its own.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(TIMEOUT_S)
    async with httpx.AsyncClient(
        base_url=url, timeout=timeout, limits=limits
    ) as client:
        yield HttpTarget(client)


def open_engine(
    options: Namespace,
    *,
    n_slots: int,
    n_ctx: int,
    cache_bytes: int | None = None,
    n_threads: int | None = None,
    **scheduler: Any,
) -> AbstractAsyncContextManager[AsyncEngine]:
    """Our engine as configured by default, but for what is given."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=n_ctx, n_threads=n_threads or options.threads),
        scheduler=SchedulerConfig(n_slots=n_slots, **scheduler),
        cache=CacheConfig()
        if cache_bytes is None
        else CacheConfig(max_bytes=cache_bytes),
    )
    return AsyncEngine.open(options.model, config)


@asynccontextmanager
async def engine_target(options: Namespace, **config: Any) -> AsyncIterator[Target]:
    """Ours, open only while it is measured: idle engines slow the one that works."""
    async with open_engine(options, **config) as engine:
        yield EngineTarget(engine)


def fixed_length(max_tokens: int) -> SamplingParams:
    """Greedy, and exactly so many tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


async def closed_loop(target: Target, calls: Sequence[Call], n_clients: int) -> Run:
    """Send *calls* in order; each of *n_clients* waits for its answer, then goes on."""
    waiting = iter(enumerate(calls))
    traces: dict[int, Trace] = {}

    async def client() -> None:
        for index, call in waiting:
            traces[index] = await target.send(call)

    started = perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(n_clients):
            group.start_soon(client)
    wall_s = perf_counter() - started
    return Run([traces[index] for index in range(len(calls))], wall_s)
