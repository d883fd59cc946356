"""Applications behind real servers, and engines on fakes that answer chats."""

import asyncio
import copy
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import anyio
import fastapi.routing
import httpx
import uvicorn
from fastapi.utils import ModelField, create_model_field

from pyllama_raw import AsyncEngine
from pyllama_raw.serve import make_app
from pyllama_raw.testing import FakeExecutor, fake_parts
from tests.support.limits import LIMIT_S

BACKLOG = 2048  # connections that wait for the server
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@cache
def _field_of(kind: object, mode: Any) -> ModelField:
    return create_model_field("any", kind, mode=mode)


def _named_field(name: str, type_: object, mode: Any = "validation") -> ModelField:
    """An answer of a route; only its name differs from those of the same type."""
    field = copy.copy(_field_of(type_, mode))
    field.name = name
    return field


# Each application makes a hundred of these for the same ten types, which takes longer than to
# start its server and to answer a chat.
fastapi.routing.create_model_field = _named_field


def chatting(
    executor: FakeExecutor | None = None, chat_template: str = TEMPLATE, **options
) -> AsyncEngine:
    """
    An engine on fakes whose chats are the texts of their messages.

    Its template runs in this process: to start another one takes a tenth of a second, and
    tests/rendering, tests/api and the native tests of the service have those.
    """
    parts = fake_parts(executor, chat_template=chat_template, **options)
    return AsyncEngine(replace(parts, template_process=False))


async def request_of(read, body):
    """The request that a dialect reads of *body*, and kinds of what it leaves out."""
    async with chatting() as engine:
        service = make_app({"a": engine}).state.service
        return await read(body, service), service.traffic.left_out


def client_of(app: Any) -> httpx.AsyncClient:
    """A client of *app* without a server."""
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://a", timeout=LIMIT_S)


@asynccontextmanager
async def serving(app, backend: str) -> AsyncIterator[str]:
    """The address of a server that ends with the block: uvicorn, or hypercorn on trio."""
    # The socket listens before the server does. So nobody else gets the port, connections wait
    # for the server, and none is refused. A free port that is looked for first, and connected to
    # until something answers, may be that of another server, or of the attempt itself.
    listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    port, ended = listening.getsockname()[1], anyio.Event()
    async with anyio.create_task_group() as group:
        if backend == "trio":
            group.start_soon(_hypercorn, app, listening.detach(), ended)
        else:
            options = uvicorn.Config(
                app, log_level="warning", lifespan="off", backlog=BACKLOG
            )
            group.start_soon(_Server(options, ended).serve, [listening])
        yield f"http://127.0.0.1:{port}"
        ended.set()


class _Server(uvicorn.Server):
    """uvicorn's, which ends at once: its own looks ten times a second whether it should."""

    def __init__(self, config: uvicorn.Config, ended: anyio.Event) -> None:
        super().__init__(config)
        self._ended = ended

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._ended.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
            await asyncio.sleep(1e-3)  # nothing tells of it
        for server in self.servers:
            await server.wait_closed()


async def _hypercorn(app, descriptor: int, ended: anyio.Event) -> None:
    from hypercorn import config, trio

    options = config.Config()
    options.bind = [f"fd://{descriptor}"]
    await trio.serve(app, options, shutdown_trigger=ended.wait, mode="asgi")
