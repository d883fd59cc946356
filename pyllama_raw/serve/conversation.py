"""
A chat that a client sends in blocks or items, as the messages that templates know.

What an assistant thinks, says and calls in one turn is one message, as the model wrote it: so
the prompt of the next turn begins as the last one went on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from pyllama_raw.serve.failures import Failure, refused
from pyllama_raw.serve.openai.messages import ChatMessage
from pyllama_raw.serve.tools import tool_call


class PlacedPart(NamedTuple):
    """A part of a message as chats have it, and its place in the body."""

    part: dict[str, Any]
    place: str

    @classmethod
    def of_text(cls, text: str, place: str) -> Self:
        """A text."""
        return cls({"type": "text", "text": text}, place)


@dataclass(eq=False)
class ChatTurns:
    """Messages, with the places that they come from."""

    messages: list[ChatMessage] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # of messages in the body
    places: dict[tuple[int, int], str] = field(default_factory=dict)  # of their parts
    marks: set[int] = field(default_factory=set)  # ends of what is worth to be kept

    def say(
        self, role: str, parts: Iterable[PlacedPart], origin: str, **fields: Any
    ) -> None:
        """Add a message; a text alone stays one."""
        at, listed = len(self.messages), list(parts)
        content: Any = [part for part, _ in listed]
        if len(content) == 1 and content[0]["type"] == "text":
            content = content[0]["text"]
        else:
            self.places |= {(at, j): place for j, (_, place) in enumerate(listed)}
        message: Any = {"role": role, "content": content, **fields}
        self.messages.append(message)
        self.origins.append(origin)

    def think(self, text: str, origin: str) -> None:
        """The assistant thinks before it says or calls something."""
        message = self._open(origin, before=("content", "tool_calls"))
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def write(self, text: str, origin: str) -> None:
        """The assistant says something."""
        message = self._open(origin)
        message["content"] = (message["content"] or "") + text

    def call(self, call_id: Any, name: Any, arguments: Any, origin: str) -> None:
        """The assistant calls a tool."""
        call = tool_call(call_id, name, arguments)
        self._open(origin).setdefault("tool_calls", []).append(call)

    def mark(self, blocks: Iterable[Mapping[str, Any]]) -> None:
        """If one of the *blocks* says so, all messages until now are worth to be kept."""
        if self.messages and any(block.get("cache_control") for block in blocks):
            self.marks.add(len(self.messages))

    def _open(self, origin: str, before: tuple[str, ...] = ()) -> Any:
        """
        The assistant's message at the end; a new one if there is none, or it has more than
        what comes *before* those fields.
        """
        last: Any = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] != "assistant" or any(last.get(name) for name in before):
            self.say("assistant", (), origin)
            last = self.messages[-1]
            last["content"] = ""
        return last


def text_of(block: Mapping[str, Any], name: str, place: str) -> str:
    """The field *name* of a block at *place*. Raises Failure if it is no text."""
    value = block.get(name)
    if not isinstance(value, str):
        raise refused(f"{place}.{name}", "give text")
    return value


def unknown(kind: object, place: str) -> Failure:
    """The mistake of a client that sends something of this *kind*."""
    return refused(place, f"{kind!r} is nothing that is known here", "unsupported")
