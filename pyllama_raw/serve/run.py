"""
Open the engines, answer until a signal comes, let what runs end.

The server is uvicorn, whose own handling of signals closes connections; so it is told to end
only when the engines are done.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import anyio
import uvicorn
from anyio.abc import TaskStatus
from fastapi import FastAPI

from pyllama_raw import AsyncEngine, EngineConfig
from pyllama_raw.serve.app import make_app
from pyllama_raw.serve.config import ServeConfig

OPTIONS: dict[str, Any] = {
    "log_level": "warning",
    "lifespan": "off",
    "ws": "none",
    "access_log": False,  # the gate has one
    "server_header": False,
    "timeout_keep_alive": 75,  # longer than balancers keep connections that are idle
    "timeout_graceful_shutdown": 1,  # for clients that read slowly, once the engines have ended
}


class _Server(uvicorn.Server):
    """Leaves signals to serve()."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def serve(
    models: Mapping[str, str | None],
    engine_config: EngineConfig | None = None,
    config: ServeConfig | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
) -> None:
    """
    Answer at *host*:*port* until SIGTERM or SIGINT; a second signal ends what runs.

    Args:
        models: files by the names that clients use; None: the default model.
    """
    config = config or ServeConfig()
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(AsyncEngine.open(path, engine_config))
            for name, path in models.items()
        }
        app = make_app(engines, config)
        server = _Server(uvicorn.Config(app, host=host, port=port, **OPTIONS))
        async with anyio.create_task_group() as group:
            await group.start(_end_at_signal, app, server, config.drain_s)
            await server.serve()
            group.cancel_scope.cancel()


async def _end_at_signal(
    app: FastAPI,
    server: uvicorn.Server,
    drain_s: float,
    task_status: TaskStatus[None],
) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            break
        service = app.state.service
        service.drains = True
        async with anyio.create_task_group() as group:
            group.start_soon(_drain, service.engines, drain_s, group.cancel_scope)
            async for _ in signals:
                group.cancel_scope.cancel()
    server.should_exit = True


async def _drain(
    engines: Mapping[str, AsyncEngine], drain_s: float, scope: anyio.CancelScope
) -> None:
    async with anyio.create_task_group() as group:
        for engine in engines.values():
            group.start_soon(engine.aclose, drain_s)
    scope.cancel()
