"""
A plain handler of Starlette, or of FastAPI, whose request ends when its client leaves.

    pip install starlette uvicorn
    uvicorn --app-dir examples handler:app
    curl -d '{"prompt": "The capital of France is"}' localhost:8000/ask

A server does not cancel a handler: it runs to its end, whether anybody is there or not.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pyllama_raw import AsyncEngine, PyllamaError


@asynccontextmanager
async def with_client(request: Request) -> AsyncIterator[None]:
    """Cancel the block when the client leaves; its body was read before."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(leave)
        yield
        group.cancel_scope.cancel()


async def ask(request: Request) -> Response:
    """The whole answer at once."""
    engine, fields = request.app.state.engine, await request.json()
    response = Response()  # of a client that has left: nobody reads it
    async with with_client(request):
        try:
            result = await engine.complete(fields["prompt"])
            response = JSONResponse({"text": result.text})
        except PyllamaError as error:
            response = JSONResponse({"error": str(error)}, error.http_status)
    return response


@asynccontextmanager
async def with_engine(app: Starlette) -> AsyncIterator[None]:
    """One engine for all requests."""
    async with AsyncEngine.open() as engine:
        app.state.engine = engine
        yield


app = Starlette(routes=[Route("/ask", ask, methods=["POST"])], lifespan=with_engine)
