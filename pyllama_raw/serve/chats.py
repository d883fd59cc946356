"""
Chats that are to go on, whatever the form in which a client sends them.

Rules:
1. What an assistant thinks, says and calls in one turn is one message, as the model wrote it:
   so the prompt of the next turn begins as the last one went on.
2. Clients send their history again with each request, so what cannot be used in it is no reason
   to refuse them for ever: a short text stands in for it, as `[image]`, and it is counted. Only
   what the user says now is refused.
3. The positions of tokens that marks in a chat stand for are found by text: a prefix is
   rendered alone and compared with the whole. What both begin with is the same in the next
   prompt, too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple, Self

from pyllama_raw import PyllamaError, SamplingParams
from pyllama_raw.results import Operation
from pyllama_raw.serve import fields
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.body import (
    TextBody,
    effort_variables,
    template_variables,
    thinking_variables,
)
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure, refused
from pyllama_raw.serve.openai.messages import ChatMessage, take_media
from pyllama_raw.serve.service import Found, Service
from pyllama_raw.serve.tools import tool_call

OF_MESSAGES = ("prompt", "content", "role", "chat messages", "images", "sounds")
NAMES = {  # of fields that all chats have, by what the engine calls them
    "tools": "tools",
    "a call that has to be made": "tool_choice",
    "tool_choice": "tool_choice",
    "template_kwargs": "chat_template_kwargs",
}
MAX_MARKS = 4
MAX_NAME = 80  # characters of what a stand-in names
NAMED_BY = (
    "tool_name",
    "name",
    "title",
    "filename",
    "query",
    "url",
)  # fields of blocks
KINDS = {  # that are counted by their name; clients may make up any number of others
    "additional_tools", "audio", "code_interpreter_call", "compaction", "computer_call",
    "computer_call_output", "container_upload", "custom", "document", "file",
    "file_search_call", "image", "image_generation_call", "image_url", "input_audio",
    "input_file", "input_image", "item_reference", "local_shell_call",
    "local_shell_call_output", "mcp", "mcp_call", "mcp_list_tools", "mcp_tool_result",
    "mcp_tool_use", "namespace", "search_result", "server_tool_use", "text",
    "tool_reference", "tool_search_call", "tool_search_output", "web_search",
    "web_search_call", "web_search_tool_result",
}  # fmt: skip
PROBE = {"role": "user", "content": "\N{REPLACEMENT CHARACTER}"}


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
    _pieces: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    """Texts that grow, by message and field; to add each at once would copy the text each time."""
    tools: list[Any] = field(default_factory=list)  # that came among the messages
    left_out: Counter[str] = field(
        default_factory=Counter
    )  # kinds of what has a stand-in

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
        self._grow(message, "reasoning_content", text)

    def write(self, text: str, origin: str) -> None:
        """The assistant says something."""
        self._grow(self._open(origin), "content", text)

    def call(self, call_id: Any, name: Any, arguments: Any, origin: str) -> None:
        """The assistant calls a tool."""
        call = tool_call(call_id, name, arguments)
        self._open(origin).setdefault("tool_calls", []).append(call)

    def stand_in(self, kind: object, block: Any) -> str:
        """A short text for a *block* of the history that cannot be used; it is counted."""
        kind = kind if isinstance(kind, str) else "unknown"
        self.left_out[kind if kind in KINDS else "other"] += 1
        fields = block if isinstance(block, Mapping) else {}
        named = (fields.get(name) for name in NAMED_BY)
        name = next((n for n in named if isinstance(n, str) and n), "")
        words = [" ".join(word.split())[:MAX_NAME] for word in (kind, name)]
        return f"[{': '.join(filter(None, words))}]"

    def mark(self, blocks: Iterable[Mapping[str, Any]]) -> None:
        """If one of the *blocks* says so, all messages until now are worth to be kept."""
        if self.messages and any(block.get("cache_control") for block in blocks):
            self.marks.add(len(self.messages))

    def join(self) -> None:
        """Give messages their whole texts, once all is said."""
        for (at, name), pieces in self._pieces.items():
            message: Any = self.messages[at]
            message[name] = "".join(pieces)

    def _grow(self, message: Any, name: str, text: str) -> None:
        """Add *text* to a field of the last message, which shows whether there is any text."""
        self._pieces.setdefault((len(self.messages) - 1, name), []).append(text)
        message[name] = message.get(name) or text

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


class ConversationBody(TextBody):
    """A chat that is to go on."""

    has_choices: ClassVar[bool] = False  # it may have several outputs
    rules: ClassVar[fields.Rules] = fields.CHATS

    chat_template_kwargs: dict[str, Any] | None = None
    """More variables of the chat template."""
    enable_thinking: bool | None = None
    """Whether the template lets the model think."""
    think: bool | str | None = None
    """Ollama's name of it, or of an effort."""

    @abstractmethod
    def chat(self) -> ChatTurns:
        """The chat. Raises Failure."""

    @abstractmethod
    def calling(self, chat: ChatTurns | None = None) -> dict[str, Any]:
        """Options of the calls of tools, of which *chat* may have some. Raises Failure."""

    @abstractmethod
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""

    def variables_for(
        self, effort: object, *, thinks: bool | None = None, asks: bool | None = None
    ) -> dict[str, Any]:
        """
        Variables of the chat template that all chats have.

        Args:
            effort: that of the dialect, which wins over `think`.
            thinks: whether the dialect lets the model think; None: it does not say.
            asks: whether the template asks for an answer; None: unless one has begun.
        """
        if isinstance(self.think, str):
            effort = effort or self.think
        for named in (self.think, self.enable_thinking):
            thinks = named if thinks is None and isinstance(named, bool) else thinks
        told = effort_variables(effort)
        if thinks is not None:
            told |= thinking_variables(thinks=thinks)
        return template_variables(told | (self.chat_template_kwargs or {}), asks)

    @abstractmethod
    def more(self) -> dict[str, Any]:
        """Fields of SamplingParams that the dialect has other names for."""

    async def asked(self, service: Service) -> Asked:
        """As the engine takes it; raises Failure."""
        found, config = service.find(self.model, Operation.GENERATE), service.config
        if self.n not in (None, 1) and not self.has_choices:
            raise refused("n", "an answer has one output", "unsupported")
        service.check_outputs(found, 1, self.n)
        read = partial(self._read, found, config)
        chat, options, params = await service.bodies.walk(read)
        media, old_media = await take_media(
            chat.messages, chat.places, chat.stand_in, found.engine, config
        )
        service.traffic.left_out.update(chat.left_out)
        asked = Asked(
            found=found,
            prompts=(chat.messages,),
            params=params,
            options=options,
            streams=bool(self.stream),
            names=self.names,
            media=media,
            old_media=old_media,
            origins=chat.origins,
        )
        if points := await _points_of(chat, asked):
            options["cache_points"] = points
        return asked

    def _read(
        self, found: Found, config: ServeConfig
    ) -> tuple[ChatTurns, Any, SamplingParams]:
        """The chat, options of serving it and parameters of its outputs. Raises Failure."""
        chat = self.chat()
        options = self.options(found, config) | self.calling(chat)
        options["template_kwargs"] = self.variables()
        more = self.more()
        options["reply"] = "special" not in more  # else the text stays as it is written
        return chat, options, self.params(found, config, **more)


async def _points_of(chat: ChatTurns, asked: Asked) -> tuple[int, ...]:
    """The end of each marked prefix; none where the cache needs no such places."""
    engine, options = asked.found.engine, asked.of_chat
    if not chat.marks or engine.info.can_cut:
        return ()
    points: set[int] = set()
    try:
        whole = await engine.tokenize(chat.messages, **options)
    except PyllamaError:  # the request itself says what is wrong
        return ()
    variables = options["template_kwargs"] | {"add_generation_prompt": False}
    options["template_kwargs"] = variables
    for mark in sorted(chat.marks)[-MAX_MARKS:]:
        prefix: list[Any] = [*chat.messages[:mark]]
        if prefix[-1]["role"] == "system":  # many templates want a user's message
            prefix.append(PROBE)
        try:
            tokens = await engine.tokenize(prefix, **options)
            pairs = zip(whole, tokens, strict=False)
            same = takewhile(lambda pair: pair[0] == pair[1], pairs)
            points.add(sum(1 for _ in same))
        except PyllamaError:  # the template takes no such chat
            continue
    return tuple(sorted(points - {0}))
