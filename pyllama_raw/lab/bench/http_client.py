"""
Lines of answers as they come, by httpx.

A client takes its CPU time from a server on the same machine: this one some 70 us for each
event, the one of benchmarks/ some 15 (`RawClient`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
from pydantic_core import to_json

TIMEOUT_S = 600.0  # without a byte

OnLine = Callable[[bytes], object]


class HttpFailed(Exception):
    """The server said no, or something that is not HTTP."""


class HttpClient:
    """Requests to one server, each by a connection of its own: servers drop idle ones."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def get(self, path: str, on_line: OnLine) -> None:
        """Like post(), without a body."""
        await self.exchange("GET", path, b"", on_line)

    async def post(self, path: str, body: object, on_line: OnLine) -> None:
        """
        Send *body* as JSON, and wait for the end of the answer.

        Args:
            on_line: called with each line, without its end, when it has come.

        Raises:
            HttpFailed, OSError: there is no answer, or not all of it, or its status is not
                2xx.
            Exception: what *on_line* raised.
        """
        await self.exchange("POST", path, to_json(body), on_line)

    async def exchange(
        self, method: str, path: str, content: bytes, on_line: OnLine
    ) -> None:
        """Like post(), of bytes; another client may do this in another way."""
        try:
            async with self._client.stream(method, path, content=content) as answer:
                if not answer.is_success:
                    text = (await answer.aread()).decode(errors="replace")
                    raise HttpFailed(f"status {answer.status_code}: {text[:200]}")
                await _tell_lines(answer, on_line)
        except httpx.HTTPError as error:
            raise HttpFailed(f"{type(error).__name__} {error}") from error


async def _tell_lines(answer: httpx.Response, on_line: OnLine) -> None:
    """Split at newlines alone: JSON may hold what Python, and httpx, call other ends of lines."""
    tail = b""
    async for part in answer.aiter_bytes():
        *lines, tail = (tail + part).split(b"\n")
        for line in lines:
            on_line(line)
    if tail:
        on_line(tail)


@asynccontextmanager
async def open_client(url: str, headers: dict[str, str]) -> AsyncIterator[HttpClient]:
    """A client of the server at *url*; the environment's proxies are not asked."""
    async with httpx.AsyncClient(
        base_url=url,
        headers=headers
        | {"Content-Type": "application/json", "Accept-Encoding": "identity"},
        timeout=TIMEOUT_S,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
    ) as client:
        yield HttpClient(client)
