"""
Items of responses, as the messages that templates know.

Rules:
1. Calls of tools that have no schema, which another server allowed, have their text as input.
2. Thoughts that are hidden from us have nothing to tell the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from pyllama_raw.serve.chats import ChatTurns, PlacedPart, text_of, unknown
from pyllama_raw.serve.failures import refused

TEXTS = {"input_text": "text", "output_text": "text", "text": "text"}
TEXTS |= {"refusal": "refusal", "summary_text": "text", "reasoning_text": "text"}


class InputItem(TypedDict, total=False):
    """A message, a call, the result of one, or what was thought."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    type: str
    role: str


ItemList = Annotated[list[InputItem], Field(fail_fast=True)]


def conversation_of(instructions: str | None, given: str | ItemList) -> ChatTurns:
    """The chat. Raises Failure."""
    chat = ChatTurns()
    if instructions:
        chat.say("system", _parts(instructions, "instructions"), "instructions")
    if isinstance(given, str):
        chat.say("user", _parts(given, "input"), "input")
        return chat
    for i, item in enumerate(given):
        _add(chat, item, f"input[{i}]")
    chat.join()
    return chat


def _add(chat: ChatTurns, item: Any, place: str) -> None:
    """One item. Raises Failure."""
    match item.get("type", "message"):
        case "message":
            _message(chat, item, place)
        case "reasoning":
            thought = item.get("content") or item.get("summary") or ()
            text = _joined(thought, f"{place}.content")
            if text:
                chat.think(text, place)
        case "function_call":
            given = item.get("arguments")
            chat.call(item.get("call_id"), item.get("name"), given, place)
        case "custom_tool_call":
            given = {"input": item.get("input")}
            chat.call(item.get("call_id"), item.get("name"), given, place)
        case "function_call_output" | "custom_tool_call_output":
            parts = _parts(item.get("output") or "", f"{place}.output")
            chat.say("tool", parts, place, tool_call_id=item.get("call_id"))
        case kind:
            raise unknown(kind, place)


def _message(chat: ChatTurns, item: Any, place: str) -> None:
    role, content = item.get("role"), item.get("content") or ""
    if not isinstance(role, str):
        raise refused(f"{place}.role", "give user, assistant, system or developer")
    if role == "assistant":
        chat.write(_joined(content, f"{place}.content"), place)
    else:
        chat.say(role, _parts(content, f"{place}.content"), place)


def _joined(content: Any, place: str) -> str:
    """A text of several parts. Raises Failure."""
    texts = [part.get("text") for part, _ in _parts(content, place)]
    if None in texts:
        raise refused(place, "give texts only")
    return "".join(str(text) for text in texts)


def _parts(content: str | Sequence[Any], place: str) -> Iterator[PlacedPart]:
    """Texts, images and sounds. Raises Failure."""
    if isinstance(content, str):
        yield PlacedPart.of_text(content, place)
        return
    if not isinstance(content, list | tuple):
        raise refused(place, "give text or a list of parts")
    for i, part in enumerate(content):
        at = f"{place}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        yield PlacedPart(_part(part, kind, at), at)


def _part(part: Any, kind: object, place: str) -> dict[str, Any]:
    if isinstance(kind, str) and kind in TEXTS:
        return {"type": "text", "text": text_of(part, TEXTS[kind], place)}
    if kind == "input_image" and part.get("file_id") is None:
        return {"type": "image_url", "image_url": part.get("image_url")}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    raise unknown(kind, place)
