"""Clients that do what no library does: they send half, say nothing, and leave."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio
from anyio.abc import SocketStream

PATH = "/v1/chat/completions"


def chat(text: str = "a chat", **fields) -> bytes:
    body = {"messages": [{"role": "user", "content": text}], "stream": True}
    return json.dumps(body | fields).encode()


class Wire:
    """One connection."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._buffer = b""

    async def post(self, body: bytes, path: str = PATH, **headers: str) -> None:
        """Send all of a request."""
        await self.begin(path, content_length=str(len(body)), **headers)
        await self.send(body)

    async def begin(self, path: str = PATH, **headers: str) -> None:
        """Send the head of a request; `_` in names stands for `-`."""
        header_lines = {"host": "here", "content_type": "application/json"} | headers
        lines = [
            f"{name.replace('_', '-')}: {value}" for name, value in header_lines.items()
        ]
        head = "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""])
        await self.send(head.encode())

    async def send(self, part: bytes) -> None:
        await self._stream.send(part)

    async def until(self, mark: bytes) -> bytes:
        """What comes up to *mark*, and with it."""
        while mark not in self._buffer:
            self._buffer += await self._stream.receive()
        head, _, self._buffer = self._buffer.partition(mark)
        return head + mark

    async def rest(self) -> bytes:
        """What comes until the connection is closed."""
        try:
            while True:
                self._buffer += await self._stream.receive()
        except anyio.EndOfStream:
            return self._buffer

    async def head(self) -> tuple[int, dict[str, str]]:
        """The status and the headers of an answer."""
        first, *lines = (await self.until(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        pairs = (line.split(": ", 1) for line in lines)
        return int(first.split()[1]), {name.lower(): value for name, value in pairs}

    async def answer(self) -> tuple[int, dict[str, str], dict]:
        """An answer that is JSON of a known length."""
        status, headers = await self.head()
        while len(self._buffer) < int(headers["content-length"]):
            self._buffer += await self._stream.receive()
        n_bytes = int(headers["content-length"])
        body, self._buffer = self._buffer[:n_bytes], self._buffer[n_bytes:]
        return status, headers, json.loads(body)


@asynccontextmanager
async def wire(url: str) -> AsyncIterator[Wire]:
    """A connection that is closed at the end of the block."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    async with await anyio.connect_tcp(address.hostname, address.port) as stream:
        yield Wire(stream)
