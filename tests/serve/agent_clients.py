"""Clients of the dialects for agents, and their streams put together again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import anyio

from pyllama_raw import AsyncEngine
from pyllama_raw.serve import ServeConfig, make_app
from tests.serve.support import LIMIT_S, serving


@asynccontextmanager
async def messaging(
    engine: AsyncEngine, **config: Any
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """A strict client of *engine* as the model "a"."""
    app = make_app({"a": engine}, ServeConfig(**config))
    with anyio.fail_after(LIMIT_S):
        async with serving(app, "asyncio") as url:
            async with anthropic.AsyncAnthropic(
                base_url=url,
                api_key="none",
                max_retries=0,
                _strict_response_validation=True,
                timeout=LIMIT_S,
            ) as client:
                yield client


async def message_events(client: anthropic.AsyncAnthropic, **asked: Any) -> list[Any]:
    """All events of a stream."""
    stream = await client.messages.create(model="a", stream=True, **asked)
    async with stream:
        return [event async for event in stream]


async def response_events(client: Any, **asked: Any) -> list[Any]:
    """All events of a stream."""
    stream = await client.responses.create(model="a", stream=True, **asked)
    async with stream:
        return [event async for event in stream]


def joined_message(events: list[Any]) -> list[tuple[str, ...]]:
    """Blocks of a stream: kind, name and text."""
    blocks: list[list[str]] = []
    for event in events:
        if event.type == "content_block_start":
            block = event.content_block
            blocks.append([block.type, getattr(block, "name", ""), ""])
        elif event.type == "content_block_delta":
            delta = event.delta
            if delta.type != "signature_delta":
                blocks[event.index][2] += (
                    getattr(delta, "text", None)
                    or getattr(delta, "thinking", None)
                    or delta.partial_json
                )
    return [tuple(block) for block in blocks]


def joined_response(events: list[Any]) -> list[tuple[str, ...]]:
    """Items of a stream: kind, name and text, from its deltas."""
    items: list[list[str]] = []
    for event in events:
        if event.type == "response.output_item.added":
            item = event.item
            items.append([item.type, getattr(item, "name", ""), ""])
        elif event.type.endswith(".delta"):
            items[event.output_index][2] += event.delta
    return [tuple(item) for item in items]


def items_of(response: Any) -> list[tuple[str, ...]]:
    """The same of a response at once."""
    return [
        (
            item.type,
            getattr(item, "name", ""),
            item.arguments
            if item.type == "function_call"
            else "".join(part.text for part in item.content),
        )
        for item in response.output
    ]
