"""
From what a caller asks for to requests of the engine.

All that can be checked is checked here, in the caller's task, before the engine thread
hears of a request; errors name the parameter.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, cast

from anyio.lowlevel import checkpoint
from pydantic import BaseModel

from pyllama_raw.api.choice import NO_NAMES, Choice
from pyllama_raw.api.constraining import Constrained, constrained
from pyllama_raw.api.reply import ReplyForm, ReplyStops, stop_strings
from pyllama_raw.api.replying import (
    Replies,
    ReplyPlan,
    is_planned,
    settings_of,
)
from pyllama_raw.api.workers import Workers
from pyllama_raw.core.namespace import Namespace, Private
from pyllama_raw.core.request import Request
from pyllama_raw.core.stop_strings import StopStrings
from pyllama_raw.engine.info import Operation
from pyllama_raw.errors import (
    BadSchema,
    InvalidRequest,
    InvalidSampling,
    PromptTooLong,
    Unsupported,
)
from pyllama_raw.options.arguments import reading_prompt
from pyllama_raw.options.declared import with_declared
from pyllama_raw.options.requests import ChatOptions, RequestOptions
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.prompts.history import with_history
from pyllama_raw.prompts.media_prompt import MediaPrompt
from pyllama_raw.prompts.messages import Message
from pyllama_raw.prompts.prompt import MAX_COUNTED, Prompt, PromptEncoder

if TYPE_CHECKING:
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.engine.thread import EngineThread

MAX_SEED = 2**32 - 2
MANY_TOKENS = 256  # named by a request: an event loop may wait for as many
READS_PROMPTS = (
    "the model reads prompts with an encoder, and predicts none of their tokens"
)
LONG_STOP = 256  # characters of stop strings, likewise


class PlannedReply(NamedTuple):
    """Wishes of a request for its outputs: how they are taken apart, and where they end."""

    params: SamplingParams
    form: ReplyForm | None  # None: an output is plain text
    stop: Sequence[str]  # strings that end an output wherever they come
    stop_token_ids: frozenset[int]  # likewise, beside the ends of generation


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
        self._replies = Replies(parts, encoder)
        self._control_names: Mapping[int, bytes] | None = None  # once they are wanted
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
        self._parts.capabilities.check(Operation.GENERATE)  # a reload may have come
        deadline_s = options.get("deadline_s")
        params = with_declared(params, self._parts.metadata)
        _check_tokens(params, self._parts.vocab.n_tokens)
        namespace = self._namespace(options.get("cache_salt"))
        read = await self._read(prompt, options, namespace)
        names = await self._names() if params.special else {}
        reply = PlannedReply(
            params, None, params.stop, frozenset(params.stop_token_ids)
        )
        plan = await self._plan(prompt, options, read.tokens, params)
        if plan is not None:
            bind = partial(self._bound, params, plan)
            reply = await self._workers.run("rules", bind)
        params, form, strings, ends = reply
        stop, rules = await self._made(params, strings)
        if not params.ignore_eos:
            ends |= self._parts.vocab.eog_tokens
        request = Request(
            request_id=next(self._request_ids),
            tokens=read.tokens,
            max_tokens=params.max_tokens,
            rules=rules,
            stop=stop,
            find_stop=None if form is None else ReplyStops.finder(form, stop, ends),
            stop_token_ids=ends,
            priority=options.get("priority", 0),
            deadline=None if deadline_s is None else started + deadline_s,
            max_wait_s=options.get("max_wait_s"),
            namespace=namespace,
            cache_points=cast(tuple[int, ...], options.get("cache_points", ())),
            client=options.get("client"),
            policy_data=options.get("policy_data"),
            spans=read.spans,
            payloads=read.payloads,
            names=names if form is None else {**form.marks, **names},
            reply=form,
        )
        if adapters := options.get("adapters"):
            request = self._adapters.adapt(request, adapters)
        if request.spans and params.prompt_logprobs is not None:
            allowed = "None with images and sounds"
            raise InvalidSampling("prompt_logprobs", params.prompt_logprobs, allowed)
        if (start := self._parts.decoder_start) is not None:
            if params.prompt_logprobs is not None:
                raise Unsupported("prompt_logprobs", READS_PROMPTS)
            tokens = array("i", [start])
            request = replace(request, tokens=tokens, source=read.tokens)
        has_logprobs = (params.logprobs, params.prompt_logprobs) != (None, None)
        spelt = await self._names() if has_logprobs else NO_NAMES
        return tuple(self._fork(request, params, spelt))

    def _fork(
        self, request: Request, params: SamplingParams, names: Mapping[int, bytes]
    ) -> Iterator[Choice]:
        """An output for each of n; equal prompts of one namespace are computed once."""
        first_seed = _random_seed() if params.seed is None else params.seed
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

    async def _plan(
        self,
        prompt: Prompt,
        options: ChatOptions,
        tokens: array[int],
        params: SamplingParams,
    ) -> ReplyPlan | None:
        """The plan of the reply to *prompt*, which *tokens* are; None: it is plain text."""
        is_constrained = params.constraint is not None
        with reading_prompt(prompt):
            if not is_planned(prompt, options, is_constrained=is_constrained):
                return None
        plan = partial(
            self._replies.plan,
            options,
            tokens,
            await self._names(),
            is_constrained=is_constrained,
        )
        return await self._workers.run(settings_of(options).workers, plan)

    def _constrained(self, params: SamplingParams, plan: ReplyPlan) -> Constrained:
        """The constraint of a whole reply, which compiles; the latest ones are kept."""
        vocab, run, make = self._parts.vocab, self._encoder.run, self._parts.make_rules

        def compiled(*, is_loose: bool) -> Constrained:
            found = constrained(params, plan, vocab, run, is_loose=is_loose)
            if found.params is not params:
                make(found.params, run)
            return found

        try:
            return compiled(is_loose=False)
        except BadSchema as error:
            # Of what the request has written itself, its own error says most.
            if params.constraint is not None:
                make(params, run)
            # Each schema may be small enough, and all of them together too much.
            with suppress(BadSchema):
                return compiled(is_loose=True)
            if error.name in (params.constraint, "tools"):
                raise
            raise BadSchema(params.constraint or "tools", error.reason) from error

    def _bound(self, params: SamplingParams, plan: ReplyPlan) -> PlannedReply:
        """The reply of *plan*, for these *params*; raises as constrained()."""
        vocab = self._parts.vocab
        found = self._constrained(params, plan)
        self.n_relaxed += found.n_relaxed
        strings, ends = params.stop, frozenset(params.stop_token_ids)
        form = plan.form(is_formed=found.is_formed, keeps_space=found.keeps_space)
        if form is not None and (strings or ends):
            ends -= vocab.eog_tokens
            form, strings, ends = form.with_stops(strings, ends, vocab.pieces)
        return PlannedReply(found.params, form, strings, ends)

    async def encode(
        self, prompt: Prompt, options: ChatOptions | None = None
    ) -> array[int]:
        """Tokens of *prompt*; raises as prepare()."""
        return (await self._read(prompt, options)).tokens

    async def count(self, prompt: Prompt, options: ChatOptions) -> int:
        """Tokens of *prompt*, which need not fit a slot; raises as prepare()."""
        try:
            counting = self._encoder.counting()
            return len((await self._read(prompt, options, encoder=counting)).tokens)
        except PromptTooLong as error:
            text = f"{error.n_prompt} tokens or more"
            allowed = f"at most {MAX_COUNTED} tokens, or count it in parts"
            raise InvalidRequest("prompt", text, allowed) from None

    async def encode_text(self, text: str, *, adds: bool, parses: bool) -> array[int]:
        """Tokens of *text*; see PromptEncoder.encode_text."""
        encode = partial(self._encoder.encode_text, text, adds=adds, parses=parses)
        with reading_prompt(text):
            return await self._workers.run("text", encode)

    async def _read(
        self,
        prompt: Prompt,
        options: ChatOptions | None,
        namespace: Namespace = None,
        encoder: PromptEncoder | None = None,
    ) -> MediaPrompt:
        settings = settings_of(options)
        encoder = encoder or self._encoder
        encode = partial(encoder.read, settings=settings, namespace=namespace)
        read = partial(with_history, encode, prompt)
        with reading_prompt(prompt):
            kind = self._encoder.takes_long(prompt, settings)
            if kind is not None:
                return await self._workers.run(kind, read)
            await checkpoint()
            return read()

    async def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """The text that the template makes of *messages*; raises as prepare()."""
        settings = settings_of(options)
        render = partial(self._encoder.render, settings=settings)
        with reading_prompt(messages):
            read = partial(with_history, render, messages)
            return await self._workers.run(settings.workers, read)

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

    async def _names(self) -> Mapping[int, bytes]:
        """The names of control tokens."""
        if self._control_names is None:
            names = await self._workers.run("text", self._encoder.control_names)
            self._control_names = names
        return self._control_names

    async def _made(
        self, params: SamplingParams, strings: Sequence[str]
    ) -> tuple[StopStrings, object]:
        """Stop *strings* and rules of *params*, made once for all outputs of a request."""
        if _takes_long(params):
            make = partial(self._make, params, strings)
            return await self._workers.run("rules", make)
        return stop_strings(strings), None

    def _make(
        self, params: SamplingParams, strings: Sequence[str]
    ) -> tuple[StopStrings, object]:
        rules = self._parts.make_rules(params, self._encoder.run)
        return stop_strings(strings), rules

    def _namespace(self, salt: str | None) -> Namespace:
        """The sharers of the cache with a request; with scope "salt" a salt is needed."""
        if salt is None and self._parts.cache_scope == "salt":
            return Private()
        return salt


def _takes_long(params: SamplingParams) -> bool:
    """Whether what is made of *params* is not for an event loop."""
    n_tokens = len(params.suppress_tokens) + len(params.logit_bias)
    return (
        params.constraint is not None
        or params.dries
        or n_tokens > MANY_TOKENS
        or sum(map(len, params.stop)) > LONG_STOP
    )


def _random_seed() -> int:
    """0 to MAX_SEED; the module `secrets` would load OpenSSL for it."""
    return int.from_bytes(os.urandom(8)) % (MAX_SEED + 1)


def _check_tokens(params: SamplingParams, n_vocab: int) -> None:
    """Raise InvalidRequest if *params* name a token that the model does not have."""
    named: dict[str, Iterable[object]] = {
        "stop_token_ids": params.stop_token_ids,
        "suppress_tokens": params.suppress_tokens,
        "logit_bias": params.logit_bias,
        "grammar_triggers": params.grammar_triggers,
    }
    for name, tokens in named.items():
        for token in tokens:
            if isinstance(token, int) and token >= n_vocab:
                raise InvalidRequest(name, token, f"token ids below {n_vocab}")
