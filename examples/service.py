"""
A service: chats over HTTP as OpenAI's clients send them.

    pip install starlette 'hypercorn[trio]'
    python examples/service.py --model model.gguf --port 8000

POST /v1/chat/completions takes `messages`, and beside it any sampling parameter, and
`deadline_s`, `priority`, `cache_salt`. The answer is whole; with `"stream": true` it comes as
server-sent events. GET /health tells whether requests are taken.

Rules:
1. A stream begins with the first token, a whole answer when all of it is there. What goes
   wrong before is a status with a JSON body (`http_status` of the error); what goes wrong
   later is an event in the stream.
2. The request ends when its client leaves, wherever it is.
3. SIGTERM and SIGINT let what runs end for DRAIN_S, and meanwhile refuse new requests.
"""

from __future__ import annotations

import signal
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from functools import partial
from time import time
from typing import Any, NamedTuple
from uuid import uuid4

import anyio
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pyllama_raw import (
    AsyncEngine,
    FinishReason,
    Generation,
    PyllamaError,
    Result,
    SamplingParams,
)
from pyllama_raw.errors import InvalidRequest

MAX_BODY_BYTES = 2**22
BODY_S = 30.0  # that a client may take to send its body
DEADLINE_S = 120.0  # of a request that names none
DRAIN_S = 20.0
RETRY_S = 1
OPTIONS = ("deadline_s", "priority", "cache_salt")
UNBEGUN = {  # an end before the answer began
    FinishReason.DEADLINE: (504, "deadline_s was over before the answer began"),
    FinishReason.CLOSED: (503, "the service ends: try again"),
}
Until = Callable[[], Awaitable[None]]
EVENTS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


def make_app(engine: AsyncEngine) -> Starlette:
    """The application over an open engine; any ASGI server can run it."""
    chat = Route("/v1/chat/completions", Chat(engine), methods=["POST"])
    return Starlette(routes=[chat, Route("/health", partial(health, engine))])


async def health(engine: AsyncEngine, request: Request) -> Response:
    """200 while requests are taken, then 503: a balancer sends them elsewhere."""
    answer = {"alive": engine.alive, "stats": asdict(engine.stats())}
    return JSONResponse(answer, 200 if engine.alive else 503)


class Chat:
    """Answers one POST after the other; there is no state between them."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = Stream(send)
        try:
            await self._answer(Request(scope, receive), stream)
        except PyllamaError as error:
            await stream.fail(error)
        except TimeoutError:
            stream.refuse(408, "body_timeout", "the body did not come in time")
        except ClientDisconnect:
            return
        await stream.end(scope, receive)

    async def _answer(self, request: Request, stream: Stream) -> None:
        with anyio.fail_after(BODY_S):
            body = await read_body(request)
        if body is None:
            allowed = f"the body may have {MAX_BODY_BYTES} bytes"
            stream.refuse(413, "body_too_large", allowed)
            return
        asked = parse(body)
        generation = self._engine.generate(
            asked.messages, asked.params, **asked.options
        )
        async with with_client(request.receive):
            async with generation:  # the engine takes the request, or says why not
                if asked.streams:
                    async for delta in generation:
                        content = {"content": delta.text}
                        await stream.write(chunk(asked, delta.index, content, None))
                else:
                    await generation.collect_all()
            await finish(asked, generation, stream)


async def read_body(request: Request) -> bytes | None:
    """None: it is too large."""
    body = bytearray()
    async with aclosing(request.stream()) as parts:
        async for part in parts:
            body += part
            if len(body) > MAX_BODY_BYTES:
                return None
    return bytes(body)


@asynccontextmanager
async def with_client(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client leaves; an error of the block comes out as it is."""
    errors: list[PyllamaError] = []

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(leave)
        try:
            yield
        except PyllamaError as error:
            errors.append(error)
        group.cancel_scope.cancel()
    if errors:
        raise errors[0]


class Asked(NamedTuple):
    """What a client asks for, and what all parts of its answer say."""

    messages: list[Any]
    params: SamplingParams
    options: Any
    streams: bool
    head: dict[str, Any]


def parse(body: bytes) -> Asked:
    """Raises InvalidRequest with the name of the field that is wrong."""
    try:
        fields = from_json(body)
    except ValueError as error:
        raise InvalidRequest("body", str(error), "a JSON object") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("body", fields, "a JSON object")
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequest("messages", messages, "a list of messages")
    head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time())}
    head["model"] = fields.pop("model", "")  # there is one, whatever its name
    streams = fields.pop("stream", False)
    if not isinstance(streams, bool):
        raise InvalidRequest("stream", streams, "true or false")
    options = {name: fields.pop(name) for name in OPTIONS if name in fields}
    options = {"deadline_s": DEADLINE_S} | options
    return Asked(messages, SamplingParams(**fields), options, streams, head)


def chunk(
    asked: Asked, index: int, delta: dict[str, str], reason: str | None
) -> dict[str, Any]:
    """One event, as OpenAI's clients read it."""
    choice = {"index": index, "delta": delta, "finish_reason": reason}
    return asked.head | {"object": "chat.completion.chunk", "choices": [choice]}


def whole(asked: Asked, results: Sequence[Result]) -> dict[str, Any]:
    """The answer at once, as OpenAI's clients read it."""
    choices = [
        {
            "index": result.index,
            "message": {"role": "assistant", "content": result.text},
            "finish_reason": result.finish_reason.value,
        }
        for result in results
    ]
    told = {"object": "chat.completion", "choices": choices, "usage": usage(results)}
    return asked.head | told


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """Tokens of the prompt, which the outputs share, and of all outputs."""
    told = asdict(results[0].usage)
    told["completion_tokens"] = sum(r.usage.completion_tokens for r in results)
    return told | {"total_tokens": told["prompt_tokens"] + told["completion_tokens"]}


async def finish(asked: Asked, generation: Generation, stream: Stream) -> None:
    """Tell how each output ended."""
    results = generation.results
    reason = results[0].finish_reason
    if not stream.has_begun and reason in UNBEGUN:
        status, message = UNBEGUN[reason]
        stream.refuse(status, reason.value, message)
        return
    if not asked.streams:
        for error in generation.errors.values():
            raise error
        stream.answer(whole(asked, results))
        return
    for index, error in generation.errors.items():
        await stream.write(chunk(asked, index, {}, "error") | {"error": told(error)})
    for result in results:
        last = chunk(asked, result.index, {}, result.finish_reason.value)
        await stream.write(last | {"usage": usage([result])})
    await stream.close()


def told(error: PyllamaError) -> dict[str, Any]:
    """What a client is told: a code for programs, a message for people, the field."""
    field = error.name if isinstance(error, InvalidRequest) else None
    return {"code": error.code, "message": str(error), "param": field}


class Stream:
    """
    One answer: whole, or a stream that begins with what is written first.

    Its last message is sent by end() alone, when nothing waits for the client to leave: a
    server may say that it left as soon as all is sent.
    """

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send
        self._response: Response | None = None
        self._is_whole = False

    async def write(self, value: dict[str, Any]) -> None:
        """An event. A client that reads slowly holds up nobody but itself."""
        await self._write(b"data: %b\n\n" % to_json(value))

    async def close(self) -> None:
        """The last event."""
        await self._write(b"data: [DONE]\n\n")
        self._is_whole = True

    def answer(self, value: dict[str, Any]) -> None:
        """All of it."""
        self._response = JSONResponse(value)

    async def fail(self, error: PyllamaError) -> None:
        """A status as long as there is one to give."""
        if self.has_begun:
            await self.write({"error": told(error)})
            await self.close()
        else:
            self._refuse(error.http_status, told(error))

    def refuse(self, status: int, code: str, message: str) -> None:
        """Before anything is written."""
        self._refuse(status, {"code": code, "message": message, "param": None})

    def _refuse(self, status: int, answer: dict[str, Any]) -> None:
        headers = {"Retry-After": str(RETRY_S)} if status == 503 else None
        self._response = JSONResponse({"error": answer}, status, headers)

    async def end(self, scope: Scope, receive: Receive) -> None:
        """Nothing, if the client left before the answer was whole."""
        if self._response is not None:
            await self._response(scope, receive, self._send)
        elif self._is_whole:
            await self._send({"type": "http.response.body"})

    async def _write(self, event: bytes) -> None:
        if not self.has_begun:
            self.has_begun = True
            start = {"type": "http.response.start", "status": 200, "headers": EVENTS}
            await self._send(start)
        part = {"type": "http.response.body", "body": event, "more_body": True}
        await self._send(part)


async def drained(engine: AsyncEngine) -> None:
    """Return when a signal has come and the engine is done with what it had."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            break
    await engine.aclose(DRAIN_S)


async def serve(app: Starlette, bind: str, until: Until, *, on_trio: bool) -> None:
    """Answer at *bind* until *until* returns."""
    from hypercorn import asyncio, config, trio

    options = config.Config()
    options.bind = [bind]
    options.graceful_timeout = DRAIN_S  # for what still writes to its client
    run = trio.serve if on_trio else asyncio.serve
    await run(app, options, shutdown_trigger=until, mode="asgi")  # type: ignore[arg-type]


async def run(model: str | None, bind: str, on_trio: bool) -> None:
    """Listen once the model is loaded."""
    async with AsyncEngine.open(model) as engine:
        until = partial(drained, engine)
        await serve(make_app(engine), bind, until, on_trio=on_trio)


def main() -> None:
    """Run the script."""
    parser = ArgumentParser(description="Chats over HTTP.")
    parser.add_argument("--model", help="a GGUF file; default: a small model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--trio", action="store_true", help="instead of asyncio")
    options = parser.parse_args()
    backend = "trio" if options.trio else "asyncio"
    bind = f"{options.host}:{options.port}"
    anyio.run(run, options.model, bind, options.trio, backend=backend)


if __name__ == "__main__":
    main()
