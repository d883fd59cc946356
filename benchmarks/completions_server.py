"""
A minimal /v1/completions over an AsyncEngine, to measure what HTTP costs.

One uvicorn worker, streams only. It is no server for users: nothing is checked but what
the engine checks, and a usage comes always.

    python benchmarks/completions_server.py --model FILE --port 8000
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pyllama_raw import (
    AsyncEngine,
    EngineConfig,
    PyllamaError,
    SamplingParams,
)
from pyllama_raw.generation import Generation


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % to_json(value)


async def stream(generation: Generation, max_tokens: int) -> AsyncIterator[bytes]:
    """Chunks of text, then the usage. Leaving ends the request."""
    try:
        async with generation:
            async for delta in generation:
                yield event({"choices": [{"index": 0, "text": delta.text}]})
        result = generation.result
    except PyllamaError as error:
        yield event({"error": {"message": str(error), "type": type(error).__name__}})
        return
    usage = {
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": result.usage.cached_tokens},
    }
    reason = "length" if result.usage.completion_tokens == max_tokens else "stop"
    last = {"index": 0, "text": "", "finish_reason": reason}
    queue_s = result.timings.queue_s
    yield event({"choices": [last], "usage": usage, "queue_s": queue_s})
    yield b"data: [DONE]\n\n"


async def complete(request: Request) -> Response:
    """POST /v1/completions."""
    body: dict[str, Any] = await request.json()
    params = SamplingParams(
        max_tokens=body["max_tokens"],
        temperature=body["temperature"],
        ignore_eos=body.get("ignore_eos", False),
    )
    generation = request.app.state.engine.generate(body["prompt"], params)
    return StreamingResponse(
        stream(generation, params.max_tokens), media_type="text/event-stream"
    )


async def health(_: Request) -> Response:
    """GET /health: it listens only once the engine is open."""
    return JSONResponse({})


def app(model: Path, config: EngineConfig) -> Starlette:
    """The application; it owns the engine."""

    @asynccontextmanager
    async def lifespan(application: Starlette) -> AsyncIterator[None]:
        async with AsyncEngine.open(model, config) as engine:
            application.state.engine = engine
            yield

    routes = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> int:
    """Serve until the process is ended."""
    parser = ArgumentParser(description="A minimal /v1/completions.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--config", default="{}", help="an EngineConfig as JSON")
    options = parser.parse_args()
    config = EngineConfig(**json.loads(options.config))
    served = app(options.model, config)
    uvicorn.run(served, host=options.host, port=options.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
