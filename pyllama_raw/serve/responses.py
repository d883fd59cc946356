"""
OpenAI's Responses API: `/v1/responses`. A chat is a list of items, and nothing of it is kept.

In: ResponsesBody. Meaning: read(). Out: ResponsesCodec; in a stream, each event has its number.

Rules:
1. Calls of tools that have no schema, which another server allowed, have their text as input.
2. Thoughts that are hidden from us have nothing to tell the model.
3. Clients send items that are not known here with each request, because an earlier server made
   them, so a short text stands in for one. A part of what the user says now is refused.
   A reference to an item of ours is refused, too: its client believes that it is kept.
4. Functions may come in an item `additional_tools`; they join the `tools` of the body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from time import time
from typing import Annotated, Any, ClassVar, Self
from uuid import uuid4

from fastapi import FastAPI
from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError, to_json
from starlette.responses import Response
from typing_extensions import TypedDict

from pyllama_raw import Delta, FinishReason, Result
from pyllama_raw.replies.parser import CallDelta, Content, Reasoning, is_json
from pyllama_raw.results import Operation
from pyllama_raw.serve import fields
from pyllama_raw.serve.answer import (
    STREAMED,
    Block,
    Blocks,
    TextAnswer,
    TextRequest,
    named_event,
    timings,
)
from pyllama_raw.serve.body import Items, Limit
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
from pyllama_raw.serve.forms import ANY_OBJECT
from pyllama_raw.serve.service import ServedModel, Service

ABSENT = ("previous_response_id", "conversation", "background", "prompt")
MAX_METADATA = 2**14  # bytes: the answer repeats it, and it stays until then
LOGPROBS = "message.output_text.logprobs"
AT_END = ("message", "additional_tools")  # items that may follow what the user says now
TEXTS = {"input_text": "text", "output_text": "text", "text": "text"}
TEXTS |= {"refusal": "refusal", "summary_text": "text", "reasoning_text": "text"}
OWN_ID = re.compile(r"(msg|rs|fc)_[0-9a-f]{36}")
IDS = {Content: "msg", Reasoning: "rs", CallDelta: "fc"}
EVENTS = {  # of the text of a block
    Content: "response.output_text",
    Reasoning: "response.reasoning_text",
    CallDelta: "response.function_call_arguments",
}


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    @app.post("/v1/responses", tags=["responses"], responses=STREAMED)
    @app.post("/responses", include_in_schema=False)
    async def responses(body: ResponsesBody) -> Response:
        """Go on with a chat of items."""
        request = await read(body, service)
        return TextAnswer(service, request, ResponsesCodec(request, body))

    @app.post("/v1/responses/input_tokens", tags=["responses"])
    @app.post("/responses/input_tokens", include_in_schema=False)
    async def response_tokens(body: ResponsesBody) -> Response:
        """Count the tokens that a chat has as a prompt."""
        n_tokens = await (await read(body, service)).count()
        return JSON({"object": "response.input_tokens", "input_tokens": n_tokens})


# -- in ----------------------------------------------------------------------------------


class InputItem(TypedDict, total=False):
    """A message, a call, the result of one, or what was thought."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    type: str | None
    role: str


ItemList = Annotated[list[InputItem], Field(fail_fast=True)]


class ResponsesBody(ConversationBody):
    """A chat of items that is to go on. All of it is here: nothing is kept."""

    rules: ClassVar[fields.Rules] = fields.RESPONSES
    refuses: ClassVar[tuple[str, ...]] = ABSENT

    input: str | ItemList | None = None
    """
    A text, or items; what an assistant began may be the last one, and goes on. None at all are an
    empty message, by which some clients try a model.
    """
    instructions: str | None = None
    """What the model is told before the input."""
    max_output_tokens: Limit | None = None
    """Most tokens of the answer; left out: what is left of the context."""
    tools: Items[dict[str, Any]] | None = None
    """Functions that the client runs; tools of other kinds are left out."""
    tool_choice: str | dict[str, Any] | None = None
    """"auto", "none", "required", or a function, or functions that are allowed."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls, which it may if this is left out."""
    text: dict[str, Any] | None = None
    """The form of the text, in `format`."""
    reasoning: dict[str, Any] | None = None
    """The `effort` that the template is told."""
    include: Items[str] | None = None
    """What is told beside the answer: nothing is, as no thought is hidden."""
    metadata: dict[str, Any] | None = None
    """Repeated by the answer."""
    previous_response_id: str | None = None
    """Refused: responses are not kept."""
    conversation: str | dict[str, Any] | None = None
    """Refused: conversations are not kept."""
    background: bool | None = None
    """Refused: an answer comes on the connection that asks for it."""
    prompt: dict[str, Any] | None = None
    """Refused: prompts are not kept."""

    @model_validator(mode="after")
    def _check_metadata(self) -> Self:
        metadata = self.metadata
        if metadata and len(to_json(metadata)) > MAX_METADATA:
            reason, limit = (
                "metadata: at most {most} bytes of JSON",
                {"most": MAX_METADATA},
            )
            raise PydanticCustomError("too_long", reason, limit)
        return self


# -- meaning -----------------------------------------------------------------------------


async def read(body: ResponsesBody, service: Service) -> TextRequest:
    """The request of *body*. Raises Failure and Unsupported."""
    model = service.find(body.model, Operation.GENERATE)
    if body.n not in (None, 1):
        raise refused("n", "an answer has one output", "unsupported")
    if body.n_probs:
        raise refused("n_probs", fields.UNTOLD, "unsupported")
    reading = partial(_read, body, model, service)
    return await finish_chat(*await service.read_body(reading), service)


def _read(
    body: ResponsesBody, model: ServedModel, service: Service
) -> tuple[ChatTurns, TextRequest]:
    """The chat of *body*, and its request but for images and sounds."""
    for name in ABSENT:
        if getattr(body, name):
            raise refused(name, "nothing is kept here: send all", "unsupported")
    if LOGPROBS in (body.include or ()):
        reason = "no log-probabilities are told here: ask for a chat completion"
        raise refused("include", reason, "unsupported")
    chat = _conversation_of(body.instructions, body.input or "")

    # Functions of the body and those among the items; others are tools that a server would run, or
    # whose calls are no JSON.
    functions = []
    for tool in (*(body.tools or ()), *chat.tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            # Chats have its fields in an object, which some clients send here, too.
            fields = (
                tool["function"] if isinstance(tool.get("function"), dict) else tool
            )
            strict = {"strict": True} if fields.get("strict") else {}
            functions.append(function_tool(fields, fields.get("parameters"), **strict))
        else:
            chat.stand_in(kind, tool)
    tools = tool_options(functions, body.tool_choice, body.parallel_tool_calls)
    variables = chat_variables(body, (body.reasoning or {}).get("effort"))

    # Fields of SamplingParams that have other names here.
    sampling: dict[str, Any] = {}
    if body.max_output_tokens is not None:
        sampling["max_tokens"] = body.max_output_tokens
    match (body.text or {}).get("format"):
        case None | {"type": "text"}:
            pass
        case {"type": "json_object"}:
            sampling["json_schema"] = ANY_OBJECT
        case {"type": "json_schema", "schema": dict(schema)}:
            sampling["json_schema"] = schema
        case _:
            reason = "give text, json_object, or json_schema with a schema"
            raise refused("text.format", reason)

    names = dict.fromkeys((*OF_MESSAGES, "messages"), "input") | NAMES
    names |= {"max_tokens": "max_output_tokens", "json_schema": "text"}
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


def _conversation_of(instructions: str | None, items: str | ItemList) -> ChatTurns:
    """The chat. Raises Failure."""
    chat = ChatTurns()
    if instructions:
        chat.say("system", _parts(instructions, "instructions"), "instructions")
    if isinstance(items, str):
        chat.say("user", _parts(items, "input"), "input")
        return chat
    # Behind the last turn of the assistant the user speaks now; all before it is the history.
    at_end = True
    new = set()
    for i in reversed(range(len(items))):
        at_end = at_end and (items[i].get("type") or "message") in AT_END
        at_end = at_end and items[i].get("role") != "assistant"
        if at_end and items[i].get("role") == "user":
            new.add(i)
    first: Failure | None = None
    n_failed = 0
    for i, item in enumerate(items):
        place = f"input[{i}]"
        # Its client takes for granted that this server has what it said itself.
        item_id: Any = item.get("id")
        if item.get("type") == "item_reference" and OWN_ID.fullmatch(str(item_id)):
            reason = "nothing is kept here: send the item itself, as with store: false"
            raise refused(place, reason, "unsupported")
        try:
            _add(chat, item, place, is_new=i in new)
        except Failure as failure:
            # The user can say something else, and somebody has to say something.
            first, n_failed = first or failure, n_failed + 1
            if i in new:
                raise
            if n_failed == len(items):
                raise first from None
            # A short text stands for all else, said by the side that it is likely from.
            kind, role = (item.get("type") or "message"), item.get("role")
            text = chat.stand_in(kind, item)
            if role == "assistant" or str(kind).endswith(("_call", "_tools")):
                chat.write(text, place)
            else:
                chat.say("user", [PlacedPart.of_text(text, place)], place)
    # Some clients send no message of a user, but templates want one.
    if not any(message["role"] != "system" for message in chat.messages):
        chat.say("user", _parts("", "input"), "input")
    chat.join()
    return chat


def _add(chat: ChatTurns, item: Any, place: str, *, is_new: bool) -> None:
    """One item; *is_new*: the user says it now. Raises Failure."""
    old = None if is_new else chat
    match item.get("type") or "message":
        case "message":
            role, content = item.get("role"), item.get("content") or ""
            if not isinstance(role, str):
                reason = "give user, assistant, system or developer"
                raise refused(f"{place}.role", reason)
            # Turns of the assistant grow, those of others are told as they are.
            if role == "assistant":
                chat.write(_joined(content, f"{place}.content", old), place)
            else:
                chat.say(role, _parts(content, f"{place}.content", old), place)
        # Thoughts that are hidden have no text.
        case "reasoning":
            thought = item.get("content") or item.get("summary") or ()
            text = _joined(thought, f"{place}.content", old)
            if text:
                chat.think(text, place)
        case "additional_tools":
            tools = item.get("tools")
            chat.tools += tools if isinstance(tools, list) else ()
        case "function_call":
            arguments = item.get("arguments")
            chat.call(item.get("call_id"), item.get("name"), arguments, place)
        # Its tool has no schema here, so its text is the only argument.
        case "custom_tool_call":
            arguments = {"input": item.get("input")}
            chat.call(item.get("call_id"), item.get("name"), arguments, place)
        case "function_call_output" | "custom_tool_call_output":
            output = plain_result(item.get("output"), is_typed=True) or ""
            parts = _parts(output, f"{place}.output", chat)
            chat.say("tool", parts, place, tool_call_id=id_of(item.get("call_id")))
        case kind:
            raise unknown(kind, place)


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
        # In the history a short text stands for a part that cannot be used.
        at = f"{place}[{i}]"
        if isinstance(part, str):
            yield PlacedPart.of_text(part, at)
            continue
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


# -- out ---------------------------------------------------------------------------------


class ResponsesCodec:
    """Writes one answer."""

    def __init__(self, request: TextRequest, body: ResponsesBody) -> None:
        self.blocks = Blocks()
        self._response = _response(request, body)
        self._key = uuid4().hex  # of the ids of items
        self._n_events = 0

    def begin(self, n_prompt: int) -> bytes:  # noqa: ARG002 - usage comes at the end
        """The response without its items."""
        response = self._response | {"status": "in_progress"}
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def delta(self, prompt: int, delta: Delta) -> bytes:  # noqa: ARG002 - there is one
        """New blocks, and the text that is new in them."""
        frames = b""
        for part in delta.parts:
            closed, block, is_new, text = self.blocks.take(part)
            if closed is not None:
                frames += self._close(closed)
            if is_new:
                frames += self._open(block)
            if text:
                kind = f"{EVENTS[block.kind]}.delta"
                place, absent = self._place(block), _no_logprobs(block)
                frames += self._event(kind, **place, delta=text, **absent)
        return frames

    def ended(self, prompt: int, result: Result) -> bytes:  # noqa: ARG002
        """The end of the last block."""
        blocks = self.blocks.all
        return self._close(blocks[-1], result) if blocks else b""

    def failed(self, failure: Failure) -> bytes:
        """An error after the answer began."""
        error = {"code": "server_error", "message": failure.message}
        response = self._response | {"status": "failed", "error": error}
        return self._event("response.failed", response=response)

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:
        """All of the response."""
        result = results[0][0]
        response = self._finished(result, self.blocks.all)
        times = timings(result, result.usage.completion_tokens)
        kind = f"response.{response['status']}"
        return self._event(kind, response=response, timings=times)

    def whole(self, results: Sequence[Sequence[Result]]) -> dict[str, Any]:
        """The response at once."""
        result = results[0][0]
        return self._finished(result, self.blocks.all)

    def _finished(self, result: Result, blocks: Sequence[Block]) -> dict[str, Any]:
        """The response with its items, and why it ended."""
        status = _status(result)
        # Only the last block ends with the answer, so only that can be cut.
        lasts = [None for _ in blocks[1:]] + [result]
        ends = map(_item_status, blocks, lasts)
        items = map(self._item, blocks, ends, (block.text for block in blocks))
        end = {"status": status, "output": list(items), "usage": _usage(result)}
        if status == "completed":
            return self._response | end | {"completed_at": int(time())}
        # Ends that the dialect has no word for have ours beside it.
        cut = result.finish_reason
        details: dict[str, Any] = {"reason": "max_output_tokens"}
        if cut is not FinishReason.LENGTH:
            details = {"reason": None, "x_finish": str(cut)}
        return self._response | end | {"incomplete_details": details}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._n_events += 1
        return named_event(kind, sequence_number=self._n_events - 1, **fields)

    def _open(self, block: Block) -> bytes:
        """Frames of a new block, without its text."""
        item, is_call = self._item(block, "in_progress", ""), block.kind is CallDelta
        if not is_call:  # its parts come later
            item["content"] = []
        kind = "response.output_item.added"
        frames = self._event(kind, output_index=block.index, item=item)
        if is_call:
            return frames
        place, part = self._place(block), _part_of(block, "")
        return frames + self._event("response.content_part.added", **place, part=part)

    def _close(self, block: Block, result: Result | None = None) -> bytes:
        """Frames of the end of a block; that of the last one is the end of *result*."""
        place, text = self._place(block), block.text
        content: dict[str, Any] = {"text": text} | _no_logprobs(block)
        if block.kind is CallDelta:
            content = {"name": block.name, "arguments": text}
        frames = self._event(f"{EVENTS[block.kind]}.done", **place, **content)
        if block.kind is not CallDelta:
            kind = "response.content_part.done"
            frames += self._event(kind, **place, part=_part_of(block, text))
        item = self._item(block, _item_status(block, result), text)
        kind = "response.output_item.done"
        return frames + self._event(kind, output_index=block.index, item=item)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind is CallDelta else place | {"content_index": 0}

    def _id(self, block: Block) -> str:
        return f"{IDS[block.kind]}_{self._key}{block.index:04x}"

    def _item(self, block: Block, status: str, text: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        if block.kind is CallDelta:
            call = {"call_id": block.call_id, "name": block.name, "arguments": text}
            return item | {"type": "function_call"} | call
        item["content"] = [_part_of(block, text)]
        if block.kind is Reasoning:
            return item | {"type": "reasoning", "summary": []}
        return item | {"type": "message", "role": "assistant"}


def _no_logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind is Content else {}


def _part_of(block: Block, text: str) -> dict[str, Any]:
    if block.kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(result: Result) -> str:
    is_cut = result.finish_reason is not FinishReason.STOP
    return "incomplete" if is_cut else "completed"


def _item_status(block: Block, result: Result | None) -> str:
    """The status of a block; *result* is that of the answer that ends with it."""
    if block.kind is CallDelta and not is_json(block.text):
        return "incomplete"  # the model may end its turn within a call
    return "completed" if result is None else _status(result)


def _usage(result: Result) -> dict[str, Any]:
    usage = result.usage
    cached = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _response(request: TextRequest, body: ResponsesBody) -> dict[str, Any]:
    """The response before it begins."""
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time()),
        "model": request.model.name,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": body.reasoning,
        "store": False,
        "temperature": request.params.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [t for t in body.tools or () if t.get("type") == "function"],
        "top_p": request.params.top_p,
        "usage": None,
    }
