"""
Handlers of Starlette, or of FastAPI, whose requests end when their clients leave.

    pip install 'pyllama_raw[serve]'
    uvicorn --app-dir examples handler:app
    curl -d '{"prompt": "The capital of France is"}' localhost:8000/ask
    curl -N -d '{"prompt": "The capital of France is"}' localhost:8000/stream

A server does not cancel a handler: it runs to its end, whether anybody is there or not.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pyllama_raw import AsyncEngine, PyllamaError
from pyllama_raw.serve import streamed, with_client


async def ask(request: Request) -> Response:
    """The whole answer at once."""
    engine, fields = request.app.state.engine, await request.json()
    text = ""  # of a client that has left: nobody reads it
    async with with_client(request.receive):
        text = (await engine.complete(fields["prompt"])).text
    return JSONResponse({"text": text})


async def stream(request: Request) -> Response:
    """The text as it comes; what is refused is refused before the first byte."""
    engine, fields = request.app.state.engine, await request.json()
    return await streamed(engine.generate(fields["prompt"]))


async def refuse(request: Request, error: Exception) -> Response:
    """An error of the engine, with the status that it fits."""
    assert isinstance(error, PyllamaError)
    return JSONResponse({"error": str(error)}, error.http_status)


@asynccontextmanager
async def with_engine(app: Starlette) -> AsyncIterator[None]:
    """One engine for all requests."""
    async with AsyncEngine.open() as engine:
        app.state.engine = engine
        yield


app = Starlette(
    routes=[
        Route("/ask", ask, methods=["POST"]),
        Route("/stream", stream, methods=["POST"]),
    ],
    exception_handlers={PyllamaError: refuse},
    lifespan=with_engine,
)
