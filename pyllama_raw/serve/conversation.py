"""
Chats that are to go on, whatever the form in which a client sends them.

A dialect makes ChatTurns of its body, then a TextRequest of both by chat_request(), in a worker if
the body is large. finish_chat() does what waits for others: images and sounds, and marks.

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

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Annotated, Any, ClassVar, NamedTuple, Required, Self

from pydantic import BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from pyllama_raw import PyllamaError
from pyllama_raw.serve import fields
from pyllama_raw.serve.answer import TextRequest
from pyllama_raw.serve.body import TextBody
from pyllama_raw.serve.failures import Failure, refused
from pyllama_raw.serve.media import ChatMedium, take_media
from pyllama_raw.serve.service import ServedModel, Service

OF_MESSAGES = ("prompt", "content", "role", "chat messages", "images", "sounds")
NAMES = {  # of fields that all chats have, by what the engine calls them
    "tools": "tools",
    "a call that has to be made": "tool_choice",
    "tool_choice": "tool_choice",
    "template_kwargs": "chat_template_kwargs",
}
CHOICES = ("auto", "none", "required")  # of tools, beside a function
RESULTS = ("tool", "function")  # roles of what tools say
TEXTS = ("input_text", "output_text")  # of responses, beside the text of chats
THOUGHTS = ("thinking", "reasoning", "redacted_thinking")  # parts of what is no content
REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of a message
MAX_MARKS = 4
MAX_NAME = 80  # characters of what a stand-in names
NAMED_BY = ("tool_name", "name", "title", "filename", "query", "url")  # of blocks
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
PARTS = KINDS - {"file"} | {*TEXTS, *THOUGHTS}  # a list of files is a usual result
PROBE = {"role": "user", "content": "\N{REPLACEMENT CHARACTER}"}


class ContentPart(TypedDict, total=False):
    """A part of a message, with its content in a field that is named by the type."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    type: Required[str]


class ChatMessage(TypedDict, total=False):
    """A message; further fields reach the template."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: Required[str]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None


def _readable(message: Any) -> Any:
    """
    *message* with its content as text or as parts, where other dialects have other forms of both.
    """
    if not isinstance(message, dict):
        return message
    role, content = message.get("role"), message.get("content")
    # What the assistant has refused to do is what it has said.
    refusal = message.get("refusal")
    if role == "assistant" and not content and isinstance(refusal, str) and refusal:
        return {**message, "content": refusal}
    if content is None or isinstance(content, str):
        return message
    if role in RESULTS:
        return {**message, "content": plain_result(content)}
    # A text alone is a list of one, and a text among parts is a part.
    parts = [content] if _is_text(content) else content
    if isinstance(parts, list):
        parts = [
            {"type": "text", "text": p} if isinstance(p, str) else p for p in parts
        ]
    is_whole = isinstance(parts, list) and all(map(_is_part, parts))
    # What the assistant has said is never refused.
    if role != "assistant":
        return {**message, "content": _as_texts(parts)} if is_whole else message
    if not is_whole:
        return {**message, "content": json.dumps(content, ensure_ascii=False)}
    thoughts = "".join(map(_thought, parts))
    content = [part for part in parts if part["type"] not in THOUGHTS]
    message = {**message, "content": _with_texts(content)}
    if thoughts and not any(message.get(name) for name in REASONING):
        message["reasoning_content"] = thoughts
    return message


def plain_result(content: Any, *, is_typed: bool = False) -> Any:
    """
    The result of a tool as text or as parts of a message.

    Agents send results as the tools give them, and again with each request. So what is neither is
    JSON of its own, also a list of objects that have a type and are no parts.

    Args:
        is_typed: the dialect has a type for each part, so whatever has one is a part of some version.
    """
    if content is None or isinstance(content, str):
        return content
    is_alone = _is_part(content) and _is_known(content)
    parts = [content] if is_alone else content
    is_whole = isinstance(parts, list) and all(map(_is_part, parts))
    if is_whole and (is_typed or not parts or any(map(_is_known, parts))):
        return _with_texts(parts)
    return json.dumps(content, ensure_ascii=False)


def _as_texts(parts: Iterable[Any]) -> list[Any]:
    """*parts* in which all texts have the name that they have in chats."""
    return [{**p, "type": "text"} if p["type"] in TEXTS else p for p in parts]


def _with_texts(parts: Iterable[Any]) -> list[Any]:
    """*parts* of the history, where a text may be nothing."""
    return [
        part | {"text": ""} if _lacks_text(part) else part for part in _as_texts(parts)
    ]


def _is_text(part: object) -> bool:
    """Whether *part* is a text, by the name of any dialect."""
    return (
        isinstance(part, dict)
        and part.get("type") in ("text", *TEXTS)
        and isinstance(part.get("text"), str)
    )


def _is_known(part: Mapping[str, Any]) -> bool:
    """Whether *part* is one of a message, and not only an object that has a type."""
    kind = part["type"]
    return kind in part or kind in PARTS


def _thought(part: Mapping[str, Any]) -> str:
    """The thought that *part* is, which some dialects have in parts again; "" for any other."""
    if part["type"] not in THOUGHTS:
        return ""
    thought = part.get("thinking") or part.get("text") or part.get("reasoning")
    if isinstance(thought, list):
        texts = (inner.get("text") for inner in thought if isinstance(inner, dict))
        return "".join(text for text in texts if isinstance(text, str))
    return thought if isinstance(thought, str) else ""


def _is_part(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _lacks_text(part: Mapping[str, Any]) -> bool:
    return part["type"] == "text" and not isinstance(part.get("text"), str)


SentMessage = Annotated[ChatMessage, BeforeValidator(_readable)]


class ConversationBody(TextBody):
    """The fields of a chat that is to go on, in all dialects."""

    rules: ClassVar[fields.Rules] = fields.CHATS

    chat_template_kwargs: dict[str, Any] | None = None
    """More variables of the chat template."""
    enable_thinking: bool | None = None
    """Whether the template lets the model think."""
    think: bool | str | None = None
    """Ollama's name of it, or of an effort."""


# -- a chat ------------------------------------------------------------------------------


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
    tools: list[Any] = field(default_factory=list)  # that came among the messages
    media: list[ChatMedium] = field(default_factory=list)
    """Parts that are no text, once the chat is in a request."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Kinds of blocks and parts that have a stand-in."""
    _pieces: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    """Texts that grow, by message and field; to add each at once would copy the text each time."""

    def say(
        self, role: str, parts: Iterable[PlacedPart], origin: str, **fields: Any
    ) -> None:
        """Add a message; a text alone stays one."""
        at, placed = len(self.messages), list(parts)
        content: Any = [part for part, _ in placed]
        if len(content) == 1 and content[0]["type"] == "text":
            content = content[0]["text"]
        else:
            self.places |= {(at, j): place for j, (_, place) in enumerate(placed)}
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
        """The assistant calls a tool; a short text stands for a call of no tool."""
        if not isinstance(name, str) or not name:
            self.write(self.stand_in("call", {}), origin)
            return
        if not (arguments is None or isinstance(arguments, str | Mapping)):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call = tool_call(id_of(call_id), name, arguments)
        self._open(origin).setdefault("tool_calls", []).append(call)

    def stand_in(self, kind: object, block: Any) -> str:
        """A short text for a *block* of the history that cannot be used; it is counted."""
        kind = kind if isinstance(kind, str) else "unknown"
        self.left_out[kind if kind in KINDS else "other"] += 1
        fields = block if isinstance(block, Mapping) else {}
        names = (fields.get(name) for name in NAMED_BY)
        name = next((n for n in names if isinstance(n, str) and n), "")
        words = [" ".join(word.split())[:MAX_NAME] for word in (kind, name)]
        return f"[{': '.join(filter(None, words))}]"

    def mark(self, blocks: Iterable[Mapping[str, Any]]) -> None:
        """If one of the *blocks* says so, all messages until now are worth to be kept."""
        if self.messages and any(block.get("cache_control") for block in blocks):
            self.marks.add(len(self.messages))

    def join(self) -> None:
        """Give messages their texts, once all is said."""
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


def id_of(value: object) -> str | None:
    """The id of a call as text; None: it is told from others by its place."""
    is_number = isinstance(value, int | float)
    return value if isinstance(value, str) else str(value) if is_number else None


def text_of(block: Mapping[str, Any], name: str, place: str) -> str:
    """The field *name* of a block at *place*. Raises Failure if it is no text."""
    value = block.get(name)
    if not isinstance(value, str):
        raise refused(f"{place}.{name}", "give text")
    return value


def unknown(kind: object, place: str) -> Failure:
    """The mistake of a client that sends something of this *kind*."""
    return refused(place, f"{kind!r} is nothing that is known here", "unsupported")


# -- its request -------------------------------------------------------------------------


def chat_request(
    body: ConversationBody,
    chat: ChatTurns,
    model: ServedModel,
    service: Service,
    *,
    tools: dict[str, Any],
    variables: dict[str, Any],
    names: Mapping[str, str],
    **sampling: Any,
) -> TextRequest:
    """
    The request of a *chat*. Raises Failure.

    Args:
        tools: options of the calls of tools.
        variables: of the chat template.
        names: of fields of the body, by what the engine calls them; those of forms are added.
        sampling: fields of SamplingParams that the dialect has other names for.
    """
    options = body.options(model, service) | tools
    options["template_kwargs"] = {**service.config.template_kwargs, **variables}
    options["reply"] = "special" not in sampling  # else the text stays as it is written
    names = {**names, **body.form.names}
    params = body.params(model, service, names, **sampling)

    # Behind the last turn of the assistant the user speaks now; all before it is the history.
    messages: Any = chat.messages
    roles = [message["role"] for message in messages]
    n_old = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
    for i, message in enumerate(messages):
        content = message.get("content")
        is_new = i >= n_old and message["role"] == "user"
        for j, part in enumerate(content if isinstance(content, list) else ()):
            place = chat.places.get((i, j), f"messages[{i}].content[{j}]")
            if _lacks_text(part):
                raise refused(f"{place}.text", "give text")
            if part["type"] != "text":
                chat.media.append(ChatMedium(part, place, is_new))

    streams, origins = bool(body.stream), chat.origins
    return TextRequest(
        model, (messages,), params, options, streams, names, origins=origins
    )


async def finish_chat(
    chat: ChatTurns, request: TextRequest, service: Service
) -> TextRequest:
    """*request* with its images and sounds, and its marks as positions. Raises Failure."""
    engine = request.model.engine
    if chat.media:
        media = await take_media(chat.media, chat.stand_in, engine, service.config)
        request.media.extend(medium.place for medium in media)
        request.old_media.extend(None if m.is_new else m.part for m in media)
    service.traffic.left_out.update(chat.left_out)
    # Only a cache that keeps whole states needs to know places that are worth one.
    needs_points = chat.marks and not engine.info.can_cut
    if needs_points and (points := await _points_of(chat, request)):
        request.options["cache_points"] = points
    return request


async def _points_of(chat: ChatTurns, request: TextRequest) -> tuple[int, ...]:
    """The end of each marked prefix, in tokens."""
    engine, options = request.model.engine, request.of_chat
    points: set[int] = set()
    try:
        prompt = await engine.tokenize(chat.messages, **options)
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
            pairs = zip(prompt, tokens, strict=False)
            same = takewhile(lambda pair: pair[0] == pair[1], pairs)
            points.add(sum(1 for _ in same))
        except PyllamaError:  # the template takes no such chat
            continue
    return tuple(sorted(points - {0}))


# -- variables of its template -----------------------------------------------------------


def chat_variables(
    body: ConversationBody,
    effort: object,
    *,
    thinks: bool | None = None,
    asks: bool | None = None,
) -> dict[str, Any]:
    """
    Variables of the chat template.

    Args:
        effort: that of the dialect, which wins over `think`. "none" also asks for no thoughts.
        thinks: whether the dialect lets the model think; None: it does not say.
        asks: whether the template asks for an answer; None: unless one has begun.
    """
    if isinstance(body.think, str):
        effort = effort or body.think
    for flag in (body.think, body.enable_thinking):
        thinks = flag if thinks is None and isinstance(flag, bool) else thinks
    if thinks is None and effort == "none":
        thinks = False
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if thinks is not None:  # templates know it by two names
        variables |= {"enable_thinking": thinks, "thinking": thinks}
    return template_variables(variables | (body.chat_template_kwargs or {}), asks)


def template_variables(
    variables: dict[str, Any] | None, asks: bool | None
) -> dict[str, Any]:
    """
    *variables* of a chat template, and the day, by the names of llama.cpp's server.

    Args:
        asks: whether it asks for an answer; None: unless one has begun.

    The time of day is not told, because each prompt would begin otherwise than the one before.
    """
    today = datetime.now().astimezone()
    usual: dict[str, Any] = {
        "date_string": f"{today:%d %b %Y}",
        "datetime": f"{today:%b %d %Y}",
    }
    if asks is not None:
        usual["add_generation_prompt"] = asks
    return usual | (variables or {})


# -- its tools ---------------------------------------------------------------------------


def tool_options(
    tools: Sequence[Mapping[str, Any]] | None, choice: object, is_parallel: bool | None
) -> dict[str, Any]:
    """
    Options of a chat that may call *tools*.

    Chats have the fields of a function in an object of their own, and responses beside its type.
    Both are read here.

    Args:
        choice: a word, a function that must be called, or those that may be; the model is told
            of no others.

    Raises:
        Failure: a tool is no function, or *choice* is none.
    """
    tools = tools or ()
    for i, tool in enumerate(tools):
        if name_of(tool) is None:
            place = f"tools[{i}]"
            raise refused(place, 'give {"type": "function", "function": {"name": ...}}')
    tools = [*map(_as_printed, tools)]
    # Some of the tools are allowed: there are no others then, and the choice is a word.
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = _inner(choice)
        listed = allowed.get("tools")
        names = {name_of(tool) for tool in (listed if isinstance(listed, list) else ())}
        tools = [tool for tool in tools if name_of(tool) in names]
        choice = allowed.get("mode", "auto")
        if not tools:
            raise refused("tool_choice", "none of tools is allowed")
    # Some dialects have a word as an object, and one of their own for "required".
    if isinstance(choice, Mapping) and choice.get("type") in (*CHOICES, "any"):
        choice = choice["type"]
    choice = "required" if choice == "any" else choice
    # A word, or the name of the function that must be called. The engine has one word for both.
    if choice is None or choice in CHOICES:
        word = str(choice or "auto")
    else:
        name = name_of(choice)
        if name is None:
            words = ", ".join(CHOICES)
            raise refused("tool_choice", f"give {words}, a function, or allowed_tools")
        if name in CHOICES:
            raise refused("tool_choice", f"a function named {name} cannot be chosen")
        word = name
    if not tools and word not in ("auto", "none"):
        raise refused("tool_choice", f"{word!r} needs tools, and there are none")
    options: dict[str, Any] = {"tools": list(tools)} if tools else {}
    if word != "auto":
        options["tool_choice"] = word
    if tools and is_parallel is False and word != "none":
        options["parallel_tool_calls"] = False
    return options


def _as_printed(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """
    A *tool* with its fields where templates look for them, and with parameters.

    Many templates read the properties of all parameters, also of a function that has none.
    """
    inner = _inner(tool)
    parameters = inner.get("parameters") or inner.get("input_schema")
    if inner is not tool and inner.get("parameters") is not None:
        return tool
    apart = ("type", "parameters", "input_schema", "cache_control")
    fields = {
        name: value
        for name, value in inner.items()
        if name not in apart and value is not None
    }
    fields["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": fields}


def function_tool(
    tool: Mapping[str, Any], parameters: object, **fields: Any
) -> dict[str, Any]:
    """A *tool* of a dialect as chat templates know it."""
    schema = parameters or {"type": "object", "properties": {}}
    function = {"name": tool.get("name"), "parameters": schema, **fields}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def tool_call(call_id: object, name: object, arguments: object) -> dict[str, Any]:
    """A call as messages of chats have it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def name_of(tool: object) -> str | None:
    """The name of a function; None if *tool* is none."""
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        return None
    name = _inner(tool).get("name")
    return name if isinstance(name, str) and name else None


def _inner(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields that go with the type of *value*."""
    inner = value.get(str(value.get("type", "function")), value)
    return inner if isinstance(inner, Mapping) else {}
