"""
Items of responses, as the messages that templates know.

Rules:
1. Calls of tools that have no schema, which another server allowed, have their text as input.
2. Thoughts that are hidden from us have nothing to tell the model.
3. Clients send items that are not known here with each request, because an earlier server made
   them, so a short text stands in for one. A part of what the user says now is refused.
4. Functions may come in an item `additional_tools`; they join the `tools` of the body.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from pyllama_raw.serve.chats import ChatTurns, PlacedPart, text_of, unknown
from pyllama_raw.serve.failures import Failure, refused

AT_END = ("message", "additional_tools")  # items that may follow what the user says now
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
    at_end = True  # no turn of the assistant comes later
    new = set()
    for i in reversed(range(len(given))):
        at_end = at_end and given[i].get("type", "message") in AT_END
        at_end = at_end and given[i].get("role") != "assistant"
        if at_end and given[i].get("role") == "user":
            new.add(i)
    first: Failure | None = None
    n_failed = 0
    for i, item in enumerate(given):
        try:
            _add(chat, item, f"input[{i}]", is_new=i in new)
        except Failure as failure:
            first, n_failed = first or failure, n_failed + 1
            if i in new:
                raise
            if n_failed == len(given):  # nothing else is said
                raise first from None
            _stand_in(chat, item, f"input[{i}]")
    if not any(message["role"] != "system" for message in chat.messages):
        chat.say("user", _parts("", "input"), "input")
    chat.join()
    return chat


def _add(chat: ChatTurns, item: Any, place: str, *, is_new: bool) -> None:
    """One item; *is_new*: the user says it now. Raises Failure."""
    old = None if is_new else chat
    match item.get("type", "message"):
        case "message":
            _message(chat, item, place, old)
        case "reasoning":
            thought = item.get("content") or item.get("summary") or ()
            text = _joined(thought, f"{place}.content", old)
            if text:
                chat.think(text, place)
        case "additional_tools":
            tools = item.get("tools")
            chat.tools += tools if isinstance(tools, list) else ()
        case "function_call":
            given = item.get("arguments")
            chat.call(item.get("call_id"), item.get("name"), given, place)
        case "custom_tool_call":
            given = {"input": item.get("input")}
            chat.call(item.get("call_id"), item.get("name"), given, place)
        case "function_call_output" | "custom_tool_call_output":
            parts = _parts(item.get("output") or "", f"{place}.output", chat)
            chat.say("tool", parts, place, tool_call_id=item.get("call_id"))
        case kind:
            raise unknown(kind, place)


def _stand_in(chat: ChatTurns, item: Any, place: str) -> None:
    """A short text for an item, said by the side that it is likely from."""
    kind = item.get("type", "message")
    text = chat.stand_in(kind, item)
    if item.get("role") == "assistant" or str(kind).endswith(("_call", "_tools")):
        chat.write(text, place)
    else:
        chat.say("user", [PlacedPart.of_text(text, place)], place)


def _message(chat: ChatTurns, item: Any, place: str, old: ChatTurns | None) -> None:
    role, content = item.get("role"), item.get("content") or ""
    if not isinstance(role, str):
        raise refused(f"{place}.role", "give user, assistant, system or developer")
    if role == "assistant":
        chat.write(_joined(content, f"{place}.content", old), place)
    else:
        chat.say(role, _parts(content, f"{place}.content", old), place)


def _joined(content: Any, place: str, old: ChatTurns | None) -> str:
    """A text of several parts. Raises Failure."""
    texts = [part.get("text") for part, _ in _parts(content, place, old)]
    if None in texts:
        raise refused(place, "give texts only")
    return "".join(str(text) for text in texts)


def _parts(
    content: str | Sequence[Any], place: str, old: ChatTurns | None = None
) -> Iterator[PlacedPart]:
    """
    Texts, images and sounds. Raises Failure.

    Args:
        old: the chat, if *content* is of its history: short texts stand in for other parts.
    """
    if isinstance(content, str):
        yield PlacedPart.of_text(content, place)
        return
    if not isinstance(content, list | tuple):
        raise refused(place, "give text or a list of parts")
    for i, part in enumerate(content):
        at = f"{place}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        try:
            yield PlacedPart(_part(part, kind, at), at)
        except Failure:
            if old is None:
                raise
            yield PlacedPart.of_text(old.stand_in(kind, part), at)


def _part(part: Any, kind: object, place: str) -> dict[str, Any]:
    if isinstance(kind, str) and kind in TEXTS:
        return {"type": "text", "text": text_of(part, TEXTS[kind], place)}
    if kind == "input_image" and part.get("file_id") is None:
        return {"type": "image_url", "image_url": part.get("image_url")}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    raise unknown(kind, place)
