"""Replies to chats in OpenAI's words: content, reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyllama_raw import Delta, Result
from pyllama_raw.replies.parts import CallDelta, Content


def told_of(delta: Delta, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """
    Objects `delta` of a stream, one for each part.

    The name of a call comes once and before its arguments, because clients add texts up.

    Args:
        names: of fields that have the reasoning.
    """
    if not delta.parts and delta.text:  # it is not taken apart
        yield {"content": delta.text}
    for part in delta.parts:
        if not isinstance(part, CallDelta):
            is_content = isinstance(part, Content)
            yield dict.fromkeys(("content",) if is_content else names, part.text)
            continue
        if part.name is not None:
            function = {"name": part.name, "arguments": ""}
            begun = {"id": part.id, "type": "function", "function": function}
            yield {"tool_calls": [{"index": part.index, **begun}]}
        if part.arguments:
            more = {"index": part.index, "function": {"arguments": part.arguments}}
            yield {"tool_calls": [more]}


def message_of(result: Result, names: Sequence[str]) -> dict[str, Any]:
    """The whole message; *names* are those of fields that have the reasoning."""
    told: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    if result.reasoning:
        told |= dict.fromkeys(names, result.reasoning)
    told["content"] += result.text
    if result.tool_calls:
        told["content"] = told["content"] or None
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in result.tool_calls
        ]
    return told
