"""
How soon the slots of clients that left are free, behind the service.

    python scripts/service_load.py [--model FILE] [--trio] [--leaves 20]

First sixty clients of eight kinds at once (scripts/service_clients.py), which are counted.
Then, one after the other, clients that leave in the prefill or midway: from closing the
connection until the engine runs nothing. Service and clients share a process.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from statistics import median

import anyio
from fastapi import FastAPI
from hypercorn import asyncio, trio
from hypercorn.config import Config

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from pyllama_raw import AsyncEngine, EngineConfig, SchedulerConfig  # noqa: E402
from pyllama_raw.serve import make_app  # noqa: E402
from scripts.service_clients import LONG_PROMPT, Clients, chat  # noqa: E402

CONFIG = EngineConfig(scheduler=SchedulerConfig(n_slots=4, max_waiting=8))


async def leave_prefill(engine: AsyncEngine, clients: Clients, number: int) -> float:
    """The moment of leaving, while the prompt, unlike all others, is computed."""
    n_before = engine.stats().submitted
    async with clients.exchange() as exchange:
        await exchange.send(chat(text=f"{number} {LONG_PROMPT}", max_tokens=512))
        while engine.stats().submitted == n_before:  # noqa: ASYNC110 - it measures
            await anyio.sleep(0.001)
    return time.monotonic()


async def leave_midway(_: AsyncEngine, clients: Clients, number: int) -> float:
    """The moment of leaving, after the first token."""
    async with clients.exchange() as exchange:
        await exchange.send(chat(text=f"Count from {number}.", max_tokens=512))
        await exchange.read_head()
        async with aclosing(exchange.events()) as events:
            await anext(events)
    return time.monotonic()


async def free_s(engine: AsyncEngine, leave: Callable[[], Awaitable[float]]) -> float:
    """Seconds from leaving until nothing runs."""
    n_ended = sum(engine.stats().finished.values())
    left = await leave()
    while sum(engine.stats().finished.values()) == n_ended:  # noqa: ASYNC110 - it measures
        await anyio.sleep(0.001)
    return time.monotonic() - left


async def measure(options: Namespace) -> None:
    ended = anyio.Event()
    async with AsyncEngine.open(options.model, CONFIG) as engine:
        clients = Clients(options.port)
        async with anyio.create_task_group() as group:
            group.start_soon(run, make_app(engine), options, ended)
            await clients.wait_until_up()
            await crowd(engine, clients)
            await leaves(engine, clients, options.leaves)
            ended.set()


async def run(app: FastAPI, options: Namespace, ended: anyio.Event) -> None:
    """Hypercorn, which knows both loops."""
    settings = Config()
    settings.bind = [f"127.0.0.1:{options.port}"]
    serve = trio.serve if options.trio else asyncio.serve
    await serve(app, settings, shutdown_trigger=ended.wait, mode="asgi")


async def crowd(engine: AsyncEngine, clients: Clients) -> None:
    began = time.monotonic()
    await clients.run()
    left = time.monotonic()
    while engine.stats().running or engine.stats().waiting:  # noqa: ASYNC110 - it measures
        await anyio.sleep(0.001)
    free = time.monotonic() - left
    for (kind, status), n in Counter(
        (o.kind, o.status) for o in clients.outcomes
    ).items():
        print(f"{n:3} {kind}: {status}")
    print(f"refused with 503: {sum(o.n_refused for o in clients.outcomes)}")
    print(f"promises not kept: {[w for o in clients.outcomes for w in o.wrong]}")
    stats = engine.stats()
    print(f"{stats.submitted} submitted, ended {stats.finished}, {stats.failed} failed")
    print(
        f"{left - began:.2f} s; all slots free {free * 1e3:.1f} ms after the last left"
    )


async def leaves(engine: AsyncEngine, clients: Clients, n: int) -> None:
    before = engine.stats()
    for name, leave in (("in prefill", leave_prefill), ("midway", leave_midway)):
        values = [
            await free_s(engine, partial(leave, engine, clients, i)) for i in range(n)
        ]
        print(
            f"left {name}: free after {median(values) * 1e3:.1f} ms, worst {max(values) * 1e3:.1f} ms"
        )
    after = engine.stats()
    n_steps = after.steps - before.steps
    print(
        f"a step: {(after.decode_s - before.decode_s) / max(n_steps, 1) * 1e3:.1f} ms"
    )


def main() -> None:
    """Run the script."""
    parser = ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--model", help="a GGUF file; default: the default model")
    parser.add_argument("--port", type=int, default=8377)
    parser.add_argument("--leaves", type=int, default=20)
    parser.add_argument("--trio", action="store_true")
    options = parser.parse_args()
    anyio.run(measure, options, backend="trio" if options.trio else "asyncio")


if __name__ == "__main__":
    main()
