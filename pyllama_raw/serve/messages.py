"""
Anthropic's Messages API: `/v1/messages`. Messages are made of blocks.

In: MessagesBody. Meaning: read(). Out: MessagesCodec.

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
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Required
from uuid import uuid4

from fastapi import FastAPI
from pydantic import ConfigDict, Field
from pydantic_core import from_json
from starlette.responses import Response
from typing_extensions import TypedDict

from pyllama_raw import Delta, FinishReason, Result
from pyllama_raw.replies.parser import Content, Reasoning
from pyllama_raw.results import Operation, StopString
from pyllama_raw.serve import fields
from pyllama_raw.serve.answer import (
    STREAMED,
    Block,
    Blocks,
    TextAnswer,
    TextRequest,
    named_event,
)
from pyllama_raw.serve.body import Items
from pyllama_raw.serve.conversation import (
    NAMES,
    OF_MESSAGES,
    ChatTurns,
    ConversationBody,
    PlacedPart,
    chat_request,
    chat_variables,
    finish_chat,
    function_tool,
    id_of,
    plain_result,
    text_of,
    tool_options,
    unknown,
)
from pyllama_raw.serve.failures import JSON, Failure, refused
from pyllama_raw.serve.service import ServedModel, Service

BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*")
BILLED = "x-anthropic-billing-header:"
ERROR = "Error: "  # before the result of a tool that failed
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SIGNATURE = "unsigned"  # of thoughts; clients give it back with them


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    @app.post("/v1/messages", tags=["messages"], responses=STREAMED)
    async def messages(body: MessagesBody) -> Response:
        """Go on with a chat of messages that are made of blocks."""
        request = await read(body, service)
        return TextAnswer(service, request, MessagesCodec(request))

    @app.post("/v1/messages/count_tokens", tags=["messages"])
    async def message_tokens(body: MessagesBody) -> Response:
        """Count the tokens that a chat has as a prompt."""
        n_tokens = await (await read(body, service)).count()
        return JSON({"input_tokens": n_tokens})


# -- in ----------------------------------------------------------------------------------


class MessageBlock(TypedDict, total=False):
    """A part of a message; its fields depend on its type."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    type: Required[str]
    text: str | None
    cache_control: Any


BlockList = Annotated[list[MessageBlock], Field(fail_fast=True)]


class MessageTurn(TypedDict):
    """What one side says."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: Literal["user", "assistant", "system"]
    content: str | BlockList | None


class MessageToolChoice(TypedDict, total=False):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str
    disable_parallel_tool_use: bool


class MessagesBody(ConversationBody):
    """A chat of messages that are made of blocks."""

    rules: ClassVar[fields.Rules] = fields.MESSAGES

    messages: Annotated[list[MessageTurn], Field(min_length=1, fail_fast=True)]
    """Messages; an answer that has begun may be the last one, and goes on."""
    system: str | BlockList | None = None
    """What the model is told before the first message."""
    stop_sequences: Items[str] | None = None
    """Texts that end the answer."""
    tools: Items[dict[str, Any]] | None = None
    """Tools that the client runs; those that a server would run are left out."""
    tool_choice: MessageToolChoice | None = None
    """Whether tools are called: "auto", "any", "none", or "tool" with the name of one."""
    thinking: dict[str, Any] | None = None
    """Whether the template lets the model think: "disabled", or any other type."""
    output_config: dict[str, Any] | None = None
    """The form of the text, and the effort that the template is told."""
    output_format: dict[str, Any] | None = None
    """The form of the text, as clients of a beta name it."""


# -- meaning -----------------------------------------------------------------------------


async def read(body: MessagesBody, service: Service) -> TextRequest:
    """The request of *body*. Raises Failure and Unsupported."""
    model = service.find(body.model, Operation.GENERATE)
    if body.n not in (None, 1):
        raise refused("n", "an answer has one output", "unsupported")
    if body.n_probs:
        raise refused("n_probs", fields.UNTOLD, "unsupported")
    reading = partial(_read, body, model, service)
    return await finish_chat(*await service.read_body(reading), service)


def _read(
    body: MessagesBody, model: ServedModel, service: Service
) -> tuple[ChatTurns, TextRequest]:
    """The chat of *body*, and its request but for images and sounds."""
    chat = ChatTurns()
    # The system prompt is a message of its own. Bills in it are a constant.
    if body.system:
        blocks = _listed(body.system)
        parts = []
        for part, place in _parts(blocks, "system", chat):
            if part["type"] == "text":
                part["text"] = BILLING.sub(BILLED, part["text"])
            parts.append(PlacedPart(part, place))
        chat.say("system", parts, "system")
        chat.mark(blocks)
    # Behind the last turn of the assistant the user speaks now; all before it is the history.
    roles = [message["role"] for message in body.messages]
    n_old = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
    for i, message in enumerate(body.messages):
        place, blocks = f"messages[{i}]", _listed(message["content"])
        if message["role"] == "assistant":
            _write(chat, blocks, place)
        else:
            is_new = i >= n_old and message["role"] == "user"
            if is_new and message["content"] is None:
                raise refused(f"{place}.content", "give text or a list of blocks")
            _say(chat, message["role"], blocks, place, is_new=is_new)
        chat.mark(blocks)
    chat.join()
    # Templates print tools with the system prompt.
    if any(tool.get("cache_control") for tool in body.tools or ()) and body.system:
        chat.marks.add(1)

    # Tools without a schema are those that a server would run.
    functions = []
    for tool in body.tools or ():
        if "input_schema" in tool:
            strict = {"strict": True} if tool.get("strict") else {}
            functions.append(function_tool(tool, tool["input_schema"], **strict))
        else:
            chat.stand_in(tool.get("name"), tool)
    choice = body.tool_choice or {}
    word = CHOICES.get(choice.get("type", "auto")) or {"name": choice.get("name")}
    is_parallel = not choice.get("disable_parallel_tool_use")
    tools = tool_options(functions, word, is_parallel)

    effort, thinks = (body.output_config or {}).get("effort"), None
    if body.thinking is not None:
        thinks = body.thinking.get("type") != "disabled"
    variables = chat_variables(body, effort, thinks=thinks)

    # Fields of SamplingParams that have other names here.
    sampling: dict[str, Any] = {}
    if body.stop_sequences:
        sampling["stop"] = tuple(body.stop_sequences)
    form = (body.output_config or {}).get("format") or body.output_format
    if form is not None:
        schema = form.get("schema") if isinstance(form, dict) else None
        if not isinstance(schema, dict):
            raise refused("output_config.format", "it needs a schema")
        sampling["json_schema"] = schema

    names = dict.fromkeys(OF_MESSAGES, "messages") | NAMES
    names |= {"stop": "stop_sequences", "json_schema": "output_config"}
    return chat, chat_request(
        body,
        chat,
        model,
        service,
        tools=tools,
        variables=variables,
        names=names,
        **sampling,
    )


def _listed(content: str | BlockList | None) -> BlockList:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content or []


def _say(
    chat: ChatTurns, role: str, blocks: BlockList, place: str, *, is_new: bool
) -> None:
    """What a user says, after the results that come with it; *is_new*: now."""
    # Calls are followed by their results, so these come first.
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            _result(chat, block, f"{place}.content[{i}]")
    # A turn of nothing but results says nothing itself.
    if not blocks or any(block["type"] != "tool_result" for block in blocks):
        old = None if is_new else chat
        chat.say(role, _parts(blocks, f"{place}.content", old), place)


def _result(chat: ChatTurns, block: Any, place: str) -> None:
    content = plain_result(block.get("content"), is_typed=True) or ""
    parts = list(_parts(_listed(content), f"{place}.content", chat))
    # Templates have no other way to say that a tool failed.
    if block.get("is_error"):
        parts.insert(0, PlacedPart.of_text(ERROR, place))
    if all(part["type"] == "text" for part, _ in parts):
        text = "".join(part["text"] for part, _ in parts)
        parts = [PlacedPart.of_text(text, place)]
    chat.say("tool", parts, place, tool_call_id=id_of(block.get("tool_use_id")))


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
            # What is hidden or left out has nothing to tell the model.
            case {"type": "redacted_thinking" | "thinking"}:
                pass
            case {"type": "tool_use"}:
                name, arguments = fields.get("name"), fields.get("input")
                chat.call(fields.get("id"), name, arguments, at)
            # Nothing that the assistant has said is refused.
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
        # In the history a short text stands for a block that cannot be used.
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
            source = block.get("source")
            if isinstance(source, dict) and source.get("type") == "content":
                text = _texts(source.get("content"), f"{at}.source.content")
            else:
                text = text_of(_source(block, "text", at), "data", at)
            text = _headed(block, ("title", "context"), text)
        case "search_result":
            text = _texts(block.get("content"), f"{at}.content")
            text = _headed(block, ("title", "source"), text)
        case "image":
            return _image(block, at)
        case _:
            raise unknown(kind, at)
    return {"type": "text", "text": text}


def _headed(block: Any, names: Sequence[str], text: str) -> str:
    """*text* below what a block says of it in the fields *names*."""
    heads = [block.get(name) for name in names]
    return "\n".join([*(h for h in heads if isinstance(h, str) and h), text])


def _texts(content: Any, place: str) -> str:
    """*content* that is texts, and nothing that has parts again. Raises Failure."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(place, "give a list of texts")
    return "\n".join(_text(part, f"{place}[{j}]") for j, part in enumerate(content))


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


# -- out ---------------------------------------------------------------------------------


class MessagesCodec:
    """Writes one answer."""

    def __init__(self, request: TextRequest) -> None:
        self.blocks = Blocks()
        ids = {"id": f"msg_{uuid4().hex}", "model": request.model.name}
        self._message: dict[str, Any] = {"type": "message", "role": "assistant", **ids}

    def begin(self, n_prompt: int) -> bytes:
        """The message without its content."""
        counts = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        usage = {"input_tokens": n_prompt, "output_tokens": 0} | counts
        end = {"stop_reason": None, "stop_sequence": None}
        message = self._message | {"content": [], **end, "usage": usage}
        return named_event("message_start", message=message) + named_event("ping")

    def delta(self, prompt: int, delta: Delta) -> bytes:  # noqa: ARG002 - there is one
        """New blocks, and the text that is new in them."""
        frames = b""
        for part in delta.parts:
            closed, block, is_new, text = self.blocks.take(part)
            if closed is not None:
                frames += _close(closed)
            if is_new:
                content = _content(block, "", signature="")
                kind = "content_block_start"
                frames += named_event(kind, index=block.index, content_block=content)
            if text and block.kind is Content:
                frames += _delta(block, "text", text=text)
            elif text and block.kind is Reasoning:
                frames += _delta(block, "thinking", thinking=text)
            elif text:
                frames += _delta(block, "input_json", partial_json=text)
        return frames

    def ended(self, prompt: int, result: Result) -> bytes:  # noqa: ARG002
        """The end of the last block, and why the answer ended."""
        blocks = self.blocks.all
        end = named_event("message_delta", delta=_end(result), usage=_usage(result))
        return (_close(blocks[-1]) if blocks else b"") + end

    def failed(self, failure: Failure) -> bytes:
        """An error after the answer began."""
        return named_event("error", error=failure.of_message()["error"])

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:  # noqa: ARG002
        """The end of the message."""
        return named_event("message_stop")

    def whole(self, results: Sequence[Sequence[Result]]) -> dict[str, Any]:
        """The message at once."""
        result = results[0][0]
        content = [_content(block, block.text) for block in self.blocks.all]
        end = {"content": content, **_end(result), "usage": _usage(result)}
        return self._message | end


def _close(block: Block) -> bytes:
    """Frames of the end of a block; clients want thoughts to be signed."""
    frames = b""
    if block.kind is Reasoning:
        frames = _delta(block, "signature", signature=SIGNATURE)
    return frames + named_event("content_block_stop", index=block.index)


def _delta(block: Block, kind: str, **fields: str) -> bytes:
    delta = {"type": f"{kind}_delta", **fields}
    return named_event("content_block_delta", index=block.index, delta=delta)


def _content(block: Block, text: str, signature: str = SIGNATURE) -> dict[str, Any]:
    if block.kind is Content:
        return {"type": "text", "text": text}
    if block.kind is Reasoning:
        return {"type": "thinking", "thinking": text, "signature": signature}
    call = {"id": block.call_id, "name": block.name, "input": _input(text)}
    return {"type": "tool_use", **call}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; of one that was cut, those that are there."""
    try:
        fields = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _usage(result: Result) -> dict[str, Any]:
    usage = result.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _end(result: Result) -> dict[str, Any]:
    """Why an answer ended; what cuts it and has no name there is a limit."""
    detail = result.finish_detail
    end: dict[str, Any] = {"stop_reason": "end_turn", "stop_sequence": None}
    if result.finish_reason is not FinishReason.STOP:
        end["stop_reason"] = "max_tokens"
    elif isinstance(detail, StopString):
        end |= {"stop_reason": "stop_sequence", "stop_sequence": detail.text}
    elif result.calls_tools:
        end["stop_reason"] = "tool_use"
    return end
