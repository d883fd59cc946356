"""
Servers over streaming HTTP: OpenAI's completions, and llama-server's own protocol.

A line of an answer is noted with its time and read when the answer is whole. libllama
leaves nothing of other programs in the caches, so reading each event at once would take
several times as much CPU time from a server on the same machine.

A client takes its CPU time from a server on the same machine: the one here, by httpx, some 70 us
for each event, the one of benchmarks/ some 15 (`RawClient`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import httpx
from pydantic_core import from_json, to_json

from pyllama_raw.lab.bench.call import CallFailed, Record

API_KEY = "OPENAI_API_KEY"


class HttpTarget(ABC):
    """The common part of both protocols."""

    path: str

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    @abstractmethod
    def body(self, record: Record) -> dict[str, Any]:
        """The JSON object that is posted."""

    @abstractmethod
    def take(self, record: Record, event: dict[str, Any], at: float) -> None:
        """Write what *event* brought, *at* that time, into *record*."""

    async def send(self, record: Record) -> None:
        heard: list[tuple[float, bytes]] = []  # when, what; not read yet

        def hear(line: bytes) -> None:
            heard.append((perf_counter(), line))
            if record.on_tokens is not None:  # somebody waits for tokens
                self._read(record, heard)

        try:
            await self._client.post(self.path, self.body(record), hear)
        except (HttpFailed, OSError) as error:
            self._read(record, heard)  # what came before counts
            raise CallFailed(f"{type(error).__name__}: {error}") from error
        self._read(record, heard)
        record.check_length()

    def _read(self, record: Record, heard: list[tuple[float, bytes]]) -> None:
        """Write into *record* what was *heard*, and forget that."""
        lines, heard[:] = heard[:], []
        for at, line in lines:
            if record.left:
                break
            if line.startswith(b"error:"):
                raise CallFailed(line.decode(errors="replace"))
            if line.startswith(b"data: {"):
                event = from_json(line[6:])
                if "error" in event:
                    raise CallFailed(str(event["error"]))
                self.take(record, event, at)


class OpenAITarget(HttpTarget):
    """
    /v1/completions. A chunk counts as one token until the usage at the end says how many
    there were.
    """

    path = "/v1/completions"

    def __init__(
        self,
        client: HttpClient,
        model: str = "default",  # most servers have one, and take any name
        forbidden: Iterable[int] = (),
    ) -> None:
        """
        Args:
            forbidden: tokens that end the generation, for servers that do not know
                ignore_eos.
        """
        super().__init__(client)
        self._model = model
        self._bias = {str(token): -100 for token in forbidden}

    def body(self, record: Record) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": record.prompt,
            "max_tokens": record.call.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        return body | ({"logit_bias": self._bias} if self._bias else {})

    def take(self, record: Record, event: dict[str, Any], at: float) -> None:
        for choice in event.get("choices", ()):
            # The last chunk may only say why it is the last.
            if choice.get("text") or not choice.get("finish_reason"):
                record.take(1, choice.get("text") or "", at=at)
        if usage := event.get("usage"):
            record.n_output = usage["completion_tokens"]
            record.n_prompt = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            record.n_cached = details.get("cached_tokens", record.n_cached)


class LlamaServerTarget(HttpTarget):
    """/completion of llama-server and of what is built around it."""

    path = "/completion"

    def body(self, record: Record) -> dict[str, Any]:
        return {
            "prompt": record.prompt,
            "n_predict": record.call.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
        }

    def take(self, record: Record, event: dict[str, Any], at: float) -> None:
        if tokens := event["tokens"]:
            record.take(len(tokens), event["content"], tokens, at)
        if event["stop"]:
            timings = event["timings"]
            record.n_cached = timings["cache_n"]
            record.n_prompt = timings["cache_n"] + timings["prompt_n"]


async def first_model(client: HttpClient) -> str:
    """The first model that the server lists; "default" if it does not list any."""
    lines: list[bytes] = []
    try:
        await client.get("/v1/models", lines.append)
        models = from_json(b"\n".join(lines))["data"]
        return str(models[0]["id"]) if models else "default"
    except (HttpFailed, OSError, KeyError, TypeError, ValueError):
        return "default"  # if it is not there at all, the calls will tell


@asynccontextmanager
async def http_target(url: str, protocol: str) -> AsyncIterator[HttpTarget]:
    """
    A client of the server at *url*; $OPENAI_API_KEY is sent to it if it is set.

    Args:
        protocol: "openai" or "llama-server".
    """
    key = os.environ.get(API_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with open_client(url, headers) as client:
        yield await target_of(client, protocol)


async def target_of(
    client: HttpClient, protocol: str, forbidden: Iterable[int] = ()
) -> HttpTarget:
    """The target that speaks *protocol* by *client*. Args: see http_target() and OpenAITarget."""
    if protocol == "openai":
        return OpenAITarget(client, await first_model(client), forbidden)
    return LlamaServerTarget(client)


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
