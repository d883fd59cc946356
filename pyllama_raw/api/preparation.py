"""
From what a caller asks for to requests of the engine, and what becomes of each of their outputs.

All that can be checked is checked here, in the caller's task, before the engine thread
hears of a request; errors name the parameter.

A `Choice` is one output: events in, deltas and a result out. Rules:
1. Tokens become text here, in the reader's thread, while the engine computes the next ones.
2. A parser takes an output apart only if it may be anything else than content. Otherwise the
   bytes of a step become text at once.
3. The result is made once, when the output has ended.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from anyio.lowlevel import checkpoint
from pydantic import BaseModel

from pyllama_raw.api.results import Delta, Result, Usage, timings_of
from pyllama_raw.core import request as core
from pyllama_raw.core.request import (
    Finished,
    FinishReason,
    Moments,
    Namespace,
    Private,
    Request,
    Scoring,
    TokenLogprobs,
)
from pyllama_raw.core.text import NO_STOPS, Detokenizer, StopStrings
from pyllama_raw.engine.info import Operation
from pyllama_raw.engine.mailbox import Kind, Workers
from pyllama_raw.errors import (
    InvalidRequest,
    InvalidSampling,
    PromptTooLong,
    PyllamaError,
    Unsupported,
    reading,
)
from pyllama_raw.options.arguments import reading_prompt
from pyllama_raw.options.requests import ChatOptions, RequestOptions
from pyllama_raw.options.sampling import SamplingParams, with_declared
from pyllama_raw.prompts.chat import ChatSettings
from pyllama_raw.prompts.messages import Message, is_chat, with_history
from pyllama_raw.prompts.prompt import MAX_COUNTED, MediaPrompt, Prompt, PromptEncoder
from pyllama_raw.prompts.reply import (
    PlannedReply,
    ReplyForm,
    ReplyReader,
    ReplyStops,
    stop_strings,
)
from pyllama_raw.replies.parser import (
    Content,
    Part,
    Reasoning,
    ToolCall,
    calls_of,
    merged,
    text_of,
)

if TYPE_CHECKING:
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.engine.thread import EngineThread
    from pyllama_raw.prompts.reply_plan import Replies


NO_NAMES: Mapping[int, bytes] = MappingProxyType({})


class Choice:
    """The part of one output that has been read."""

    def __init__(
        self,
        index: int,
        request: Request,
        seed: int,
        pieces: Sequence[bytes],
        names: Mapping[int, bytes] = NO_NAMES,
    ) -> None:
        """
        Args:
            pieces: bytes of each token; control tokens have none.
            names: names of control tokens, if the request asks for log-probabilities.
        """
        self.index = index
        self.request = request
        self.finished: Finished | None = None
        self.error: PyllamaError | None = None
        self._seed = seed
        self._pieces, self._names = pieces, names
        self._text = OutputText(request, pieces)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # one a token, or none at all
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._n_shown = 0  # tokens that deltas have shown
        self._is_fresh = False
        self._result: Result | None = None  # once it has ended

    def branch(self, index: int, request: Request) -> Choice:
        """Another output of the same prompt, and more of it perhaps."""
        return Choice(index, request, self._seed, self._pieces, self._names)

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.error is not None

    @property
    def n_tokens(self) -> int:
        return len(self._tokens)

    def take(self, event: core.Event) -> bool:
        """Add one event; True if take_delta() has something to show since now."""
        if type(event) is core.NewTokens:
            self._tokens += event.tokens
            if event.logprobs:
                self._logprobs += self._spelt(event.logprobs)
            self._text.take(event.tokens)
        else:
            assert isinstance(event, Finished)
            self.finished, self.error = event, event.error
            if event.prompt_logprobs:
                self._prompt_logprobs = tuple(self._spelt(event.prompt_logprobs))
            if not self._text.finish():
                return False
        was_fresh, self._is_fresh = self._is_fresh, True
        return not was_fresh

    def _spelt(self, entries: Iterable[TokenLogprobs]) -> Iterator[TokenLogprobs]:
        """*entries* with the bytes of their tokens."""
        for entry in entries:
            top = tuple(self._piece(token) for token, _ in entry.top)
            yield entry._replace(piece=self._piece(entry.token_id), top_pieces=top)

    def _piece(self, token: int) -> bytes:
        return self._pieces[token] or self._names.get(token, b"")

    def take_delta(self) -> Delta:
        """The part that was not shown before."""
        self._is_fresh = False
        text, parts = self._text.take_shown()
        tokens = tuple(self._tokens[self._n_shown :])
        logprobs = tuple(self._logprobs[self._n_shown :])
        self._n_shown = len(self._tokens)
        return Delta(text, tokens, self.index, logprobs, parts)

    def result(self, elapsed_s: float) -> Result:
        """All of it; an output that was left has taken *elapsed_s*."""
        if self._result is not None:
            return self._result
        # Its reader has left it if there is no end: more of it may come yet.
        end = self.finished or _left(self.request, elapsed_s)
        assert end.reason is not None
        usage = Usage(
            end.n_prompt,
            len(self._tokens),
            end.n_cached,
            end.cache_tier,
            sum(span.stop - span.start for span in self.request.spans),
            self._text.n_reasoning,
            end.n_drafted,
            end.n_accepted,
        )
        text, reasoning, calls = self._text.whole()
        result = Result(
            text=text,
            token_ids=tuple(self._tokens),
            finish_reason=end.reason,
            usage=usage,
            timings=timings_of(end),
            seed=self._seed,
            index=self.index,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            sampler=end.sampler,
            finish_detail=end.detail,
            reasoning=reasoning,
            tool_calls=calls,
        )
        if self.finished is not None:
            self._result = result
        return result


def _left(request: Request, elapsed_s: float) -> Finished:
    """The end of an output that nobody waits for: all that is known of it is its time."""
    moments = Moments(0.0, None, None, elapsed_s, ())
    n_prompt, reason = request.n_prompt, FinishReason.CANCELLED
    return Finished(request.request_id, reason, None, n_prompt, 0, 0, None, 0, moments)


class OutputText:
    """
    The text of one output, which is all content, or parts that a parser makes if the output
    needs one.
    """

    def __init__(self, request: Request, pieces: Sequence[bytes]) -> None:
        self._names, self._pieces = request.names, pieces
        self._ends = request.stop_token_ids
        form = request.reply
        self._shows_parts = isinstance(form, ReplyForm)
        self._reader: ReplyReader | None = None
        if isinstance(form, ReplyForm) and form.make_parser is not None:
            self._reader = ReplyReader(form, request.stop, request.stop_token_ids)
        else:
            self._detokenizer = Detokenizer(request.stop)
        self._texts: list[str] = []  # without a parser
        self._parts: list[Part] = []  # with one
        self._n_shown = 0  # texts or parts that deltas have shown
        self._n_silent = 0  # tokens that made no part yet
        self.n_reasoning = 0  # tokens

    def take(self, tokens: tuple[int, ...]) -> None:
        """Take in the next tokens, of which the last one may end the output."""
        if self._reader is None:
            # All of it is content. A token that ends the output has no text.
            tokens_shown = tokens[:-1] if tokens[-1] in self._ends else tokens
            pieces = [self._pieces[token] for token in tokens_shown]
            if self._names:
                pairs = zip(pieces, tokens_shown, strict=True)
                pieces = [piece or self._names.get(t, b"") for piece, t in pairs]
            if text := self._detokenizer.push(b"".join(pieces)):
                self._texts.append(text)
            return
        for token in tokens:
            piece = self._pieces[token] or self._names.get(token, b"")
            self._n_silent += 1
            self._add(self._reader.take(token, piece))

    def finish(self) -> bool:
        """Take in what was held back; whether there is more text now."""
        if self._reader is None:
            text = self._detokenizer.flush()
            self._texts += [text] if text else []
            return text != ""
        n_before = len(self._parts)
        self._add(self._reader.finish())
        return len(self._parts) > n_before

    def _add(self, parts: Sequence[Part]) -> None:
        """A token that makes no part belongs to the part that comes next."""
        if not parts:
            return
        self._parts += parts
        if isinstance(parts[0], Reasoning):
            self.n_reasoning += self._n_silent
        self._n_silent = 0

    def whole(self) -> tuple[str, str, tuple[ToolCall, ...]]:
        """The content, the reasoning and the calls of all so far."""
        if self._reader is None:
            return "".join(self._texts), "", ()
        parts = self._parts
        return text_of(parts, Content), text_of(parts, Reasoning), calls_of(parts)

    def take_shown(self) -> tuple[str, tuple[Part, ...]]:
        """The content and the parts that were not shown before, neighbours of a kind as one."""
        if self._reader is None:
            text = "".join(self._texts[self._n_shown :])
            self._n_shown = len(self._texts)
            return text, (Content(text),) if text and self._shows_parts else ()
        new = self._parts[self._n_shown :]
        self._n_shown = len(self._parts)
        if len(new) > 1:
            new = merged(new)
        text = text_of(new, Content)
        return text, tuple(new) if self._shows_parts else ()


T = TypeVar("T")

MAX_SEED = 2**32 - 2
MANY_TOKENS = 256  # named by a request: an event loop may wait for as many
REPLY_OPTIONS = ("tool_choice", "parallel_tool_calls", "reply")
READS_PROMPTS = (
    "the model reads prompts with an encoder, and predicts none of their tokens"
)
LONG_STOP = 256  # characters of stop strings, likewise


class Compiled(NamedTuple):
    """Work that a worker has done for a request: its tokens, and rules of its outputs."""

    prompt: MediaPrompt
    reply: PlannedReply
    stop: StopStrings
    rules: object  # of the outputs, for the executor
    names: Mapping[int, bytes]  # of tokens without a piece that count as text
    controls: Mapping[int, bytes]  # names of control tokens, where any of them is shown


class Preparation:
    """Makes the requests of one engine."""

    def __init__(
        self,
        parts: EngineParts,
        encoder: PromptEncoder,
        thread: EngineThread,
        workers: Workers,
        request_ids: Iterator[int],
    ) -> None:
        """
        Args:
            thread: of the engine; deadlines are moments on its clock.
            workers: of the engine.
            request_ids: gives every request of the engine another id.
        """
        self._workers = workers
        self._adapters = thread.adapters
        self._parts = parts
        self._encoder = encoder
        self._control_names: Mapping[int, bytes] | None = None  # once they are needed
        self._request_ids = request_ids
        self.n_relaxed = 0  # schemas of tools of which a part was not kept

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        started: float,
    ) -> tuple[Choice, ...]:
        """
        The outputs for *prompt*, with their checked requests.

        Args:
            options: as checked_options() gives them.
            started: when the caller began to wait, on the engine clock.

        Raises:
            InvalidRequest, PromptTooLong, BadMedia, Unsupported, ClosedError.
        """
        parts, vocab = self._parts, self._parts.vocab
        parts.capabilities.check(Operation.GENERATE)  # a reload may have come
        if params.from_model:
            params = with_declared(params, parts.metadata)
        _check_tokens(params, vocab.n_tokens)
        salt = options.get("cache_salt")
        is_private = salt is None and parts.cache_scope == "salt"
        namespace: Namespace = Private() if is_private else salt
        compiled = await self._run(
            self._kind(prompt, params, options),
            partial(self._compiled, prompt, params, options, namespace),
            options.get("client"),
        )
        tokens, spans = compiled.prompt.tokens, compiled.prompt.spans
        params, form, _, ends, n_relaxed = compiled.reply
        self.n_relaxed += n_relaxed
        if not params.ignore_eos:
            ends |= vocab.eog_tokens
        if spans and params.prompt_logprobs is not None:
            allowed = "None with images and sounds"
            raise InvalidSampling("prompt_logprobs", params.prompt_logprobs, allowed)
        # A model with an encoder reads the prompt as a source; its output begins with a token
        # of the model.
        source: array[int] | None = None
        if parts.decoder_start is not None:
            if params.prompt_logprobs is not None:
                raise Unsupported("prompt_logprobs", READS_PROMPTS)
            tokens, source = array("i", [parts.decoder_start]), tokens
        # The engine takes an output apart, too, if it is a reply that has stops of its content.
        find_stop = None
        if form is not None and form.make_parser is not None:
            find_stop = ReplyStops.finder(form, compiled.stop, ends)
        deadline_s = options.get("deadline_s")
        request = Request(
            request_id=next(self._request_ids),
            tokens=tokens,
            max_tokens=params.max_tokens,
            rules=compiled.rules,
            stop=compiled.stop,
            find_stop=find_stop,
            stop_token_ids=ends,
            priority=options.get("priority", 0),
            deadline=None if deadline_s is None else started + deadline_s,
            max_wait_s=options.get("max_wait_s"),
            namespace=namespace,
            cache_points=cast(tuple[int, ...], options.get("cache_points", ())),
            slot=options.get("slot"),
            speculates=options.get("speculation", True),
            client=options.get("client"),
            policy_data=options.get("policy_data"),
            spans=spans,
            payloads=compiled.prompt.payloads,
            names=compiled.names,
            reply=form,
            source=source,
        )
        if adapters := options.get("adapters"):
            request = self._adapters.adapt(request, adapters)
        return tuple(self._fork(request, params, compiled.controls))

    def _kind(
        self, prompt: Prompt, params: SamplingParams, options: ChatOptions
    ) -> Kind | None:
        """The workers that compile a request; None: it takes too short a time for any."""
        # A grammar may take seconds, so no plain chat waits for one. Tools may become one.
        tools = options.get("tools")
        with reading("tools", tools, "a list of mappings, or None"):
            has_rules = bool(tools) or _takes_long(params)
        settings = ChatSettings.of(options)
        with reading_prompt(prompt):
            kind = self._encoder.takes_long(prompt, settings)
        # A template of the caller is a stranger's program: it keeps no others waiting.
        if has_rules and kind != "template":
            return "rules"
        if kind is None and self._control_names is None and _needs_names(params):
            return "text"
        return kind

    async def _run(
        self, kind: Kind | None, function: Callable[[], T], client: str | None = None
    ) -> T:
        """Run *function* in workers of this *kind*, or here."""
        if kind is not None:
            return await self._workers.run(kind, function, client)
        await checkpoint()
        return function()

    def _compiled(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: ChatOptions,
        namespace: Namespace,
    ) -> Compiled:
        """
        All of a request that may take long, in one call.

        Raises:
            InvalidRequest, PromptTooLong, BadMedia, Unsupported, ClosedError.
        """
        is_constrained = params.constraint is not None
        # Messages become text by the template, and text becomes tokens.
        read = self._read(prompt, options, namespace)
        with reading_prompt(prompt):
            has_plan = _is_planned(prompt, options, is_constrained=is_constrained)
        controls = NO_NAMES
        if has_plan or _needs_names(params):
            controls = self._names()
        names = controls if params.special else NO_NAMES
        if has_plan:
            # A chat: its reply may be taken apart, and held to schemas of tools.
            reply = self._replies.reply(params, options, read.tokens, controls)
            if reply.form is not None:
                names = {**reply.form.marks, **names}
        else:
            ends = frozenset(params.stop_token_ids)
            reply = PlannedReply(params, None, params.stop, ends)
        # Stop strings and rules are made once for all outputs of the request.
        rules: object = None
        if _takes_long(reply.params):
            rules = self._parts.make_rules(reply.params, self._encoder.run)
        stop = stop_strings(reply.stop) if reply.stop else NO_STOPS
        return Compiled(read, reply, stop, rules, names, controls)

    @cached_property
    def _replies(self) -> Replies:
        """Plans of replies; its imports take longer than all others of this file."""
        from pyllama_raw.prompts.reply_plan import Replies

        return Replies(self._parts, self._encoder)

    def _names(self) -> Mapping[int, bytes]:
        """The names of control tokens; takes a tenth of a second the first time."""
        if self._control_names is None:
            self._control_names = self._encoder.control_names()
        return self._control_names

    def _fork(
        self, request: Request, params: SamplingParams, names: Mapping[int, bytes]
    ) -> Iterator[Choice]:
        """An output for each of n; equal prompts of one namespace are computed once."""
        first_seed = params.seed
        if first_seed is None:  # the module `secrets` would load OpenSSL for it
            first_seed = int.from_bytes(os.urandom(8)) % (MAX_SEED + 1)
        request_ids = [request.request_id, *islice(self._request_ids, params.n - 1)]
        for index, request_id in enumerate(request_ids):
            seed = (first_seed + index) % (MAX_SEED + 1)
            changes: dict[str, object] = {"seed": seed}
            if index:  # the first one scores the prompt
                changes["prompt_logprobs"] = None
            # Not the copy of SamplingParams, which would check once more what was checked.
            sampling = BaseModel.model_copy(params, update=changes)
            n_top = sampling.prompt_logprobs
            forked = replace(
                request,
                request_id=request_id,
                sampling=sampling,
                scoring=Scoring(n_top=n_top) if n_top is not None else None,
            )
            yield Choice(index, forked, seed, self._parts.vocab.pieces, names)

    async def encode(
        self, prompt: Prompt, options: ChatOptions | None = None
    ) -> array[int]:
        """Tokens of *prompt*; raises as prepare()."""
        return await self._tokens(prompt, options, self._encoder)

    async def count(self, prompt: Prompt, options: ChatOptions) -> int:
        """Tokens of *prompt*, which need not fit a slot; raises as prepare()."""
        try:
            return len(await self._tokens(prompt, options, self._encoder.counting()))
        except PromptTooLong as error:
            text = f"{error.n_prompt} tokens or more"
            allowed = f"at most {MAX_COUNTED} tokens, or count it in parts"
            raise InvalidRequest("prompt", text, allowed) from None

    async def _tokens(
        self, prompt: Prompt, options: ChatOptions | None, encoder: PromptEncoder
    ) -> array[int]:
        with reading_prompt(prompt):
            kind = encoder.takes_long(prompt, ChatSettings.of(options))
        read = partial(self._read, prompt, options, encoder=encoder)
        return (await self._run(kind, read)).tokens

    def _read(
        self,
        prompt: Prompt,
        options: ChatOptions | None,
        namespace: Namespace = None,
        encoder: PromptEncoder | None = None,
    ) -> MediaPrompt:
        """Tokens of *prompt* and its media. Thread: one that may take long for it."""
        encoder, settings = encoder or self._encoder, ChatSettings.of(options)
        encode = partial(encoder.read, settings=settings, namespace=namespace)
        with reading_prompt(prompt):
            return with_history(encode, prompt) if is_chat(prompt) else encode(prompt)

    async def encode_text(self, text: str, *, adds: bool, parses: bool) -> array[int]:
        """Tokens of *text*; see PromptEncoder.encode_text."""
        encode = partial(self._encoder.encode_text, text, adds=adds, parses=parses)
        with reading_prompt(text):
            return await self._workers.run("text", encode)

    async def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """The text that the template makes of *messages*; raises as prepare()."""
        settings = ChatSettings.of(options)
        render = partial(self._encoder.render, settings=settings)
        with reading_prompt(messages):
            read = partial(with_history, render, messages)
            kind = self._encoder.takes_long(messages, settings) or "chat"
            return await self._workers.run(kind, read)

    async def detokenize(self, token_ids: Sequence[int], special: bool) -> str:
        """The text of *token_ids*. Raises InvalidRequest, ClosedError."""
        detokenize = partial(self._encoder.detokenize, token_ids, special)
        with reading("token_ids", token_ids, "a list of token ids"):
            return await self._workers.run("text", detokenize)

    async def pieces(self, token_ids: Sequence[int], special: bool) -> list[bytes]:
        """The bytes of each of *token_ids*. Raises InvalidRequest, ClosedError."""
        pieces = partial(self._encoder.pieces, token_ids, special)
        with reading("token_ids", token_ids, "a list of token ids"):
            return await self._workers.run("text", pieces)


def _is_planned(
    prompt: Prompt, options: ChatOptions, *, is_constrained: bool = False
) -> bool:
    """
    Whether *options* ask something of the reply to *prompt*, or a constraint does.

    Raises:
        InvalidRequest: they do, and it is no chat.
    """
    names = [name for name in REPLY_OPTIONS if options.get(name) is not None]
    if options.get("reply") is False:  # as of any other prompt
        names.remove("reply")
    if not is_chat(prompt):
        for name in names:
            value = options.get(name)
            raise InvalidRequest(name, value, "it with chat messages only")
    elif is_constrained and options.get("reply") is not False:
        return True
    tools = options.get("tools")
    with reading("tools", tools, "a list of mappings, or None"):
        return bool(names) or bool(tools)


def _takes_long(params: SamplingParams) -> bool:
    """Whether what is made of *params* is not for an event loop."""
    n_tokens = len(params.suppress_tokens) + len(params.logit_bias)
    return (
        params.constraint is not None
        or params.dries
        or n_tokens > MANY_TOKENS
        or sum(map(len, params.stop)) > LONG_STOP
    )


def _needs_names(params: SamplingParams) -> bool:
    """Whether outputs show names of control tokens."""
    logprobs = params.logprobs, params.prompt_logprobs
    return params.special or logprobs != (None, None)


def _check_tokens(params: SamplingParams, n_vocab: int) -> None:
    """Raise InvalidRequest if *params* name a token that the model does not have."""
    fields: dict[str, Iterable[object]] = {
        "stop_token_ids": params.stop_token_ids,
        "suppress_tokens": params.suppress_tokens,
        "logit_bias": params.logit_bias,
        "grammar_triggers": params.grammar_triggers,
    }
    for name, tokens in fields.items():
        for token in tokens:
            if isinstance(token, int) and token >= n_vocab:
                raise InvalidRequest(name, token, f"token ids below {n_vocab}")
