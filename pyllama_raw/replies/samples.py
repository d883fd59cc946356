"""Chats of unusual words, and what a chat template makes of them, for what derives a spec."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

Render = Callable[..., str | None]
"""
`render(messages, tools, add_generation_prompt=..., enable_thinking=...)`: the prompt, or None if
the template refuses.
"""

MAX_CHARACTERS = 2**16  # of a prompt: more is no message of a few words
CONTENT, REASONING = "contentvalue", "reasonvalue"
KEYS = ("alphakey", "betakey")


class Sample(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    text: str
    number: int

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(zip(KEYS, (self.text, self.number), strict=True))

    @property
    def given(self) -> dict[str, Any]:
        """As a message has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


FIRST = Sample("idaaaaaaa", "firsttool", "firstvalue", 4711)
SECOND = Sample("idbbbbbbb", "secondtool", "secondvalue", 815)

_PARAMETERS = {
    "type": "object",
    "properties": {
        KEYS[0]: {"type": "string", "description": "a"},
        KEYS[1]: {"type": "integer", "description": "b"},
    },
    "required": list(KEYS),
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "a", "parameters": _PARAMETERS},
    }
    for name in (FIRST.name, SECOND.name)
]
USER = {"role": "user", "content": "uservalue"}

TAG = re.compile(r"<[^<>]*>|\[/?[A-Z][A-Z_ ]*\]")
PIECE = re.compile(rf"{TAG.pattern}|\w+|\s|.", re.DOTALL)


def pieces(text: str) -> list[str]:
    """*text* in tags, words and single letters: what two texts share ends between two."""
    return PIECE.findall(text)


def common_start(a: str, b: str) -> str:
    return "".join(_shared(pieces(a), pieces(b)))


def common_end(a: str, b: str) -> str:
    return "".join(_shared(pieces(a)[::-1], pieces(b)[::-1])[::-1])


def _shared(a: list[str], b: list[str]) -> list[str]:
    pairs = zip(a, b, strict=False)
    return [left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


class Samples:
    """
    Asks one template, each question once.

    Attributes:
        prompt: the end of the prompt that asks for a reply.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._chats: dict[tuple[str, str, tuple[Sample, ...]], str] = {}
        asked = self._rendered([USER], asks=True) or ""
        self._base = self._rendered([USER]) or asked
        self.prompt = asked[len(common_start(asked, self._base)) :]

    def chat(
        self, content: str = "", reasoning: str = "", calls: tuple[Sample, ...] = ()
    ) -> str:
        """A chat that ends with a message of the assistant; empty if it is refused."""
        key = (content, reasoning, calls)
        if key not in self._chats:
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if reasoning:
                message["reasoning_content"] = reasoning
            if calls:
                message["tool_calls"] = [call.given for call in calls]
            self._chats[key] = self._rendered([USER, message]) or ""
        return self._chats[key]

    def reply(
        self, content: str = "", reasoning: str = "", calls: tuple[Sample, ...] = ()
    ) -> str:
        """The last message of such a chat, with all around it."""
        text = self.chat(content, reasoning, calls)
        return text[len(common_start(text, self._base)) :]

    def _rendered(self, chat: list[Any], asks: bool = False) -> str | None:
        text = self._render(
            chat, TOOLS, add_generation_prompt=asks, enable_thinking=True
        )
        return text if text is not None and len(text) <= MAX_CHARACTERS else None
