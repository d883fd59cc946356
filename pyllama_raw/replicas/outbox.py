"""An application that is called without a server: its messages, in batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from anyio import current_time
from starlette.types import ASGIApp, Message, Scope


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
