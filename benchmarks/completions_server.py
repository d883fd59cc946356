"""
A minimal /v1/completions over an AsyncEngine, to measure what HTTP costs.

One uvicorn worker, streams only. It is no server for users: nothing is checked but what
the engine checks, a usage comes always, and every other path answers 200. It speaks ASGI
itself: on a machine whose CPUs all compute, the layers of a framework, run through for
every token, could be measured.

    python benchmarks/completions_server.py --model FILE --port 8000
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from pydantic_core import from_json, to_json

from pyllama_raw import AsyncEngine, EngineConfig, PyllamaError, SamplingParams
from pyllama_raw.api.generation import Generation

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % to_json(value)


async def answer(generation: Generation, max_tokens: int, send: Send) -> None:
    """Send chunks of text, then the usage."""

    async def write(part: bytes) -> None:
        await send({"type": "http.response.body", "body": part, "more_body": True})

    try:
        async with generation:
            async for delta in generation:
                await write(event({"choices": [{"index": 0, "text": delta.text}]}))
        result = generation.result
    except PyllamaError as error:
        message = {"message": str(error), "type": type(error).__name__}
        await write(event({"error": message}))
        return
    usage = {
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": result.usage.cached_tokens},
    }
    reason = "length" if result.usage.completion_tokens == max_tokens else "stop"
    last = {"index": 0, "text": "", "finish_reason": reason}
    queue_s = result.timings.queue_s
    await write(event({"choices": [last], "usage": usage, "queue_s": queue_s}))
    await write(b"data: [DONE]\n\n")


async def body_of(receive: Receive) -> bytes:
    """The whole body of a request."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def cancel_if_left(receive: Receive, generation: Generation) -> None:
    """Wait for the client to go."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.cancel()


class App:
    """The application; it owns the engine."""

    def __init__(self, model: Path, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self.engine: AsyncEngine | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        start = {"type": "http.response.start", "status": 200}
        if scope["path"] == "/v1/completions":
            await send(start | {"headers": [(b"content-type", b"text/event-stream")]})
            await self._complete(receive, send)
        else:
            await send(start)
        await send({"type": "http.response.body"})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()  # that it begins
        async with AsyncEngine.open(self._model, self._config) as self.engine:
            await send({"type": "lifespan.startup.complete"})
            await receive()  # that it ends
        await send({"type": "lifespan.shutdown.complete"})

    async def _complete(self, receive: Receive, send: Send) -> None:
        assert self.engine is not None
        wanted = from_json(await body_of(receive))
        params = SamplingParams(
            max_tokens=wanted["max_tokens"],
            temperature=wanted["temperature"],
            ignore_eos=wanted.get("ignore_eos", False),
        )
        generation = self.engine.generate(wanted["prompt"], params)
        async with anyio.create_task_group() as group:
            group.start_soon(cancel_if_left, receive, generation)
            await answer(generation, params.max_tokens, send)
            group.cancel_scope.cancel()


def main() -> int:
    """Serve until the process is ended."""
    parser = ArgumentParser(description="A minimal /v1/completions.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--config", default="{}", help="an EngineConfig as JSON")
    options = parser.parse_args()
    app = App(options.model, EngineConfig(**json.loads(options.config)))
    uvicorn.run(
        app, host=options.host, port=options.port, log_level="warning", lifespan="on"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
