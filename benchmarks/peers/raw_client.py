"""
An HTTP/1.1 client that takes little CPU time and hands out lines as they come.

A client takes its CPU time from a server on the same machine. General clients, as that of
`bench`, wake a task for every part of an answer, which costs more than all that is done with
the part; here the parser, httptools, calls back. This client knows no redirects and no
compressed bodies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httptools

from pyllama_raw.lab.targets import (
    HttpClient,
    HttpFailed,
    HttpTarget,
    OnLine,
    target_of,
)

TIMEOUT_S = 600.0  # without a byte


class RawClient(HttpClient):
    """Requests to one server. Thread: the event loop's, which is asyncio's."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        """
        Args:
            url: of the server, http or https; paths are added to its own.
        """
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/")
        fields = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close"}
        lines = [f"{name}: {value}\r\n" for name, value in (fields | headers).items()]
        self._headers = "".join(lines)

    async def exchange(
        self, method: str, path: str, content: bytes, on_line: OnLine
    ) -> None:
        """Like that of the client of `bench`."""
        head = (
            f"{method} {self._base}{path} HTTP/1.1\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        )
        request = f"{head}{self._headers}\r\n".encode() + content
        loop = asyncio.get_running_loop()
        transport, exchange = await loop.create_connection(
            lambda: _Exchange(loop, on_line), self._host, self._port, ssl=self._tls
        )
        try:
            transport.write(request)
            while (left_s := exchange.heard + TIMEOUT_S - loop.time()) > 0:
                await asyncio.wait([exchange.ended], timeout=left_s)
                if exchange.ended.done():
                    return exchange.ended.result()
            raise TimeoutError(f"nothing came for {TIMEOUT_S:g} s")
        finally:
            exchange.ended.cancel()
            transport.abort()


class _Exchange(asyncio.Protocol):
    """One request and its answer; httptools calls the methods called on_."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_line: OnLine) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self.heard = loop.time()  # the last time
        self._loop = loop
        self._on_line = on_line
        self._parser = httptools.HttpResponseParser(self)
        self._has_size = False
        self._until_closed = False  # nothing else says where the body ends
        self._is_whole = False
        self._tail = b""  # of the body, after the last line

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(HttpFailed(f"no HTTP: {error}"))
        else:
            self._tell()

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._until_closed:
            self._is_whole = True
            self._tell()
        self._end(error or ConnectionError("closed before the end of the answer"))

    def on_header(self, name: bytes, _: bytes) -> None:
        self._has_size |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._until_closed = not self._has_size

    def on_body(self, part: bytes) -> None:
        self._tail += part

    def on_message_complete(self) -> None:
        self._is_whole = True

    def _tell(self) -> None:
        if self.ended.done():
            return
        try:
            status = self._parser.get_status_code()
            if 200 <= status < 300:
                self._take_lines()
            elif self._is_whole:
                text = self._tail.decode(errors="replace")
                self._end(HttpFailed(f"status {status}: {text[:200]}"))
            if self._is_whole:
                self._end(None)
        except Exception as error:  # noqa: BLE001 - raised by who waits
            self._end(error)

    def _take_lines(self) -> None:
        *lines, self._tail = self._tail.split(b"\n")
        if self._is_whole and self._tail:
            lines.append(self._tail)
        for line in lines:
            self._on_line(line)

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


@asynccontextmanager
async def http_target(
    url: str, protocol: str = "llama-server", forbidden: Iterable[int] = ()
) -> AsyncIterator[HttpTarget]:
    """Like http_target() of the command, with this client and without a key."""
    yield await target_of(RawClient(url, {}), protocol, forbidden)
