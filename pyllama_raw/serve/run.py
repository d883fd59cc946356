"""
Open the engines, answer until a signal comes, let what runs end.

The server is uvicorn, whose own handling of signals closes connections; so it is told to end
only when the engines are done.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from socket import socket
from typing import Any

import anyio
import uvicorn
from anyio.abc import TaskStatus
from fastapi import FastAPI

from pyllama_raw import AsyncEngine
from pyllama_raw.serve.app import make_app
from pyllama_raw.serve.config import ListenConfig
from pyllama_raw.serve.deployment import Deployment
from pyllama_raw.serve.service import Service

Loading = Callable[[str, float], None]
Say = Callable[[str], None]

OPTIONS: dict[str, Any] = {
    "log_level": "warning",
    "lifespan": "off",
    "ws": "none",
    "access_log": False,  # the gate has one
    "server_header": False,
    "timeout_keep_alive": 75,  # longer than balancers keep connections that are idle
    "timeout_graceful_shutdown": 1,  # for slow readers, once the engines have ended
}


class _Server(uvicorn.Server):
    """Says where it listens, and leaves signals to serve()."""

    def __init__(self, config: uvicorn.Config, say: Say) -> None:
        super().__init__(config)
        self._say = say

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
        await serve(make_app(engines, deployment.service), deployment, say)


async def serve(app: FastAPI, listen: ListenConfig, say: Say) -> None:
    """Answer until a signal comes and the engines are done, or drain_s are over."""
    host, port, uds = listen.host, listen.port, listen.uds
    options = uvicorn.Config(app, host=host, port=port, uds=uds, **OPTIONS)
    server = _Server(options, say)
    async with anyio.create_task_group() as group:
        await group.start(_end_at_signal, app.state.service, server)
        await server.serve()
        group.cancel_scope.cancel()


async def _end_at_signal(
    service: Service, server: uvicorn.Server, task_status: TaskStatus[None]
) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        await anext(signals)
        service.drains = True
        async with anyio.create_task_group() as group:
            group.start_soon(_drain, service, group.cancel_scope)
            async for _ in signals:
                group.cancel_scope.cancel()
    server.should_exit = True


async def _drain(service: Service, scope: anyio.CancelScope) -> None:
    async with anyio.create_task_group() as group:
        for engine in service.engines.values():
            group.start_soon(engine.aclose, service.config.drain_s)
    scope.cancel()
