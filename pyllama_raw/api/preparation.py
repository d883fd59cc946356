"""
From what a caller asks for to requests of the engine.

All that can be checked is checked here, in the caller's task, before the engine thread
hears of a request; errors name the parameter.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from anyio.lowlevel import checkpoint
from pydantic import BaseModel

from pyllama_raw.api.output import NO_NAMES, Choice
from pyllama_raw.api.workers import Kind, Workers
from pyllama_raw.core.namespace import Namespace, Private
from pyllama_raw.core.request import Request
from pyllama_raw.core.stop_strings import NO_STOPS, StopStrings
from pyllama_raw.engine.info import Operation
from pyllama_raw.errors import (
    InvalidRequest,
    InvalidSampling,
    PromptTooLong,
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
    ReplyStops,
    is_planned,
    stop_strings,
)

if TYPE_CHECKING:
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.engine.thread import EngineThread
    from pyllama_raw.prompts.reply_plan import Replies

T = TypeVar("T")

MAX_SEED = 2**32 - 2
MANY_TOKENS = 256  # named by a request: an event loop may wait for as many
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
        settings = ChatSettings.of(options)
        with reading_prompt(prompt):
            kind = self._encoder.takes_long(prompt, settings)
        # A template of the caller is a stranger's program: it keeps no others waiting.
        if kind == "template":
            return kind
        # A grammar may take seconds, so no plain chat waits for one. Tools may become one.
        tools = options.get("tools")
        with reading("tools", tools, "a list of mappings, or None"):
            if bool(tools) or _takes_long(params):
                return "rules"
        if kind is None and self._control_names is None and _needs_names(params):
            return "text"
        return kind

    async def _run(self, kind: Kind | None, function: Callable[[], T]) -> T:
        """Run *function* in workers of this *kind*, or here."""
        if kind is not None:
            return await self._workers.run(kind, function)
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
            has_plan = is_planned(prompt, options, is_constrained=is_constrained)
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
            forked = replace(
                request,
                request_id=request_id,
                sampling=sampling,
                scores_prompt=sampling.prompt_logprobs is not None,
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
        with reading_prompt(token_ids):
            return await self._workers.run("text", detokenize)

    async def pieces(self, token_ids: Sequence[int], special: bool) -> list[bytes]:
        """The bytes of each of *token_ids*. Raises InvalidRequest, ClosedError."""
        pieces = partial(self._encoder.pieces, token_ids, special)
        with reading_prompt(token_ids):
            return await self._workers.run("text", pieces)


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
