"""OpenAI's client at a server of one engine, and streams put together again."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import openai

from pyllama_raw import AsyncEngine
from pyllama_raw.serve import ServeConfig, make_app
from tests.serve.support import LIMIT_S, serving


@asynccontextmanager
async def talking(
    engine: AsyncEngine, *, strict: bool = True, **config: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    """
    A client of *engine* as the model "a".

    Args:
        strict: every answer is checked against the client's types.
    """
    app = make_app({"a": engine}, ServeConfig(**config))
    with anyio.fail_after(LIMIT_S):
        async with serving(app, "asyncio") as url:
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1",
                api_key="none",
                max_retries=0,
                _strict_response_validation=strict,
                timeout=LIMIT_S,
            ) as client:
                yield client


async def chat_chunks(
    client: openai.AsyncOpenAI, chunks: list[Any], **fields: Any
) -> list[Any]:
    """*chunks*, where a stream adds its own."""
    stream = await client.chat.completions.create(model="a", stream=True, **fields)
    async with stream:
        async for chunk in stream:
            chunks.append(chunk)  # noqa: PERF401 - an error leaves those before it
    return chunks


async def completion_chunks(client: openai.AsyncOpenAI, **fields: Any) -> list[Any]:
    """All of a stream."""
    stream = await client.completions.create(model="a", stream=True, **fields)
    async with stream:
        return [chunk async for chunk in stream]


def joined_chat(chunks: list[Any]) -> dict[int, tuple[str, Any, list[Any]]]:
    """Text, reason and log-probabilities of each choice of a stream."""
    choices: dict[int, tuple[str, Any, list[Any]]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        text, reason, logprobs = choices.get(choice.index, ("", None, []))
        listed = choice.logprobs.content if choice.logprobs else []
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        choices[choice.index] = (text, reason, logprobs + listed)
    return choices


def whole_chat(answer: Any) -> dict[int, tuple[str, Any, list[Any]]]:
    """The same of an answer at once."""
    return {
        choice.index: (
            choice.message.content,
            choice.finish_reason,
            choice.logprobs.content if choice.logprobs else [],
        )
        for choice in answer.choices
    }


def joined_completion(chunks: list[Any]) -> dict[int, list[Any]]:
    """Text, reason and the four lists of each choice of a stream, or of an answer at once."""
    choices: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        parts = choices.setdefault(choice.index, ["", None, [], [], [], []])
        parts[0] += choice.text
        parts[1] = choice.finish_reason or parts[1]
        if listed := choice.logprobs:
            parts[2] += listed.tokens
            parts[3] += listed.token_logprobs
            parts[4] += listed.top_logprobs
            parts[5] += listed.text_offset
    return choices
