"""
OpenAI's API: `/v1/chat/completions`, the words that its answers have in common with others, and
`/v1/completions`.

In: ChatBody and CompletionBody. Meaning: read_chat() and read_completion(). Out: ChatCodec and
CompletionCodec.

Rules:
1. A token that is no whole UTF-8 is told with escapes, because JSON has no bytes.
2. The log-probabilities of a prompt are known at the end. So an answer that begins with them
   comes in one event, also in a stream.
"""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import time
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar
from uuid import uuid4

from fastapi import FastAPI
from pydantic import Field, Strict
from pydantic_core import to_json
from starlette.responses import Response

from pyllama_raw import AsyncEngine, Delta, FinishReason, Prompt, Result
from pyllama_raw.replies.parser import CallDelta, Content
from pyllama_raw.results import Operation, TokenLogprobs
from pyllama_raw.serve import fields
from pyllama_raw.serve.answer import (
    DONE,
    STREAMED,
    TextAnswer,
    TextRequest,
    event,
    timings,
)
from pyllama_raw.serve.body import NO_LIMIT, Items, Limit, TextBody
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.conversation import (
    NAMES,
    OF_MESSAGES,
    ChatTurns,
    ConversationBody,
    SentMessage,
    chat_request,
    chat_variables,
    finish_chat,
    id_of,
    tool_call,
    tool_options,
)
from pyllama_raw.serve.failures import JSON, Failure, refused
from pyllama_raw.serve.service import ServedModel, Service

T = TypeVar("T")
Several = Annotated[list[T], Field(min_length=1, fail_fast=True)]
TokenIds = Several[Annotated[int, Strict()]]
GAP = ("prefix", "suffix", "middle")
LEAST = -9999.0  # JSON has no infinity


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    @app.post("/v1/chat/completions", tags=["chat"], responses=STREAMED)
    @app.post("/chat/completions", include_in_schema=False)
    async def chat(body: ChatBody) -> Response:
        """Go on with a chat."""
        request = await read_chat(body, service)
        tells = body.verbose or service.config.tells_prompts
        prompt = (await request.texts())[0].text if tells else None
        codec = ChatCodec(request, body, prompt, service.config)
        return TextAnswer(service, request, codec)

    @app.post("/v1/chat/completions/input_tokens", tags=["chat"])
    @app.post("/chat/completions/input_tokens", include_in_schema=False)
    async def chat_tokens(body: ChatBody) -> Response:
        """Count the tokens that a chat has as a prompt."""
        n_tokens = await (await read_chat(body, service)).count()
        return JSON({"object": "response.input_tokens", "input_tokens": n_tokens})

    @app.post("/v1/completions", tags=["completions"], responses=STREAMED)
    async def completions(body: CompletionBody) -> Response:
        """Go on with texts."""
        request, echoes = await read_completion(body, service)
        codec = CompletionCodec(request, body, echoes, service.config)
        return TextAnswer(service, request, codec)


# -- chats -------------------------------------------------------------------------------


class ChatBody(ConversationBody):
    """A chat that is to go on."""

    messages: Annotated[list[SentMessage], Field(min_length=1, fail_fast=True)]
    """Messages; an answer that has begun may be the last one, and goes on."""
    max_completion_tokens: Limit | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Whether each token has its log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likely tokens that are listed with each token, if there are logprobs."""
    tools: Items[dict[str, Any]] | None = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """
    "auto": the model decides; "none", "required", the function that it must call, or the
    `allowed_tools`, which are all that it is told of.
    """
    parallel_tool_calls: bool | None = None
    """Whether one answer may call several functions, which it may unless this is false."""
    parse_tool_calls: bool | None = None
    """False: the text stays as the model writes it, with calls and reasoning in it."""
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    """"none": reasoning stays in the content, otherwise it is `reasoning_content`."""
    reasoning_effort: str | None = None
    """A variable of the chat template; "none" also asks it for no reasoning."""
    reasoning: dict[str, Any] | None = None
    """`effort`, and `enabled`: whether the template lets the model think."""
    thinking: bool | dict[str, Any] | None = None
    """Whether the template lets the model think; as an object, by its `type`."""
    add_generation_prompt: bool | None = None
    """Whether the template asks for an answer, which it does unless one has begun."""
    continue_final_message: bool | None = None
    """Whether the last message is to go on, which is so if it is the assistant's."""

    @property
    def has_output(self) -> bool:
        """Whether any token is to be told."""
        return 0 not in (self.max_tokens, self.max_completion_tokens)

    verbose: bool = False
    """Whether a whole answer tells the prompt as the model gets it, in `__verbose`."""


async def read_chat(body: ChatBody, service: Service) -> TextRequest:
    """The request of *body*. Raises Failure and Unsupported."""
    model = service.find(body.model, Operation.GENERATE)
    service.check_outputs(model, 1, body.n)
    read = partial(_read_chat, body, model, service)
    return await finish_chat(*await service.read_body(read), service)


def _read_chat(
    body: ChatBody, model: ServedModel, service: Service
) -> tuple[ChatTurns, TextRequest]:
    """The chat of *body*, and its request but for images and sounds."""
    # Fields that fit other fields only.
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", "it needs logprobs: true")
    last = body.messages[-1]
    has_begun = last["role"] == "assistant" and bool(last.get("content"))
    if body.continue_final_message not in (None, has_begun):
        reason = "the last message goes on if it is the assistant's"
        raise refused("continue_final_message", reason, "unsupported")
    if body.add_generation_prompt and has_begun:
        reason = "the assistant has begun an answer, which goes on"
        raise refused("add_generation_prompt", reason, "unsupported")

    chat = ChatTurns(body.messages)
    for message in body.messages:
        if "tool_calls" in message or "tool_call_id" in message:
            _mend_calls(message, chat)
    tools = tool_options(body.tools, body.tool_choice, body.parallel_tool_calls)

    # Whether and how hard the model thinks is said in three ways.
    effort, thinks = body.reasoning_effort, None
    if isinstance(body.thinking, dict):
        thinks = body.thinking.get("type", "enabled") not in ("disabled", False)
    elif body.thinking is not None:
        thinks = body.thinking
    if body.reasoning is not None:
        effort, thinks = _reasoning_of(body.reasoning, effort, thinks)
    asks = body.add_generation_prompt
    variables = chat_variables(body, effort, thinks=thinks, asks=asks)

    # Fields of SamplingParams that have other names here.
    sampling: dict[str, Any] = {}
    form = body.reasoning_format or service.config.reasoning_format
    is_as_written = form == "none" and not body.tools
    if is_as_written or body.parse_tool_calls is False:
        sampling["special"] = True
    if body.max_completion_tokens is not None:
        sampling["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0

    names = dict.fromkeys(OF_MESSAGES, "messages") | NAMES
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
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


def _reasoning_of(
    reasoning: dict[str, Any], effort: Any, thinks: bool | None
) -> tuple[Any, bool | None]:
    """The effort, and whether the model thinks, by OpenRouter's object. Raises Failure."""
    for name, value in reasoning.items():
        if name == "effort":
            effort = effort or value
        elif name in ("enabled", "enable"):
            thinks = bool(value)
        elif value and name not in ("summary", "generate_summary"):
            raise refused(f"reasoning.{name}", fields.NOT_DONE, "unsupported")
    return effort, thinks


def _mend_calls(message: Any, chat: ChatTurns) -> None:
    """
    Give *message* the calls that templates can print, and the ids that are texts.

    Clients send their history again with each request, so a call that cannot be used is a short text.
    """
    if "tool_call_id" in message:
        message["tool_call_id"] = id_of(message["tool_call_id"])
    if message["role"] != "assistant" or message.get("tool_calls") is None:
        return
    calls = message["tool_calls"]
    calls = calls if isinstance(calls, list) else [calls] if calls else []
    mended, texts = [], []
    for call in calls:
        function = _function_of(call)
        if function is None:
            kind = call.get("type") if isinstance(call, dict) else None
            kind = "call" if kind in (None, "function") else kind
            texts.append(chat.stand_in(kind, call))
        else:
            call_id = id_of(call.get("id"))
            mended.append(tool_call(call_id, function["name"], function["arguments"]))
    message["tool_calls"] = mended
    # What stands for calls is said behind all else.
    if texts and isinstance(content := message.get("content"), list):
        content += [{"type": "text", "text": text} for text in texts]
    elif texts:
        message["content"] = "\n".join(filter(None, (message.get("content"), *texts)))


def _function_of(call: Any) -> dict[str, Any] | None:
    """The function that *call* calls, or its custom tool as one; None: nothing has a name."""
    if not isinstance(call, dict):
        return None
    custom = call.get("custom")
    # Templates print functions only, so the text for a custom tool is an argument.
    if call.get("type") == "custom" and isinstance(custom, dict):
        function: Any = {**custom, "arguments": {"input": custom.get("input")}}
    else:
        function = call.get("function", call if "name" in call else None)
    if not isinstance(function, dict):
        return None
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        return None
    if not (arguments is None or isinstance(arguments, str | dict)):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": name, "arguments": arguments}


class ChatCodec:
    """Writes the answer to a chat: content, reasoning and calls of tools."""

    blocks = None

    def __init__(
        self,
        request: TextRequest,
        body: ChatBody,
        prompt: str | None,
        config: ServeConfig,
    ) -> None:
        """
        Args:
            prompt: the prompt as the model gets it, if the answer tells it.
        """
        kind = "chat.completion.chunk" if request.streams else "chat.completion"
        self._chunks = Chunks("chatcmpl", kind, request, body, config)
        self._n = request.params.n
        # In the place of llama-server no token may be wanted, and the last chunk tells times.
        self._is_llama = config.in_place_of is not None
        self._has_output = not self._is_llama or body.has_output
        names = ("reasoning_content", "reasoning")[: 1 + config.reasoning_alias]
        is_apart = (body.reasoning_format or config.reasoning_format) != "none"
        self._reasoning = names if is_apart else ("content",)
        self._lists = request.params.logprobs is not None
        self._verbose = {} if prompt is None else {"__verbose": {"prompt": prompt}}

    def begin(self, n_prompt: int) -> bytes:  # noqa: ARG002
        """The role of each output."""
        choice = b'"delta":{"role":"assistant","content":null},"finish_reason":null'
        return b"".join(self._chunks.frame(index, choice) for index in range(self._n))

    def delta(self, prompt: int, delta: Delta) -> bytes:  # noqa: ARG002 - there is one
        """The new parts; log-probabilities are those of all tokens since the last ones."""
        if not self._has_output:
            return b""
        # A token that has no text yet has its log-probability, and an object of its own for it.
        objects = [*_objects_of(delta, self._reasoning)]
        logprobs = b""
        if self._lists and delta.logprobs:
            logprobs = b'"logprobs":%b,' % to_json(chat_logprobs(delta.logprobs))
            objects = objects or [b"{}"]
        frames = []
        for value in objects:
            choice = b'"delta":%b,%b"finish_reason":null' % (value, logprobs)
            frames.append(self._chunks.frame(delta.index, choice))
            logprobs = b""  # once
        return b"".join(frames)

    def ended(self, prompt: int, result: Result) -> bytes:  # noqa: ARG002
        """Why an output ended."""
        result = result if self._has_output else without_excess(result)
        choice = b'"delta":{},' + to_json(reason_of(result))[1:-1]
        return self._chunks.frame(
            result.index, choice, result if self._is_llama else None
        )

    def failed(self, failure: Failure) -> bytes:
        """An error after the answer began."""
        return event(failure.body())

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:
        """The counts of tokens, if they are asked for, and the end."""
        return self._chunks.done(results)

    def whole(self, results: Sequence[Sequence[Result]]) -> dict[str, Any]:
        """The answer at once."""
        if not self._has_output:
            results = [[without_excess(result) for result in of] for of in results]
        choices = [
            {
                "index": result.index,
                "message": _message_of(result, self._reasoning),
                "logprobs": chat_logprobs(result.logprobs) if self._lists else None,
                **reason_of(result),
            }
            for result in results[0]
        ]
        return self._chunks.answer(choices, results) | self._verbose


def _objects_of(delta: Delta, names: Sequence[str]) -> Iterator[bytes]:
    """
    Objects `delta` of a stream, one for each part, as they are sent.

    The name of a call comes once and before its arguments, because clients add texts up.

    Args:
        names: of fields that have the reasoning.
    """
    if not delta.parts and delta.text:  # it is not taken apart
        yield b'{"content":%b}' % to_json(delta.text)
    for part in delta.parts:
        # Nearly all of a stream: its text is all that is written anew.
        if isinstance(part, Content):
            yield b'{"content":%b}' % to_json(part.text)
            continue
        if not isinstance(part, CallDelta):
            yield to_json(dict.fromkeys(names, part.text))
            continue
        # A call begins with its name, and its arguments come bit by bit.
        if part.name is not None:
            call = tool_call(part.id, part.name, "")
            yield to_json({"tool_calls": [{"index": part.index, **call}]})
        if part.arguments:
            call = {"index": part.index, "function": {"arguments": part.arguments}}
            yield to_json({"tool_calls": [call]})


def _message_of(result: Result, names: Sequence[str]) -> dict[str, Any]:
    """The message of an answer; *names* are those of fields that have the reasoning."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    if result.reasoning:
        message |= dict.fromkeys(names, result.reasoning)
    message["content"] += result.text
    # Clients want no empty text beside calls.
    if result.tool_calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            tool_call(call.id, call.name, call.arguments) for call in result.tool_calls
        ]
    return message


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`logprobs` of a choice of a chat."""
    content = []
    for entry in entries:
        tops = zip(entry.top_pieces, entry.top, strict=True)
        top = [_entry(piece, logprob) for piece, (_, logprob) in tops]
        token = _entry(entry.piece, entry.logprob)
        content.append(token | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    logprob = max(logprob, LEAST)
    return {"token": _name(piece), "logprob": logprob, "bytes": list(piece)}


# -- words of both -----------------------------------------------------------------------


class Chunks:
    """
    Frames and objects of one answer. The prefix, which all have in common, is rendered once.

    Args:
        kind: of the object, such as "chat.completion.chunk".
        body: says whether a stream ends with the counts of tokens.
    """

    def __init__(
        self,
        prefix: str,
        kind: str,
        request: TextRequest,
        body: TextBody,
        config: ServeConfig,
    ) -> None:
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time()),
            "model": request.model.name,
        }
        if config.in_place_of is not None:
            self._head["system_fingerprint"] = config.build
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._before = b"data: %b" % to_json(self._head)[:-1] + b',"choices":[{"index":'
        self._after = b'}],"usage":null}\n\n' if self._with_usage else b"}]}\n\n"

    def frame(self, index: int, choice: bytes, result: Result | None = None) -> bytes:
        """An event with one choice, whose other fields are in *choice*; times of *result*."""
        after = self._after
        if result is not None:
            times = timings(result, result.usage.completion_tokens)
            after = b'}],"timings":%b%b' % (to_json(times), after.removeprefix(b"}]"))
        return b"%b%d,%b%b" % (self._before, index, choice, after)

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:
        """The counts of tokens, if they are asked for, and the end."""
        return event(self.answer([], results)) + DONE if self._with_usage else DONE

    def answer(
        self, choices: list[dict[str, Any]], results: Sequence[Sequence[Result]]
    ) -> dict[str, Any]:
        """An object with *choices*, the counts of all outputs, and times of the first one."""
        outputs = [result for of_prompt in results for result in of_prompt]
        # The outputs of a prompt share its tokens.
        n_prompt = sum(of_prompt[0].usage.prompt_tokens for of_prompt in results)
        n_cached = sum(of_prompt[0].usage.cached_tokens for of_prompt in results)
        n_output = sum(result.usage.completion_tokens for result in outputs)
        n_reasoning = sum(result.usage.reasoning_tokens for result in outputs)
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_output,
            "total_tokens": n_prompt + n_output,
            "prompt_tokens_details": {"cached_tokens": n_cached},
            "completion_tokens_details": {"reasoning_tokens": n_reasoning},
        }
        times = timings(outputs[0], outputs[0].usage.completion_tokens)
        return self._head | {"choices": choices, "usage": usage, "timings": times}


def reason_of(result: Result) -> dict[str, Any]:
    """The end of an output in the words that clients know, and in ours if there are none."""
    if result.finish_reason is FinishReason.STOP:
        return {"finish_reason": "tool_calls" if result.calls_tools else "stop"}
    reason = {"finish_reason": "length"}  # all others cut the text
    if result.finish_reason is not FinishReason.LENGTH:
        reason["x_finish"] = str(result.finish_reason)
    return reason


def without_excess(result: Result) -> Result:
    """*result* without the token that the engine makes where none is asked for."""
    counts = replace(result.usage, completion_tokens=0, reasoning_tokens=0)
    return replace(
        result,
        text="",
        reasoning="",
        logprobs=(),
        tool_calls=(),
        finish_reason=FinishReason.LENGTH,
        usage=counts,
    )


def _name(piece: bytes) -> str:
    return piece.decode(errors="backslashreplace")


# -- completions -------------------------------------------------------------------------


class CompletionBody(TextBody):
    """Prompts that are to go on."""

    rules: ClassVar[fields.Rules] = fields.COMPLETIONS

    prompt: str | TokenIds | Several[str] | Several[TokenIds]
    """A text or token ids, or a list of them."""
    n_predict: Limit | None = None
    """llama.cpp's name of max_tokens, which wins; -1: what is left of the context."""
    echo: bool | None = None
    """Whether the prompt comes before the output; with max_tokens 0, alone."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | Literal[False] | None = None
    """Likely tokens that are listed with each token; false: nothing is listed."""
    best_of: int | None = None
    """As many as n, if it is given."""
    suffix: str | None = None
    """The text behind the output, of models that can fill gaps."""

    def model_post_init(self, context: Any) -> None:  # noqa: ARG002
        """Take n_predict for max_tokens, and false for no log-probabilities."""
        if self.logprobs is False:
            self.logprobs = None
        if self.max_tokens is None and self.n_predict not in NO_LIMIT:
            self.max_tokens = self.n_predict


class Echo(NamedTuple):
    """The part of an answer that repeats its prompt; nothing without echo."""

    text: str = ""
    first: bytes | None = None  # the bytes of its first token


async def read_completion(
    body: CompletionBody, service: Service
) -> tuple[TextRequest, Sequence[Echo]]:
    """The request of *body*, and an echo of each prompt. Raises Failure and PyllamaError."""
    model = service.find(body.model, Operation.GENERATE)
    if body.best_of not in (None, body.n or 1):
        reason = "outputs are not compared: give n, or the same number"
        raise refused("best_of", reason, "unsupported")
    is_one = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    texts: Any = [body.prompt] if is_one else body.prompt
    service.check_texts("prompt", len(texts))
    service.check_outputs(model, len(texts), body.n)

    # The scores of the prompt come with the echo. The engine makes one token at least.
    sampling: dict[str, Any] = {}
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
    if body.echo:
        sampling["prompt_logprobs"] = body.logprobs
        if body.max_tokens == 0:
            sampling["max_tokens"] = 1
    names = body.form.names
    params = body.params(model, service, names, **sampling)

    engine = model.engine
    prompts: list[Prompt] = []
    echoes: list[Echo] = []
    for text in texts:
        prompt, echo = text, Echo()
        # Text on both sides: the model fills the gap between them.
        if body.suffix:
            prompt = await _gap(engine, text, body.suffix, has_echo=bool(body.echo))
        # The tokens that are computed are those that are told.
        elif body.echo:
            prompt = await engine.tokenize(text)
            is_text = isinstance(text, str)
            repeated = text if is_text else await engine.detokenize(prompt)
            echo = Echo(repeated, (await engine.pieces(prompt[:1]))[0])
        prompts.append(prompt)
        echoes.append(echo)
    options, streams = body.options(model, service), bool(body.stream)
    request = TextRequest(model, tuple(prompts), params, options, streams, names)
    return request, echoes


async def _gap(
    engine: AsyncEngine, prompt: Any, suffix: str, *, has_echo: bool
) -> list[int]:
    """The tokens that ask for the text between *prompt* and *suffix*."""
    vocab = engine.info.vocab
    if not {*GAP} <= vocab.fill.keys() or has_echo or not isinstance(prompt, str):
        reason = "it goes with models that have tokens for gaps, and without echo"
        raise refused("suffix", reason, "unsupported")
    tokens = [vocab.bos.token_id] if vocab.adds_bos and vocab.bos else []
    for name, text in zip(GAP, (prompt, suffix, ""), strict=True):
        of_text = await engine.tokenize(text, add_special=False, parse_special=False)
        tokens += [vocab.fill[name].token_id, *of_text]
    return tokens


class CompletionCodec:
    """
    Writes the answer to a completion. Choices count the outputs of all prompts.

    Args:
        echoes: of each prompt.
    """

    blocks = None

    def __init__(
        self,
        request: TextRequest,
        body: CompletionBody,
        echoes: Sequence[Echo],
        config: ServeConfig,
    ) -> None:
        self._is_llama = config.in_place_of is not None
        self._chunks = Chunks("cmpl", "text_completion", request, body, config)
        self._n = request.params.n
        self._echoes, self._has_output = echoes, body.has_output
        self._lists = request.params.logprobs is not None
        scores = request.params.prompt_logprobs is not None
        self._waits = scores or not self._has_output
        self._unsaid = [echo.text for echo in echoes for _ in range(self._n)]
        self._listed = [LegacyLogprobs() for _ in self._unsaid]
        self._scores: dict[int, tuple[TokenLogprobs, ...]] = {}  # by prompt

    def begin(self, n_prompt: int) -> bytes:  # noqa: ARG002
        """Nothing: the first text says all."""
        return b""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """The new text."""
        if self._waits:  # all of it comes at the end
            return b""
        index = prompt * self._n + delta.index
        logprobs = None
        if self._lists:
            logprobs = self._listed[index].take(delta.logprobs) | self._both(
                delta.logprobs
            )
        choice = b'"text":%b,"logprobs":%b,"finish_reason":null'
        text = to_json(self._say(index) + delta.text)
        return self._chunks.frame(index, choice % (text, to_json(logprobs)))

    def ended(self, prompt: int, result: Result) -> bytes:
        """Why an output ended; all of it, if it waited."""
        choice = self._choice(prompt, result)
        # What was told as it came is not told again.
        if not self._waits:
            choice |= {"text": self._say(choice["index"]), "logprobs": None}
        index, times = choice.pop("index"), result if self._is_llama else None
        return self._chunks.frame(index, to_json(choice)[1:-1], times)

    def failed(self, failure: Failure) -> bytes:
        """An error after the answer began."""
        return event(failure.body())

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:
        """The counts of tokens, if they are asked for, and the end."""
        return self._chunks.done(self._all_without_excess(results))

    def whole(self, results: Sequence[Sequence[Result]]) -> dict[str, Any]:
        """The answer at once."""
        choices = [
            self._choice(prompt, result)
            for prompt, of_prompt in enumerate(results)
            for result in of_prompt
        ]
        return self._chunks.answer(choices, self._all_without_excess(results))

    def _both(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Log-probabilities in the form of chats, too, as llama-server tells them."""
        return chat_logprobs(entries) if self._is_llama else {}

    def _say(self, index: int) -> str:
        text, self._unsaid[index] = self._unsaid[index], ""
        return text

    def _choice(self, prompt: int, result: Result) -> dict[str, Any]:
        result, echo = self._without_excess(result), self._echoes[prompt]
        logprobs, text = None, echo.text + result.text
        if self._lists:  # only the first output has the scores of the prompt
            scores = self._scores.setdefault(prompt, result.prompt_logprobs)
            of_text = None if echo.first is None else text
            entries = (*scores, *result.logprobs)
            listed = LegacyLogprobs(echo.first).take(entries, of_text)
            logprobs = listed | self._both(entries)
        index = prompt * self._n + result.index
        choice = {"index": index, "text": text, "logprobs": logprobs}
        return choice | reason_of(result)

    def _all_without_excess(
        self, results: Sequence[Sequence[Result]]
    ) -> list[list[Result]]:
        return [
            [self._without_excess(result) for result in of_prompt]
            for of_prompt in results
        ]

    def _without_excess(self, result: Result) -> Result:
        return result if self._has_output else without_excess(result)


class LegacyLogprobs:
    """
    `logprobs` of one output of a completion, part by part.

    Args:
        first: the bytes of a first token that nothing is known of.
    """

    def __init__(self, first: bytes | None = None) -> None:
        self._first = () if first is None else (first,)
        self._at = 0  # characters before the next token
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def take(
        self, entries: Sequence[TokenLogprobs], text: str | None = None
    ) -> dict[str, Any]:
        """
        The next tokens.

        Args:
            text: all of it, from its beginning. A token that it does not show, such as one
                that begins prompts, takes no room.
        """
        first, self._first = self._first, ()
        pieces, nothing = [*first, *(e.piece for e in entries)], [None] * len(first)
        return {
            "tokens": [_name(piece) for piece in pieces],
            "token_logprobs": nothing + [max(e.logprob, LEAST) for e in entries],
            "top_logprobs": nothing + [_likely(entry) for entry in entries],
            "text_offset": [self._place(piece, text) for piece in pieces],
        }

    def _place(self, piece: bytes, text: str | None) -> int:
        """The beginning of *piece*; the next one begins behind it."""
        at, characters = self._at, self._decoder.decode(piece)
        for form in (
            characters,
            characters.removeprefix(" "),
        ):  # some models add a blank
            if text is None or text.startswith(form, at):
                self._at += len(form)
                break
        return at


def _likely(entry: TokenLogprobs) -> dict[str, float]:
    """The best token of each name, and the one that is there."""
    tops = zip(entry.top_pieces, entry.top, strict=True)
    tokens = [(piece, logprob) for piece, (_, logprob) in tops]
    tokens.append((entry.piece, entry.logprob))
    return {_name(piece): max(logprob, LEAST) for piece, logprob in reversed(tokens)}
