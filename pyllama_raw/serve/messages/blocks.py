"""
Blocks of messages, as the messages that templates know.

Rules:
1. Results of tools come before what the user says with them, as calls are followed by results.
2. Thoughts that are hidden from us have nothing to tell the model.
3. The line that Claude Code puts in front of its system prompt for its bills changes each time.
   The model gets a constant instead, because all that follows would be computed again.
4. A short text stands in for a block of the history that is not known or cannot be used, because
   clients send it again with each request. In what the user says now it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Required

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from pyllama_raw.serve.chats import ChatTurns, PlacedPart, text_of, unknown
from pyllama_raw.serve.failures import Failure, refused

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
        parts = [_unbilled(part) for part in _parts(blocks, "system", chat)]
        chat.say("system", parts, "system")
        chat.mark(blocks)
    roles = [message["role"] for message in messages]
    n_old = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
    for i, message in enumerate(messages):
        place, blocks = f"messages[{i}]", _listed(message["content"])
        if message["role"] == "assistant":
            _write(chat, blocks, place)
        else:
            is_new = i >= n_old and message["role"] == "user"
            _say(chat, message["role"], blocks, place, is_new=is_new)
        chat.mark(blocks)
    chat.join()
    return chat


def _listed(content: str | BlockList) -> BlockList:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _unbilled(placed: PlacedPart) -> PlacedPart:
    if placed.part["type"] != "text":
        return placed
    return PlacedPart.of_text(BILLING.sub(BILLED, placed.part["text"]), placed.place)


def _say(
    chat: ChatTurns, role: str, blocks: BlockList, place: str, *, is_new: bool
) -> None:
    """What a user says, after the results that come with it; *is_new*: now."""
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            _result(chat, block, f"{place}.content[{i}]")
    if not blocks or any(block["type"] != "tool_result" for block in blocks):
        old = None if is_new else chat
        chat.say(role, _parts(blocks, f"{place}.content", old), place)


def _result(chat: ChatTurns, block: Any, place: str) -> None:
    content = block.get("content") or ""
    if not isinstance(content, str | list):
        raise refused(f"{place}.content", "give text or a list of blocks")
    parts = list(_parts(_listed(content), f"{place}.content", chat))
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
        match fields:
            case {"type": "text", "text": str(text)}:
                chat.write(text, place)
            case {"type": "thinking", "thinking": str(text)}:
                chat.think(text, place)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use"}:
                name, given = fields.get("name"), fields.get("input")
                chat.call(fields.get("id"), name, given, at)
            case _:
                chat.write(chat.stand_in(fields["type"], fields), place)


def _parts(
    blocks: Sequence[Any], place: str, old: ChatTurns | None = None
) -> Iterator[PlacedPart]:
    """
    Texts and images. Raises Failure.

    Args:
        old: the chat, if *blocks* are of its history: short texts stand in for others.
    """
    for i, block in enumerate(blocks):
        at = f"{place}[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":  # it is a message of its own
            continue
        try:
            part = PlacedPart(_part(block, kind, at), at)
        except Failure:
            if old is None:
                raise
            part = PlacedPart.of_text(old.stand_in(kind, block), at)
        yield part


def _part(block: Any, kind: object, at: str) -> dict[str, Any]:
    match kind:
        case "text":
            text = text_of(block, "text", at)
        case "document":
            text = text_of(_source(block, "text", at), "data", at)
        case "search_result":  # its content is texts, and nothing that has parts again
            inner = block.get("content")
            if not isinstance(inner, list):
                raise refused(f"{at}.content", "give a list of texts")
            text = "\n".join(
                _text(part, f"{at}.content[{j}]") for j, part in enumerate(inner)
            )
        case "image":
            return _image(block, at)
        case _:
            raise unknown(kind, at)
    return {"type": "text", "text": text}


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
