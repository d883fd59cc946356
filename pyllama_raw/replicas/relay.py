"""
A request and its answer on their way through a cluster. Nothing here needs Ray.

A front reads in a request what its router chooses by, a replica sends its answer in batches, and
the front knows how much of the answer a client has when a replica ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from anyio import current_time
from pydantic_core import from_json, to_json
from starlette.types import ASGIApp, Message, Scope

from pyllama_raw.routing import RoutedRequest, prefixes

BLOCK_BYTES = 256  # of a prompt as JSON: about 64 tokens
TOKEN_BYTES = 4  # about
MAX_BYTES = 2**18  # of a prompt that are looked at
N_OUTPUT = 256  # tokens, of a request that does not say
PROMPTS = ("messages", "prompt", "input", "documents")
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")
# What stands before the prompt, or beside it.
SPACE = ("model", "cache_salt", "adapters", "tools", "system")
COMMENT = b":"  # what a frame begins with that keeps a stream open


def routed_request(headers: Mapping[str, str], body: bytes) -> RoutedRequest:
    """The request of *headers* and *body*; one that is no JSON has no prompt."""
    try:
        content = from_json(body)
    except ValueError:
        content = None
    fields: dict[str, Any] = content if isinstance(content, dict) else {}
    session = headers.get("x-session-id") or fields.get("prompt_cache_key")
    data = b",".join(_parts(fields))
    space = to_json([fields.get(name) for name in SPACE])
    limits = (fields.get(name) for name in LIMITS)
    n_output = next((n for n in limits if isinstance(n, int)), N_OUTPUT)
    return RoutedRequest(
        len(data) // TOKEN_BYTES + max(n_output, 0),
        prefixes(data[:MAX_BYTES], BLOCK_BYTES, space) if data else (),
        session if isinstance(session, str) else None,
    )


def _parts(fields: Mapping[str, Any]) -> list[bytes]:
    """The prompt in pieces; a chat that goes on begins with the pieces that it had."""
    prompt: Any = next((fields[name] for name in PROMPTS if fields.get(name)), [])
    if isinstance(prompt, list):
        return [to_json(part) for part in prompt]
    return [to_json(prompt)[1:-1]]


class Outbox:
    """
    One request and its answer.

    A message goes at once if none has gone for *batch_s*; else it waits for the rest of
    that time, and later parts of the body join it. A call of Ray costs more than a token.
    """

    def __init__(self, body: bytes, batch_s: float) -> None:
        self._asks: list[Message] = [{"type": "http.request", "body": body}]
        self._batch_s = batch_s
        self._ready: list[Message] = []
        self._changed = asyncio.Event()  # Ray has no other event loop

    async def run(self, app: ASGIApp, scope: Scope) -> AsyncIterator[list[Message]]:
        """Call *app*; closing this is what a client does that leaves."""
        task = asyncio.create_task(self._call(app, scope))
        try:
            while self._ready or not task.done():
                if not self._ready:
                    await self._changed.wait()
                    continue
                went = current_time()
                batch, self._ready = self._ready, []
                self._changed.clear()
                yield batch
                if not task.done():
                    await asyncio.sleep(max(went + self._batch_s - current_time(), 0))
            await task  # raises what the application did
        finally:
            task.cancel()

    async def _call(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._changed.set()

    async def _receive(self) -> Message:
        if self._asks:
            return self._asks.pop()
        await asyncio.Event().wait()  # a client that leaves cancels the whole call
        raise AssertionError

    async def _send(self, message: Message) -> None:
        last = self._ready[-1] if self._ready else message
        if last is not message and "body" in last and "body" in message:
            message["body"] = last["body"] + message["body"]
            self._ready.pop()
        self._ready.append(message)
        self._changed.set()


class Progress:
    """
    Part of an answer that a client has: whether another replica may begin the answer again.

    It may until the client has a token. A comment in a stream is none.
    """

    has_begun = has_token = False

    def goes_on_with(self, message: Message) -> bool:
        """Whether *message* is sent: a second replica begins the answer again."""
        is_second = self.has_begun and message["type"] == "http.response.start"
        self.has_begun = True
        frames = message.get("body", b"").split(b"\n\n")
        self.has_token |= any(f and not f.startswith(COMMENT) for f in frames)
        return not is_second
