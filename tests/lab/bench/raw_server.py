"""A server on a real socket that answers with the bytes a test gives it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream


class Asked(NamedTuple):
    """One request."""

    path: str
    headers: dict[str, str]
    body: Any


class RawServer:
    """Says the same to all, in pieces of *piece* bytes; keeps the requests."""

    def __init__(self, answer: bytes, piece: int = 7) -> None:
        self.requests: list[Asked] = []
        self.url = ""
        self.n_left = 0  # clients that did not hear all
        self._answer, self._piece = answer, piece

    async def serve(self, stream: SocketStream) -> None:
        """One connection."""
        async with stream:
            self.requests.append(await _read(stream))
            try:
                await self._say(stream)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                self.n_left += 1

    async def _say(self, stream: SocketStream) -> None:
        for start in range(0, len(self._answer), self._piece):
            await stream.send(self._answer[start : start + self._piece])
        if not self._answer:  # silent until the client leaves
            await stream.receive()


async def _read(stream: SocketStream) -> Asked:
    source = BufferedByteReceiveStream(stream)
    raw = await source.receive_until(b"\r\n\r\n", 2**16)
    first, *lines = raw.decode().split("\r\n")
    headers = dict(line.lower().split(": ") for line in lines)
    body = await source.receive_exactly(int(headers.get("content-length", 0)))
    return Asked(first.split()[1], headers, json.loads(body) if body else None)


@asynccontextmanager
async def serving(answer: bytes, piece: int = 7) -> AsyncIterator[RawServer]:
    """It listens until the block ends."""
    server = RawServer(answer, piece)
    async with (
        await anyio.create_tcp_listener(
            local_host="127.0.0.1", backlog=1000
        ) as listener,
        anyio.create_task_group() as group,
    ):
        address = anyio.abc.SocketAttribute.local_address
        host, port = listener.extra(address)  # noqa: S610 - no Django here
        server.url = f"http://{host}:{port}"
        group.start_soon(listener.serve, server.serve)
        yield server
        group.cancel_scope.cancel()


def sized(body: str, status: int = 200) -> bytes:
    """An answer that says how long it is."""
    raw = body.encode()
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(raw), raw)


def chunked(body: str, size: int = 10) -> bytes:
    """As servers stream."""
    raw = body.encode()
    parts = [raw[i : i + size] for i in range(0, len(raw), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % chunks
