"""
Open the engines, answer until a signal comes, let what runs end.

The server is uvicorn, whose own handling of signals closes connections; so it is told to end
only when the engines are done.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager

import anyio
import uvicorn
from anyio.abc import TaskStatus
from fastapi import FastAPI

from pyllama_raw import AsyncEngine, EngineConfig
from pyllama_raw.errors import ConfigError
from pyllama_raw.serve.app import make_app
from pyllama_raw.serve.config import ServeConfig


IDLE_S = (
    75  # that a connection is kept without a request: longer than balancers keep theirs
)
LAST_S = 1  # that clients have to read the rest, once the engines have ended


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

    Raises:
        ConfigError: the address cannot be had; before anything is loaded.
    """
    config = config or ServeConfig()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(_listener(host, port))
        engines = {
            name: await stack.enter_async_context(AsyncEngine.open(path, engine_config))
            for name, path in models.items()
        }
        app = make_app(engines, config)
        options = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=LAST_S,
        )
        server = _Server(options)
        async with anyio.create_task_group() as group:
            await group.start(_end_at_signal, app, server, config.drain_s)
            await server.serve([listener])
            group.cancel_scope.cancel()


def _listener(host: str, port: int) -> socket.socket:
    """Nobody is answered yet; those that come wait."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{host}:{port} cannot be listened at: {error}") from error


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
