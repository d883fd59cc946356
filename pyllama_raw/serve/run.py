"""
Open the engines, answer until a signal comes, let what runs end.

The server is uvicorn, whose own handling of signals closes connections; so it is told to end
only when the engines are done.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any, cast

import anyio
import uvicorn
from fastapi import FastAPI

from pyllama_raw import AsyncEngine
from pyllama_raw.serve.app import make_app
from pyllama_raw.serve.config import ListenConfig
from pyllama_raw.serve.connections import (
    Connection,
    Connections,
    backlog_of,
    usable,
)
from pyllama_raw.serve.deployment import Deployment
from pyllama_raw.serve.service import Service

Loading = Callable[[str, float], None]
Say = Callable[[str], None]

TICK_S = 0.05
TICKS = 10  # of uvicorn, in a second
DESCRIPTORS = 2**16  # that a process asks for, if it has fewer

OPTIONS: dict[str, Any] = {
    "log_level": "warning",
    "lifespan": "off",
    "ws": "none",
    "access_log": False,  # the gate has one
    "server_header": False,
    "timeout_graceful_shutdown": 1,  # for slow readers, once the engines have ended
}


class _Server(uvicorn.Server):
    """A server that says where it listens, and leaves signals to serve()."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, say: Say
    ) -> None:
        super().__init__(config)
        self._connections, self._say = connections, say

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        if self.started:
            address = self.config.uds
            if address is None:
                port = self.servers[0].sockets[0].getsockname()[1]
                address = f"http://{self.config.host}:{port}"
            self._say(f"serving at {address}")

    async def on_tick(self, counter: int) -> bool:
        """Look for connections that are over their time, every second."""
        if counter % TICKS == 0:
            self._connections.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)


class _Signals:
    """SIGINT and SIGTERM while a server runs. Thread: the main one."""

    def __init__(self) -> None:
        self._n = 0
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def counted(self, *, are_last: bool) -> Iterator[None]:
        """
        Count signals within the block.

        Args:
            are_last: signals after the block are ignored, because the process is at its end.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._count)
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_IGN if are_last else handler)

    def _count(self, *_: object) -> None:
        self._n += 1

    async def arrival(self, n: int) -> None:
        """Return when *n* have come."""
        while self._n < n:  # noqa: ASYNC110 - a handler may set no event
            await anyio.sleep(TICK_S)


async def deploy(deployment: Deployment, loading: Loading, say: Say) -> None:
    """
    Serve *deployment* until SIGTERM or SIGINT; a second signal ends what runs.

    Args:
        loading: called in a worker thread with a model and the fraction that is loaded.
        say: called with the address once requests are taken.
    """
    async with AsyncExitStack() as stack:
        engines = {}
        for name, path in deployment.models.items():
            config = deployment.configs.get(name)
            progress = partial(loading, name)
            opening = AsyncEngine.open(path, config, progress=progress)
            engines[name] = await stack.enter_async_context(opening)
        app = make_app(engines, deployment.service)
        await serve(app, deployment, say, is_last=True)


async def serve(
    app: FastAPI, listen: ListenConfig, say: Say, *, is_last: bool = False
) -> None:
    """
    Answer until a signal comes and the engines are done, or drain_s are over.

    Args:
        is_last: the process ends with the server, so further signals mean nothing.
    """
    service: Service = app.state.service
    descriptors = _descriptors()
    limit = listen.max_connections or usable(descriptors, _n_used())
    connections = Connections(listen.head_s, service.config.send_s, limit)
    options = uvicorn.Config(
        app,
        host=listen.host,
        port=listen.port,
        uds=listen.uds,
        http=Connection.of(connections),
        backlog=backlog_of(descriptors, limit),
        timeout_keep_alive=cast("int", listen.keep_alive_s),  # or a fraction
        **OPTIONS,
    )
    server = _Server(options, connections, say)
    signals = _Signals()
    with signals.counted(are_last=is_last):
        async with anyio.create_task_group() as group:
            group.start_soon(_end_at_signal, signals, service, server)
            await server.serve()
            group.cancel_scope.cancel()


async def _end_at_signal(signals: _Signals, service: Service, server: _Server) -> None:
    await signals.arrival(1)
    service.drain()
    async with anyio.create_task_group() as group:
        group.start_soon(_drain, service, group.cancel_scope)
        await signals.arrival(2)
        group.cancel_scope.cancel()
    server.should_exit = True


async def _drain(service: Service, scope: anyio.CancelScope) -> None:
    async with anyio.create_task_group() as group:
        for engine in service.engines.values():
            group.start_soon(engine.aclose, service.config.drain_s)
    scope.cancel()


def _descriptors() -> int:
    """The descriptors that the process may have, as many as it can be allowed."""
    if sys.platform == "win32":
        return 2**13  # of the C library
    import resource

    allowed, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if allowed != resource.RLIM_INFINITY and allowed < limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if allowed == resource.RLIM_INFINITY else min(allowed, DESCRIPTORS)


def _n_used() -> int:
    """The descriptors that are in use."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            return len([*Path(folder).iterdir()])
    return 64
