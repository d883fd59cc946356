"""Server-sent events: frames of one answer, with comments when nothing else comes."""

from __future__ import annotations

from typing import Any

from anyio import Lock, current_time, fail_after, sleep
from pydantic_core import to_json
from starlette.types import Send

HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """A frame with *value* as JSON on one line."""
    return b"data: %b\n\n" % to_json(value)


def named_event(name: str, /, **fields: Any) -> bytes:
    """A frame of an event that has its name in *fields*, too, as their type."""
    return b"event: %b\n%b" % (name.encode(), event({"type": name, **fields}))


class EventStream:
    """Begins with what is written first; several tasks may write."""

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send
        self._lock = Lock()
        self._written = current_time()

    async def write(self, frames: bytes) -> None:
        """Send complete frames. A client that reads slowly holds up nobody but itself."""
        if not frames:
            return
        async with self._lock:
            if not self.has_begun:
                self.has_begun = True
                start = {"type": "http.response.start", "status": 200}
                await self._send({**start, "headers": HEADERS})
            part = {"type": "http.response.body", "body": frames, "more_body": True}
            await self._send(part)
            self._written = current_time()

    async def ping(self, every_s: float, limit_s: float) -> None:
        """
        Write a comment whenever *every_s* have passed in silence; for ever.

        Raises:
            TimeoutError: the client has not read for *limit_s* more.
        """
        while True:
            await sleep(max(self._written + every_s - current_time(), 0.0))
            if current_time() >= self._written + every_s:
                with fail_after(limit_s):
                    await self.write(b": ping\n\n")

    async def end(self, *_: object) -> None:
        """Tell the server that all is written, as an application."""
        await self._send({"type": "http.response.body", "body": b""})
