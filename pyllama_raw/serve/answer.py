"""
A request for text as any dialect makes it of a body, and its answer, whole or in events.

A dialect is a file: a pydantic model of its body, a function that reads a TextRequest of it, and a
Codec, which writes the answer in the words of the dialect. This file knows no field of a body. What
several dialects write is at its end: events, blocks and times.

Rules:
1. What goes wrong before the answer begins is a status; what goes wrong later is an event.
2. The requests end when the client leaves, wherever they are: the gate cancels the answer.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple, Protocol, Self

from anyio import Lock, create_task_group, current_time, fail_after, sleep
from anyio.abc import TaskGroup
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pyllama_raw import (
    ChatOptions,
    Delta,
    FinishReason,
    Generation,
    Prompt,
    PyllamaError,
    RequestOptions,
    Result,
    SamplingParams,
)
from pyllama_raw.errors import (
    BadGrammar,
    BadMedia,
    BadSchema,
    InvalidRequest,
    PromptTooLong,
    SamplingFailed,
    Unsupported,
    first_of,
)
from pyllama_raw.options.sampling import CONSTRAINTS
from pyllama_raw.replies.parser import CallDelta, Part
from pyllama_raw.serve.failures import JSON, Failure, failure_of
from pyllama_raw.serve.service import Exchange, ServedModel, Service, retry_s

DONE = b"data: [DONE]\n\n"
STREAMED: dict[int | str, dict[str, Any]] = {  # of endpoints that answer either way
    200: {"content": {"text/event-stream": {}}}
}
HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
UNBEGUN = {  # ends before the answer began
    FinishReason.DEADLINE: (504, "deadline_s was over before the answer began"),
    FinishReason.CLOSED: (503, "the service ends: ask another one, or later"),
}
MESSAGE = re.compile(r"messages\[(\d+)\]")
# Signs that some clients take for ends of lines, as Python's splitlines() does, and their escapes: in
# the JSON of an event both mean the same.
BREAKS = {
    "\x85".encode(): rb"\u0085",
    "\u2028".encode(): rb"\u2028",
    "\u2029".encode(): rb"\u2029",
}


# -- ends at a line ----------------------------------------------------------------------


class LineLimits(NamedTuple):
    """Ends of an output by its lines, as editors want them."""

    n_indent: int = 0
    """Blanks that each line behind the first one has at least."""
    limit_s: float = inf
    """Seconds since the first text after which the next end of a line is the output's."""


class LineEnd:
    """One output that ends at a line."""

    def __init__(self, limits: LineLimits) -> None:
        self.is_over = False
        self.text = ""
        self._limits = limits
        self._line_at = (
            0  # the beginning of the latest line whose first text is not seen
        )
        self._began = current_time()

    def take(self, text: str) -> str:
        """The part of the next *text* that is told."""
        if self.is_over:
            return ""
        n_before, n_indent = len(self.text), self._limits.n_indent
        self.text += text
        # A line with fewer blanks ends the output before its first text.
        while n_indent and (at := self.text.find("\n", self._line_at)) >= 0:
            line = self.text[at + 1 :]
            content = line.lstrip(" \t")
            if not content:
                break
            n_blanks = len(line) - len(content)
            if n_blanks < n_indent and content[0] != "\n":
                self._cut(at + 1 + n_blanks)
                break
            self._line_at = at + 1
        # The first end of a line behind the time ends it, too.
        at = self.text.find("\n", n_before)
        if at >= 0 and current_time() - self._began > self._limits.limit_s:
            self._cut(at + 1)
        return self.text[n_before:]

    def _cut(self, end: int) -> None:
        self.text, self.is_over = self.text[:end], True


# -- the request -------------------------------------------------------------------------


class PromptText(NamedTuple):
    """A prompt as the model gets it."""

    text: str
    n_tokens: int  # with the rows of images and sounds


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request of a client, in the words of the engine."""

    model: ServedModel
    prompts: tuple[Prompt, ...]  # one for a chat
    params: SamplingParams  # with n outputs for each prompt
    options: RequestOptions
    streams: bool
    names: Mapping[str, str] = field(default_factory=dict)
    """Fields of the body, by the names that errors of the engine have for them."""
    media: list[str] = field(default_factory=list)
    """The places of its images and sounds in the body."""
    old_media: list[dict[str, Any] | None] = field(default_factory=list)
    """For each of media: its part of the chat, if it is of the history."""
    origins: Sequence[str] = ()
    """The places of the messages in the body, if they are not `messages`."""
    lines: LineLimits | None = None
    """Ends of outputs at a line."""

    async def count(self) -> int:
        """Tokens of all prompts."""
        count = self.model.engine.count
        while True:
            try:
                counts = [await count(p, **self.of_chat) for p in self.prompts]
                return sum(counts)
            except BadMedia as error:
                if not self.goes_on_without(error):
                    raise

    async def texts(self) -> list[PromptText]:
        """The prompts as the model gets them, with the names of control tokens."""
        engine, texts = self.model.engine, []
        for prompt in self.prompts:
            tokens = await engine.tokenize(prompt, **self.of_chat)
            # Rows of images and sounds are negative, and no text.
            text = await engine.detokenize([t for t in tokens if t >= 0], special=True)
            texts.append(PromptText(text, len(tokens)))
        return texts

    @property
    def of_chat(self) -> Any:
        """Options of the chat template and of the reply."""
        names = ChatOptions.__annotations__
        return {n: value for n, value in self.options.items() if n in names}

    def goes_on_without(self, error: BadMedia) -> bool:
        """
        Put a short text in place of the medium that *error* is about, and go on.

        False: it is not of the history, which clients send again with each request.
        """
        at = error.index
        if at is None or not 0 <= at < len(self.old_media):
            return False
        part = self.old_media[at]
        if part is None:
            return False
        kind = part["type"]
        part.clear()
        part |= {"type": "text", "text": f"[{kind}]"}
        del self.media[at], self.old_media[at]
        return True

    def failure(self, error: PyllamaError) -> Failure:
        """An *error* of the engine, with the field of the body that it is about."""
        if isinstance(error, SamplingFailed):
            params = ("suppress_tokens", "logit_bias", *CONSTRAINTS)
            narrowing = [
                self.names.get(n, n) for n in params if getattr(self.params, n)
            ]
            # No other try can end otherwise, so it is the request's fault and not ours.
            if narrowing:
                reason = (
                    f"they leave no token that may come next ({error}): loosen them"
                )
                message = f"{', '.join(narrowing)}: {reason}"
                return Failure(400, error.code, message, narrowing[0])
        failure = failure_of(error, retry_s([self.model.engine]))
        param: str | None = None
        match error:
            case BadMedia(index=int(index)) if index < len(self.media):
                param = self.media[index]
            case PromptTooLong():
                param = self.names.get("prompt", "prompt")
            case BadGrammar():
                param = self.names.get("grammar", "grammar")
            case InvalidRequest() | BadSchema():
                param = self.names.get(error.name)
                # A message of the chat comes from a place of the body with another name.
                place = MESSAGE.match(error.name)
                number = int(place[1]) if place else len(self.origins)
                if not param:
                    is_there = number < len(self.origins)
                    param = self.origins[number] if is_there else error.name
            case Unsupported():
                param = self.names.get(error.operation)
        failure.param = param or failure.param
        return failure


# -- the answer --------------------------------------------------------------------------


class TextAnswer(Response):
    """An answer that is computed while it is sent."""

    def __init__(self, service: Service, request: TextRequest, codec: Codec) -> None:
        super().__init__()
        self._service, self._request, self._codec = service, request, codec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return when all is sent, or the client has left."""
        events = EventStream(send)
        exchange: Exchange = scope["state"]["exchange"]
        exchange.model = self._request.model.name
        last: ASGIApp | None = None  # of a client that has left
        with suppress(TimeoutError):  # nobody reads what is sent
            while True:
                try:
                    last = await self._run(exchange, events)
                    break
                except (Failure, PyllamaError) as error:
                    # A medium of the history that cannot be read is no reason to refuse the chat
                    # for ever.
                    if (
                        isinstance(error, BadMedia)
                        and not events.has_begun
                        and self._request.goes_on_without(error)
                    ):
                        self._service.traffic.left_out["image"] += 1
                        continue
                    failure = self._failure(error)
                if failure.status in (429, 503):
                    exchange.refused = failure.code
                # A status may still be sent, or is said already.
                if not events.has_begun:
                    last = failure.answer(scope["path"])
                else:
                    await events.write(self._codec.failed(failure))
                    last = events.end
                break
        if last is not None:
            await last(scope, receive, send)

    async def _run(self, exchange: Exchange, events: EventStream) -> ASGIApp:
        """Compute the answer, and send all of it but the last message."""
        request = self._request
        options = self._service.text_options_of(exchange, request.options)
        generate = request.model.engine.generate
        generations = [generate(p, request.params, **options) for p in request.prompts]
        try:
            async with AsyncExitStack() as stack:
                for generation in generations:
                    await stack.enter_async_context(generation)
                if request.streams:
                    await self._stream(generations, events)
                    return events.end
                ends: list[dict[int, LineEnd]] = [{} for _ in generations]
                async with together() as group:
                    for generation, of_prompt in zip(generations, ends, strict=True):
                        if request.lines is not None:
                            group.start_soon(self._watch, generation, of_prompt)
                        elif self._codec.blocks is not None:
                            group.start_soon(self._codec.blocks.read, generation)
                        else:
                            group.start_soon(generation.collect_all)
                return self._whole(generations, ends)
        finally:
            # All are left now, so what a client has not waited for counts, too.
            for generation in generations:
                usage = generation.usage
                exchange.n_prompt += usage.prompt_tokens
                exchange.n_cached += usage.cached_tokens
                exchange.n_output += usage.completion_tokens

    async def _watch(self, generation: Generation, ends: dict[int, LineEnd]) -> None:
        """Read all of *generation*, until each of its outputs is at its end of a line."""
        async for delta in generation:
            self._end_of(delta, generation, ends)

    def _end_of(
        self, delta: Delta, generation: Generation, ends: dict[int, LineEnd]
    ) -> Delta | None:
        """*delta* as far as it is told; None: its output was over before."""
        assert self._request.lines is not None
        end = ends.get(delta.index)
        if end is None:
            end = ends[delta.index] = LineEnd(self._request.lines)
        if end.is_over:
            return None
        delta = replace(delta, text=end.take(delta.text))
        is_over = len(ends) == self._request.params.n
        if is_over and all(end.is_over for end in ends.values()):
            generation.cancel()
        return delta

    def _whole(
        self, generations: Sequence[Generation], ends: Sequence[dict[int, LineEnd]]
    ) -> Response:
        """The answer at once; *ends* have the texts of outputs that ended at a line."""
        results = [
            [
                replace(result, text=of_prompt[result.index].text)
                if result.index in of_prompt
                else result
                for result in generation.results
            ]
            for generation, of_prompt in zip(generations, ends, strict=True)
        ]
        _check_begun([result for of_prompt in results for result in of_prompt])
        n_cached = sum(of_prompt[0].usage.cached_tokens for of_prompt in results)
        answer = self._codec.whole(results)
        # Outputs that failed stand beside the others.
        n = self._request.params.n
        failed = [
            {"index": prompt * n + index} | self._failure(error).body()
            for prompt, generation in enumerate(generations)
            for index, error in generation.errors.items()
        ]
        if failed and isinstance(answer, list):
            answer = [*answer, *failed]
        elif failed:
            answer |= {"errors": failed}
        return JSON(answer, headers={"x-cached-tokens": str(n_cached)})

    async def _stream(
        self, generations: Sequence[Generation], events: EventStream
    ) -> None:
        config = self._service.config
        async with together() as pings:
            pings.start_soon(events.ping, config.ping_s, config.send_s)
            async with together() as group:
                for prompt, generation in enumerate(generations):
                    group.start_soon(self._write, prompt, generation, events)
            results = [generation.results for generation in generations]
            await events.write(self._codec.done(results))
            pings.cancel_scope.cancel()

    async def _write(
        self, prompt: int, generation: Generation, events: EventStream
    ) -> None:
        """Events of one generation, each as soon as there is something to tell."""
        codec, has_begun = self._codec, False
        of_lines: dict[int, LineEnd] = {}
        async for delta in generation:
            if self._request.lines is not None:
                part = self._end_of(delta, generation, of_lines)
                if part is None:
                    continue
                delta = part  # noqa: PLW2901 - the part of it that is told
            frames = b""
            if not has_begun:
                frames = codec.begin(len(generation.prompt_token_ids))
                has_begun = True
            await events.write(frames + codec.delta(prompt, delta))
        errors, results = generation.errors, generation.results
        if not events.has_begun:
            _check_begun(results)
        frames = b"" if has_begun else codec.begin(len(generation.prompt_token_ids))
        ends = [codec.ended(prompt, result) for result in results]
        fails = [codec.failed(self._failure(error)) for error in errors.values()]
        await events.write(frames + b"".join(ends + fails))

    def _failure(self, error: Failure | PyllamaError) -> Failure:
        return error if isinstance(error, Failure) else self._request.failure(error)


def _check_begun(results: Sequence[Result]) -> None:
    """Raise Failure if an end came before any text."""
    for result in results:
        reason = result.finish_reason
        if reason is FinishReason.CLOSED or (
            reason is FinishReason.DEADLINE and not result.token_ids
        ):
            status, message = UNBEGUN[reason]
            raise Failure(status, str(reason), message)


@asynccontextmanager
async def together() -> AsyncIterator[TaskGroup]:
    """A task group whose first error comes out as it is."""
    try:
        async with create_task_group() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None


class EventStream:
    """
    Frames of one answer, with comments when nothing else comes.

    It begins with what is written first; several tasks may write.
    """

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send
        self._lock = Lock()
        self._written = current_time()

    async def write(self, frames: bytes) -> None:
        """Send complete frames. A client that reads slowly holds up nobody but itself."""
        if not frames:
            return
        for sign, escape in BREAKS.items():
            frames = frames.replace(sign, escape)
        async with self._lock:
            if not self.has_begun:
                self.has_begun = True
                start = {"type": "http.response.start", "status": 200}
                await self._send({**start, "headers": HEADERS})
            part = {"type": "http.response.body", "body": frames, "more_body": True}
            await self._send(part)
            self._written = current_time()

    async def ping(self, every_s: float, limit_s: float) -> None:
        """
        Write a comment whenever *every_s* have passed in silence; for ever.

        Raises:
            TimeoutError: the client has not read for *limit_s* more.
        """
        while True:
            await sleep(max(self._written + every_s - current_time(), 0.0))
            if current_time() >= self._written + every_s:
                with fail_after(limit_s):
                    await self.write(b": ping\n\n")

    async def end(self, *_: object) -> None:
        """Tell the server that all is written, as an application."""
        await self._send({"type": "http.response.body", "body": b""})


# -- what dialects write with ------------------------------------------------------------


class Codec(Protocol):
    """Output *index* of a delta or result is that of `n`, *prompt* that of the list of prompts."""

    @property
    def blocks(self) -> Blocks | None:
        """The blocks of the one output, in their order; None: its answer has none."""

    def begin(self, n_prompt: int) -> bytes:
        """Frames before the first delta; the prompt has *n_prompt* tokens."""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """Frames of new text."""

    def ended(self, prompt: int, result: Result) -> bytes:
        """Frames of the end of an output."""

    def failed(self, failure: Failure) -> bytes:
        """Frames of an error after the answer began."""

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:
        """Frames when all is written."""

    def whole(self, results: Sequence[Sequence[Result]]) -> Any:
        """The answer at once, for a JSON encoder; results by prompt, then by index."""


def event(value: Any) -> bytes:
    """A frame with *value* as JSON on one line."""
    return b"data: %b\n\n" % to_json(value)


def named_event(name: str, /, **fields: Any) -> bytes:
    """A frame of an event that has its name in *fields*, too, as their type."""
    return b"event: %b\n%b" % (name.encode(), event({"type": name, **fields}))


# -- answers that are made of blocks -----------------------------------------------------


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of an answer."""

    kind: type[Part]
    index: int  # in the answer
    pieces: list[str]
    call_id: str = ""
    name: str = ""  # of the tool

    @classmethod
    def of(cls, part: Part, index: int) -> Self:
        """A block that begins with *part*."""
        if isinstance(part, CallDelta):
            tool = part.id or "", part.name or ""
            return cls(CallDelta, index, [part.arguments], *tool)
        return cls(type(part), index, [part.text])

    @property
    def text(self) -> str:
        """Thoughts, a text, or the arguments of a call."""
        return "".join(self.pieces)


class Growth(NamedTuple):
    """The change of an answer by one part."""

    closed: Block | None  # the block before, if it is at its end
    block: Block
    is_new: bool  # the block begins
    text: str  # that is new in it


class Blocks:
    """The blocks of an answer that is being written; only the last one grows."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._last: object = None  # the kind and the call of the last block

    async def read(self, generation: Generation) -> None:
        """Take all parts of *generation*, whose results have them without their order."""
        async for delta in generation:
            for part in delta.parts:
                self.take(part)

    def take(self, part: Part) -> Growth:
        """Add *part* to the last block, or begin one with it."""
        text = part.arguments if isinstance(part, CallDelta) else part.text
        place = type(part), getattr(part, "index", None)
        if place == self._last:
            self.all[-1].pieces.append(text)
            return Growth(None, self.all[-1], False, text)
        closed = self.all[-1] if self.all else None
        self._last = place
        self.all.append(Block.of(part, len(self.all)))
        return Growth(closed, self.all[-1], True, text)


# -- times of an answer ------------------------------------------------------------------


def timings(result: Result, n_output: int) -> dict[str, float]:
    """
    Times of an answer, as llama.cpp's server tells them in all its dialects.

    The first output token belongs to the prompt.
    """
    n_cached = result.usage.cached_tokens
    n_prompt, times = result.usage.prompt_tokens - n_cached, result.timings
    n_drafted, n_accepted = result.usage.drafted_tokens, result.usage.accepted_tokens
    return {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        **_speed("prompt", n_prompt, times.prefill_s),
        "predicted_n": n_output,
        **_speed("predicted", max(n_output - 1, 0), times.decode_s),
        **({"draft_n": n_drafted, "draft_n_accepted": n_accepted} if n_drafted else {}),
    }


def _speed(name: str, n: int, seconds: float | None) -> dict[str, float]:
    ms = 1e3 * (seconds or 0.0)
    return {
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / n if n else 0.0,
        f"{name}_per_second": 1e3 * n / ms if ms else 0.0,
    }
