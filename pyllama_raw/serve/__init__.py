"""
Engines over HTTP, as clients of OpenAI's API call them; needs the extra `serve`.

    app = make_app({"assistant": engine})
    await serve(app, ListenConfig(port=8000), print)

The server stands on the public API alone, so an application of one's own can do all that it
does. `pyllama-raw serve MODEL` opens the engines and runs the application.

A handler of Starlette or FastAPI of your own needs two things that a server does not do:
1. A server does not cancel a handler whose client has left: with_client() does.
2. A response that enters a generation while it is sent has said 200 before it is known whether
   the engine takes the request: streamed() enters first.

An error of the engine comes out of both as it is, never in a group, so the exception handlers of an
application for PyllamaError see it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from anyio import create_task_group
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyllama_raw import Delta, Generation
from pyllama_raw.errors import first_of
from pyllama_raw.serve.app import make_app
from pyllama_raw.serve.config import ListenConfig, ModelsConfig, ServeConfig
from pyllama_raw.serve.run import serve

__all__ = [
    "ListenConfig",
    "ModelsConfig",
    "ServeConfig",
    "make_app",
    "serve",
    "streamed",
    "with_client",
]

Write = Callable[[Delta], str | bytes]


@asynccontextmanager
async def with_client(receive: Receive) -> AsyncIterator[None]:
    """
    Cancel the block when the client leaves, and go on behind it.

    Args:
        receive: that of the request, `request.receive`, whose body was read before.
    """

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    try:
        async with create_task_group() as group:
            group.start_soon(leave)
            yield
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None


async def streamed(
    generation: Generation,
    write: Write = lambda delta: delta.text,
    *,
    media_type: str = "text/plain; charset=utf-8",
) -> Response:
    """
    Enter *generation*, then make a response that sends what *write* makes of each delta.

    The request ends when the response has ended, and when its client leaves. An error after the
    first byte breaks the response off, because its status is said.

    Args:
        write: frames of a delta, such as an event; an empty one is not sent.

    Raises:
        QueueFull, PromptTooLong, InvalidRequest, ...: as entering the generation, so an
            application can still answer with a status.
    """
    await generation.__aenter__()
    return _Stream(generation, write, media_type)


class _Stream(Response):
    """A response whose body is made while it is sent."""

    def __init__(self, generation: Generation, write: Write, media_type: str) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._generation, self._write = generation, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Return when all is sent, or the client has left."""
        start = {"status": self.status_code, "headers": self.raw_headers}
        has_ended = False
        try:
            async with with_client(receive):
                await send({"type": "http.response.start", **start})
                async for delta in self._generation:
                    part = self._write(delta)
                    body = part.encode() if isinstance(part, str) else part
                    if body:
                        message = {"body": body, "more_body": True}
                        await send({"type": "http.response.body", **message})
                has_ended = True
        finally:
            self._generation.cancel()
        if (
            has_ended
        ):  # nothing waits for the client any more, who may be told to have left
            await send({"type": "http.response.body", "body": b""})
