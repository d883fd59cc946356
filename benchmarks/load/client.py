"""
What the scripts take from pyllama_raw.lab, with engines opened as their options say.

Here nothing may go wrong: a call that fails ends the script.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import perf_counter
from typing import Any

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SchedulerConfig,
)
from pyllama_raw.lab.calls import Call, OnTokens, Record, Run, Target
from pyllama_raw.lab.targets import EngineTarget, fixed_length

from .measure import NO_DRAFTS

__all__ = [
    "Call",
    "EngineTarget",
    "Record",
    "Run",
    "Target",
    "ask",
    "closed_loop",
    "engine_target",
    "fixed_length",
    "open_engine",
]


def open_engine(
    options: Namespace,
    *,
    n_slots: int,
    n_ctx: int,
    cache_bytes: int | None = None,
    n_threads: int | None = None,
    **scheduler: Any,
) -> AbstractAsyncContextManager[AsyncEngine]:
    """Our engine as configured by default, without drafts, but for what is given."""
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=n_ctx, n_threads=n_threads or options.threads),
        scheduler=SchedulerConfig(n_slots=n_slots, **scheduler),
        cache=CacheConfig()
        if cache_bytes is None
        else CacheConfig(max_bytes=cache_bytes),
    )
    return AsyncEngine.open(options.model, config)


@asynccontextmanager
async def engine_target(options: Namespace, **config: Any) -> AsyncIterator[Target]:
    """Ours, open only while it is measured, like its peers."""
    async with open_engine(options, **config) as engine:
        yield EngineTarget(engine)


async def ask(target: Target, call: Call, on_tokens: OnTokens | None = None) -> Record:
    """Make *call*."""
    record = Record(call, call.prompt, perf_counter(), on_tokens=on_tokens)
    await target.send(record)
    return record


async def closed_loop(target: Target, calls: Sequence[Call], n_clients: int) -> Run:
    """Send *calls* in order; each of *n_clients* waits for its answer, then goes on."""
    return (await calls.closed_loop(target, calls, n_clients)).checked()
