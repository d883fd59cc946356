"""Applications behind real servers, and engines on fakes that answer chats."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import uvicorn

from pyllama_raw import AsyncEngine
from pyllama_raw.testing import FakeExecutor, fake_engine
from tests.limits import LIMIT_S

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def chatting(executor: FakeExecutor | None = None, **options) -> AsyncEngine:
    """An engine on fakes whose chats are the texts of their messages."""
    return fake_engine(executor, chat_template=TEMPLATE, **options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def serving(app, backend: str) -> AsyncIterator[str]:
    """The address of a server that ends with the block: uvicorn, or hypercorn on trio."""
    port, ended = free_port(), anyio.Event()
    async with anyio.create_task_group() as group:
        if backend == "trio":
            group.start_soon(_hypercorn, app, port, ended)
        else:
            options = uvicorn.Config(
                app, port=port, log_level="warning", lifespan="off"
            )
            server = uvicorn.Server(options)
            group.start_soon(server.serve)
        await _wait_until_up(port)
        yield f"http://127.0.0.1:{port}"
        if backend != "trio":
            server.should_exit = True
        ended.set()


async def _hypercorn(app, port: int, ended: anyio.Event) -> None:
    from hypercorn import config, trio

    options = config.Config()
    options.bind = [f"127.0.0.1:{port}"]
    await trio.serve(app, options, shutdown_trigger=ended.wait, mode="asgi")


async def _wait_until_up(port: int) -> None:
    with anyio.fail_after(LIMIT_S):
        while True:
            try:
                stream = await anyio.connect_tcp("127.0.0.1", port)
            except OSError:
                await anyio.sleep(0.01)
                continue
            await stream.aclose()
            return
