"""Applications behind real servers, and engines on fakes that answer chats."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import uvicorn

from pyllama_raw import AsyncEngine
from pyllama_raw.serve import make_app
from pyllama_raw.testing import FakeExecutor, fake_engine
from tests.limits import LIMIT_S  # noqa: F401 - tests of the service have it from here

BACKLOG = 2048  # connections that wait for the server
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def chatting(executor: FakeExecutor | None = None, **options) -> AsyncEngine:
    """An engine on fakes whose chats are the texts of their messages."""
    return fake_engine(executor, chat_template=TEMPLATE, **options)


async def request_of(read, body):
    """The request that a dialect reads of *body*, and kinds of what it leaves out."""
    async with chatting() as engine:
        service = make_app({"a": engine}).state.service
        return await read(body, service), service.traffic.left_out


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
            server = uvicorn.Server(options)
            group.start_soon(server.serve, [listening])
        yield f"http://127.0.0.1:{port}"
        if backend != "trio":
            server.should_exit = True
        ended.set()


async def _hypercorn(app, descriptor: int, ended: anyio.Event) -> None:
    from hypercorn import config, trio

    options = config.Config()
    options.bind = [f"fd://{descriptor}"]
    await trio.serve(app, options, shutdown_trigger=ended.wait, mode="asgi")
