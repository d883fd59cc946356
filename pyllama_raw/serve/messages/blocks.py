"""
Blocks of messages, as the messages that templates know.

Rules:
1. Results of tools come before what the user says with them, as calls are followed by results.
2. Thoughts that are hidden from us have nothing to tell the model.
3. The line that Claude Code puts in front of its system prompt for its bills changes each time.
   The model gets a constant instead, because all that follows would be computed again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Required

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from pyllama_raw.serve.chats import ChatTurns, PlacedPart, text_of, unknown
from pyllama_raw.serve.failures import refused

BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*")
BILLED = "x-anthropic-billing-header:"
ERROR = "Error: "  # before the result of a tool that failed


class MessageBlock(TypedDict, total=False):
    """A part of a message; its fields depend on its type."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    type: Required[str]
    text: str
    cache_control: dict[str, Any] | None


BlockList = Annotated[list[MessageBlock], Field(fail_fast=True)]


class MessageTurn(TypedDict):
    """What one side says."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: Literal["user", "assistant", "system"]
    content: str | BlockList


def conversation_of(
    system: str | BlockList | None, messages: Sequence[MessageTurn]
) -> ChatTurns:
    """The chat, with marks of what is worth to be kept. Raises Failure."""
    chat = ChatTurns()
    if system:
        blocks = _listed(system)
        parts = [_unbilled(part) for part in _parts(blocks, "system")]
        chat.say("system", parts, "system")
        chat.mark(blocks)
    for i, message in enumerate(messages):
        place, blocks = f"messages[{i}]", _listed(message["content"])
        if message["role"] == "assistant":
            _write(chat, blocks, place)
        else:
            _say(chat, message["role"], blocks, place)
        chat.mark(blocks)
    chat.join()
    return chat


def _listed(content: str | BlockList) -> BlockList:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _unbilled(placed: PlacedPart) -> PlacedPart:
    if placed.part["type"] != "text":
        return placed
    return PlacedPart.of_text(BILLING.sub(BILLED, placed.part["text"]), placed.place)


def _say(chat: ChatTurns, role: str, blocks: BlockList, place: str) -> None:
    """What a user says, after the results that come with it."""
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            _result(chat, block, f"{place}.content[{i}]")
    if not blocks or any(block["type"] != "tool_result" for block in blocks):
        chat.say(role, _parts(blocks, f"{place}.content"), place)


def _result(chat: ChatTurns, block: Any, place: str) -> None:
    content = block.get("content") or ""
    if not isinstance(content, str | list):
        raise refused(f"{place}.content", "give text or a list of blocks")
    parts = list(_parts(_listed(content), f"{place}.content"))
    if block.get("is_error"):
        parts.insert(0, PlacedPart.of_text(ERROR, place))
    if all(part["type"] == "text" for part, _ in parts):
        text = "".join(part["text"] for part, _ in parts)
        parts = [PlacedPart.of_text(text, place)]
    chat.say("tool", parts, place, tool_call_id=block.get("tool_use_id"))


def _write(chat: ChatTurns, blocks: BlockList, place: str) -> None:
    """What the assistant thinks, says and calls."""
    if not blocks:
        chat.write("", place)
    for i, block in enumerate(blocks):
        fields: Any = block
        at = f"{place}.content[{i}]"
        match block["type"]:
            case "text":
                chat.write(text_of(fields, "text", at), place)
            case "thinking":
                chat.think(text_of(fields, "thinking", at), place)
            case "redacted_thinking":
                pass
            case "tool_use":
                name, given = fields.get("name"), fields.get("input")
                chat.call(fields.get("id"), name, given, at)
            case other:
                raise unknown(other, at)


def _parts(blocks: Sequence[Any], place: str) -> Iterator[PlacedPart]:
    """Texts and images. Raises Failure."""
    for i, block in enumerate(blocks):
        at = f"{place}[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        match kind:
            case "text":
                text = text_of(block, "text", at)
            case "document":
                text = text_of(_source(block, "text", at), "data", at)
            case (
                "search_result"
            ):  # its content is texts, and nothing that has parts again
                inner = block.get("content")
                if not isinstance(inner, list):
                    raise refused(f"{at}.content", "give a list of texts")
                text = "\n".join(
                    _text(part, f"{at}.content[{j}]") for j, part in enumerate(inner)
                )
            case "image":
                yield PlacedPart(_image(block, at), at)
                continue
            case "tool_result":  # it is a message of its own
                continue
            case _:
                raise unknown(kind, at)
        yield PlacedPart.of_text(text, at)


def _text(block: Any, place: str) -> str:
    """The text of a block that is nothing else. Raises Failure."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise unknown(kind, place)
    return text_of(block, "text", place)


def _image(block: Any, place: str) -> dict[str, Any]:
    source = _source(block, None, place)
    if source.get("type") == "url":
        url = text_of(source, "url", place)
    else:
        kind = source.get("media_type", "image/png")
        url = f"data:{kind};base64,{text_of(source, 'data', place)}"
    return {"type": "image_url", "image_url": {"url": url}}


def _source(block: Any, kind: str | None, place: str) -> Any:
    source = block.get("source")
    if not isinstance(source, dict) or kind not in (None, source.get("type")):
        allowed = f"a source of type {kind or 'base64 or url'}"
        raise refused(f"{place}.source", f"give {allowed}", "unsupported")
    return source
