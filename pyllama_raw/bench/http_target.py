"""
Servers, by streaming HTTP: OpenAI's completions, and llama-server's own protocol.

Each call has a connection of its own, since servers drop idle ones. The client is
aiohttp's, which needs little CPU time for each event: what the client takes, a server on
the same machine lacks. So this is for asyncio.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from pydantic_core import from_json

from pyllama_raw.bench.call import CallFailed, Record, Target

TIMEOUT_S = 600.0  # without a byte
API_KEY = "OPENAI_API_KEY"


class HttpTarget(ABC):
    """What both protocols have in common."""

    path: str

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self._client = client
        self._url = url + self.path

    @abstractmethod
    def body(self, record: Record) -> dict[str, Any]:
        """What is posted."""

    @abstractmethod
    def take(self, record: Record, event: dict[str, Any]) -> None:
        """Write what *event* brings into *record*."""

    async def send(self, record: Record) -> None:
        body = self.body(record)
        failed = None
        try:
            async with self._client.post(self._url, json=body) as answer:
                if not answer.ok:
                    text = (await answer.read()).decode(errors="replace")
                    raise CallFailed(f"status {answer.status}: {text[:200]}")
                async for event in _events(answer):
                    if "error" in event:
                        failed = str(event["error"])  # the last event of its stream
                    else:
                        self.take(record, event)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CallFailed(f"{type(error).__name__}: {error}") from error
        if failed is not None:
            raise CallFailed(failed)
        record.check_length()


class OpenAITarget(HttpTarget):
    """
    /v1/completions. A chunk counts as one token until the usage at the end says how many
    there were.
    """

    path = "/v1/completions"

    def __init__(
        self,
        client: aiohttp.ClientSession,
        url: str,
        model: str = "default",  # most servers have one, and take any name
        forbidden: Iterable[int] = (),
    ) -> None:
        """
        Args:
            forbidden: tokens that end the generation, for servers that do not know
                ignore_eos.
        """
        super().__init__(client, url)
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

    def take(self, record: Record, event: dict[str, Any]) -> None:
        for choice in event.get("choices", ()):
            # The last chunk may only say why it is the last.
            if choice.get("text") or not choice.get("finish_reason"):
                record.take(1, choice.get("text") or "")
        if usage := event.get("usage"):
            record.n_output = usage["completion_tokens"]
            record.n_prompt = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            record.n_cached = details.get("cached_tokens", record.n_cached)
        if "queue_s" in event:  # only our adapter in benchmarks/ has it
            record.queue_s = event["queue_s"]


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

    def take(self, record: Record, event: dict[str, Any]) -> None:
        if event["tokens"]:
            record.take(len(event["tokens"]), event["content"], event["tokens"])
        if event["stop"]:
            timings = event["timings"]
            record.n_cached = timings["cache_n"]
            record.n_prompt = timings["cache_n"] + timings["prompt_n"]


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of a stream of server-sent events."""
    rest = b""
    async for part in answer.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield from_json(line[6:])
            elif line.startswith(b"error:"):
                yield {"error": line.decode(errors="replace")}


async def first_model(client: aiohttp.ClientSession, url: str) -> str:
    """What the server calls its first model; "default" if it does not list any."""
    try:
        async with client.get(url + "/v1/models") as answer:
            models = from_json(await answer.read())["data"] if answer.ok else []
        return str(models[0]["id"]) if models else "default"
    except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError):
        return "default"  # if it is not there at all, the calls will tell


@asynccontextmanager
async def http_target(
    url: str, protocol: str = "llama-server", forbidden: Iterable[int] = ()
) -> AsyncIterator[Target]:
    """
    A client of the server at *url*; $OPENAI_API_KEY is sent to it if it is set.

    Args:
        url: without a slash at its end.
        protocol: "openai" or "llama-server".
        forbidden: see OpenAITarget.
    """
    key = os.environ.get(API_KEY)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=aiohttp.ClientTimeout(sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S),
    ) as client:
        if protocol == "openai":
            model = await first_model(client, url)
            yield OpenAITarget(client, url, model, forbidden)
        else:
            yield LlamaServerTarget(client, url)
