"""The engine as asyncio and trio programs use it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, Unpack, cast, overload

from pyllama_raw.api.facts import Facts
from pyllama_raw.api.model import EngineOpening, Model, Opener, Progress, load, release
from pyllama_raw.engine.mailbox import check_may_wait
from pyllama_raw.errors import InvalidRequest, PyllamaError
from pyllama_raw.options.arguments import (
    LateModule,
    check_opening,
    check_progress,
    check_specials,
    checked_adapter,
    checked_chat,
    checked_file,
    checked_flag,
    checked_number,
    checked_options,
    checked_params,
    checked_prompts,
    checked_salt,
    checked_serving,
    checked_text,
    checked_texts,
    checked_texts_or_ids,
    checked_wait,
    checked_word,
    scoring,
)
from pyllama_raw.prompts.messages import Message
from pyllama_raw.prompts.prompt import Prompt

if TYPE_CHECKING:  # the rest comes in while C loads a model
    from pyllama_raw.api import batches, slot_files
    from pyllama_raw.api import events as event_streams
    from pyllama_raw.api import generation as generations
    from pyllama_raw.api import session as sessions
    from pyllama_raw.api.embedding import Embedder, TextPooling, VectorProgress
    from pyllama_raw.api.generation import Generation
    from pyllama_raw.api.results import LabelScore, Likelihood, Ranked, Result, Score
    from pyllama_raw.api.vectors import Vectors
    from pyllama_raw.core.stats import CacheStats, SlotFile, SlotStats
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.options.config import EngineConfig
    from pyllama_raw.options.requests import (
        ChatOptions,
        Need,
        RequestOptions,
        TextOptions,
    )
    from pyllama_raw.options.sampling import SamplingParams

else:
    batches = LateModule("pyllama_raw.api.batches")
    event_streams = LateModule("pyllama_raw.api.events")
    generations = LateModule("pyllama_raw.api.generation")
    sessions = LateModule("pyllama_raw.api.session")
    slot_files = LateModule("pyllama_raw.api.slot_files")


class AsyncEngine(Facts):
    """A loaded model that serves any number of requests at once."""

    def __init__(self, parts: EngineParts, source: Opener | None = None) -> None:
        """Use open(); this is for tests and for own executors."""
        super().__init__(sessions.Sessions(parts, source))

    @classmethod
    def open(
        cls,
        model: str | Path | Model | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        needs: Need | None = None,
    ) -> EngineOpening[Self]:
        """
        Load *model* in a worker thread: `async with AsyncEngine.open() as engine`.

        The end of the block closes it. `engine = await AsyncEngine.open()` leaves that to
        aclose(). Engines share the weights of the same file, loaded with the same options.

        Args:
            model: a GGUF file, or a Model, which is shared and whose options count; None:
                the default model, downloaded if need be.
            progress: called in the worker thread with the loaded fraction, 0 to 1.
            needs: what the model must be able to do: one that cannot is refused before its
                weights are read. None: anything that an engine does.

        Raises:
            ConfigError: an argument is none of these, or *config* wants the Model loaded
                in another way.
            ClosedError: the Model is closed.
            ModelLoadFailed, ContextFailed, LibraryNotBuilt, Unsupported: it cannot be
                opened here.
        """

        async def make() -> Self:
            path = None if isinstance(model, Model) else model
            check_opening(path, config, progress, needs)
            source = Opener(model, config, needs)
            parts = await load(source.parts, progress, release)
            try:
                return cls(parts, source)
            except BaseException:
                release(parts)
                raise

        return EngineOpening(make)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self, drain_s: float = 0.0) -> None:
        """
        Refuse new requests, end all others and free the model; can be repeated.

        Args:
            drain_s: seconds that running and waiting requests have to be done; what is
                left then ends as `FinishReason.CLOSED` with what it has. Cancelling
                aclose() ends the wait.
        """
        await self._sessions.aclose(checked_wait("drain_s", drain_s))

    def __del__(self) -> None:
        if not hasattr(self, "_sessions") or not self._thread.is_ours:
            return
        is_alive = self.alive
        self._sessions.leave()
        if is_alive:
            self._warn_dropped("before aclose(): use `async with`")

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """
        A stream of output for *prompt*; use it as `async with`, then `async for`.

        Args:
            prompt: text, token ids, or chat messages with "role" and "content".
            params: with n > 1 deltas carry the index of their output; the engine takes
                all n requests or refuses all, and leaving the block ends all.
            options: see RequestOptions.

        Raises, at once:
            Unsupported: the model generates no text.
            TypeError: there is no such option.
            InvalidRequest: *params* or an option is not allowed.
        Raises, on entering the block:
            InvalidRequest, PromptTooLong, Unsupported, QueueFull, ClosedError,
            EngineStopped.
        Raises, on reading:
            WaitedTooLong: no slot was free within *max_wait_s*.
            NativeError, EngineFault, EngineStalled, EngineStopped.
        """
        checked_sampling, checked = checked_params(params), checked_options(options)
        return generations.Generation(self._sessions, prompt, checked_sampling, checked)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """
        Like generate(), all at once; for one output (n=1).

        Raises, besides:
            ClosedError: the engine was closed before the output was whole; `results`
                has what there was.
        """
        params = checked_params(params)
        if params.n > 1:
            raise InvalidRequest("n", params.n, "1, or use complete_n()")
        async with self.generate(prompt, params, **options) as generation:
            result = await generation.collect()
        return batches.whole((result,))[0]

    async def complete_n(
        self,
        prompt: Prompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> tuple[Result, ...]:
        """
        Like generate(), all *params.n* outputs at once, by index.

        The prompt is computed once, unless the cache is off. Outputs beyond the free
        slots wait in the queue. An output that fails is left out; if all do, the error of
        the first is raised.

        Raises, besides:
            InvalidRequest: n is above what slots and queue hold together.
            ClosedError: as by complete().
        """
        async with self.generate(prompt, params, **options) as generation:
            results = await generation.collect_all()
        return batches.whole(results)

    @overload
    async def complete_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        errors: Literal["raise"] = "raise",
        progress: Callable[[int], object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Result]: ...

    @overload
    async def complete_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        errors: Literal["return"],
        progress: Callable[[int], object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Result | PyllamaError]: ...

    async def complete_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        errors: Literal["raise", "return"] = "raise",
        progress: Callable[[int], object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Result] | list[Result | PyllamaError]:
        """
        Results in the order of *prompts*.

        At most twice as many as there are slots are submitted at a time, and what finds
        the queue full waits for another one to end; *deadline_s* counts from there.

        Args:
            errors: "raise": the first error ends all; its text begins with "prompts[2]:"
                and `prompt_index` is 2. "return": the error of a prompt stands in the
                place of its result, and the others go on.
            progress: called with the number of prompts that have ended.

        Raises, besides:
            QueueFull: requests of others fill the engine, and none of these runs.
        """
        words = ("raise", "return")
        keeps = checked_word("errors", errors, words, "'raise' or 'return'") == "return"
        check_progress(progress)
        checked = checked_options(options)  # iterators are read once, for all prompts
        complete = partial(self.complete, params=checked_params(params), **checked)
        admission = self._parts.admission
        n_tasks = min(2 * admission.n_slots, admission.max_requests)
        return await batches.complete_all(
            complete, checked_prompts(prompts), n_tasks, progress, returns_errors=keeps
        )

    async def score(
        self, prompt: Prompt, n_top: int = 0, **options: Unpack[RequestOptions]
    ) -> Score:
        """
        Tell how likely the model finds each token of *prompt* after those before it.

        score_many() is for many texts that begin alike.

        Args:
            n_top: most likely tokens listed at each place, 0 to 20.

        Raises:
            InvalidRequest: n_top is something else, or the prompt is a single token:
                there is nothing to score.
            DeadlineExceeded: *deadline_s* was over before every token had its score.
        """
        async with self.generate(prompt, scoring(n_top), **options) as generation:
            return await generation.score()

    async def score_many(
        self,
        prompt: Prompt,
        continuations: Iterable[str | Sequence[int]],
        n_top: int = 0,
        **options: Unpack[RequestOptions],
    ) -> list[Likelihood]:
        """
        Tell how likely the model finds each of *continuations* after *prompt*, in their order.

        The prompt is computed once. A text goes on as one text, so `"Paris"` and `" Paris"` are
        different answers. Each continuation is a request, and all enter together (docs/scores.md).

        Args:
            n_top: most likely tokens listed at each place, 0 to 20.

        Raises, besides those of generate():
            InvalidRequest: there is no continuation, one is empty, or there are more than slots
                and queue hold together.
            TextTooLong: the prompt and a continuation do not fit a slot.
            DeadlineExceeded: *deadline_s* was over before every token had its score.
        """
        name = "continuations"
        texts = batches.Continuations(name, checked_texts_or_ids(continuations, name))
        return await self._likelihoods(prompt, texts, scoring(n_top), options)

    async def classify(
        self,
        text: Prompt,
        labels: Iterable[str],
        measure: batches.Measure = "total",
        **options: Unpack[RequestOptions],
    ) -> list[LabelScore]:
        """
        *labels* by how likely each is as the continuation of *text*, the best first.

        Raises as score_many().

        Args:
            text: ends where the label is to come, such as "Sentiment:" before " good"; or a
                chat that asks for it.
            measure: what is compared: the probability of the whole label ("total"), or of a
                token or byte of it, so that long labels are not behind.
        """
        texts = checked_texts(labels, "labels")
        word = batches.checked_measure(measure)
        endings = batches.Continuations("labels", texts)
        likelihoods = await self._likelihoods(text, endings, scoring(0), options)
        return batches.label_scores(texts, likelihoods, word)

    async def _likelihoods(
        self,
        prompt: Prompt,
        continuations: batches.Continuations,
        params: SamplingParams,
        options: RequestOptions,
    ) -> list[Likelihood]:
        checked = checked_options(options)
        async with generations.Generation(
            self._sessions, prompt, params, checked, continuations
        ) as generation:
            results = await generation.collect_all()
        errors = generation.errors.values()
        return batches.likelihoods(generation.requests, results, errors)

    async def embed(
        self,
        texts: Iterable[str | Sequence[int]],
        dimensions: int | None = None,
        normalize: bool = True,
        pooling: TextPooling | None = None,
        *,
        truncate: bool = False,
        progress: VectorProgress | None = None,
        **options: Unpack[TextOptions],
    ) -> Vectors:
        """
        A vector for each text: a row of an array of float32, in the order of *texts*.

        `usage` of the array counts the tokens of the texts. Token ids may stand for a text:
        they are taken as they are, with nothing before or behind them.

        Args:
            dimensions: only the first ones of each vector; None: all.
            normalize: make vectors as long as 1, after they are cut.
            pooling: how the vectors of the tokens of a text become one; None: as the model
                says.
            truncate: a text that is too long loses its end, instead of TextTooLong.
            progress: called with the number of texts that have a vector.

        Raises:
            InvalidRequest: there is no text, one is empty, or an argument is not allowed.
            TextTooLong: a text has too many tokens for the model or for a step.
            Unsupported: the model states no pooling, and none is given.
            EmbeddingFailed: the model makes something of a text that is no number.
            DeadlineExceeded: *deadline_s* was over before every text had its vector.
            QueueFull, ClosedError, EngineStopped, NativeError: as generate().
        """
        async with self._embedding(options) as embedder:
            kind = embedder.pooling(pooling)
            shape = embedder.shape(dimensions, normalize=normalize)
            (rows,) = await embedder.embed(
                texts, kind, shape, progress, joined=True, truncate=truncate, **options
            )
        return rows

    async def embed_tokens(
        self,
        texts: Iterable[str | Sequence[int]],
        dimensions: int | None = None,
        normalize: bool = True,
        *,
        truncate: bool = False,
        progress: VectorProgress | None = None,
        **options: Unpack[TextOptions],
    ) -> list[Vectors]:
        """Like embed(), with an array for each text that has a row for each token."""
        async with self._embedding(options) as embedder:
            shape = embedder.shape(dimensions, normalize=normalize)
            return await embedder.embed(
                texts, None, shape, progress, truncate=truncate, **options
            )

    async def chunks(
        self, text: str, max_tokens: int | None = None, overlap: int = 0
    ) -> list[str]:
        """
        *text* cut into parts that embed() takes, at white space where there is any.

        Args:
            max_tokens: of a part, control tokens included; None: what the model takes.
            overlap: tokens of the end of a part that the next one begins with, at most half
                of a part.

        Raises:
            InvalidRequest: *text* is empty, or a number is not allowed.
            Unsupported: the model makes no vectors.
        """
        async with self._embedding({}) as embedder:
            return await embedder.chunks(text, max_tokens, overlap)

    async def rank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        progress: VectorProgress | None = None,
        **options: Unpack[TextOptions],
    ) -> list[Ranked]:
        """
        *documents* by how well they answer *query*, the best first.

        Raises:
            Unsupported: the model is no reranker.
            InvalidRequest, TextTooLong, EmbeddingFailed, DeadlineExceeded: as embed().
            QueueFull, ClosedError, EngineStopped, NativeError: as generate().
        """
        async with self._embedding(options) as embedder:
            return await embedder.rank(query, documents, progress, **options)

    @asynccontextmanager
    async def _embedding(self, options: TextOptions) -> AsyncIterator[Embedder]:
        """The maker of the vectors of one call; *options* are not checked yet."""
        limits = checked_serving({**options})
        began = self._sessions.current.thread.clock()
        async with self._sessions.session(limits) as session:
            yield session.embedder.after(session.thread.clock() - began)

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """
        Token ids of *prompt* as the model gets them; rows of images and sounds are negative.

        Control tokens that are spelled in a text are understood. In messages of a chat, and in
        what embed() and rank() take, they stay text, because a user may have written that.

        Args:
            add_special: a text gets the tokens that begin and end prompts of the model.
            parse_special: False: control tokens that are spelled in a text stay text, too.

        Raises:
            InvalidRequest, PromptTooLong, Unsupported, ClosedError: as generate().
        """
        chat = checked_chat(options)
        adds = checked_flag("add_special", add_special)
        parses = checked_flag("parse_special", parse_special)
        check_specials(prompt, chat, adds=adds, parses=parses)
        async with self._sessions.session() as session:
            preparation = session.preparation
            if adds and parses:
                return list(await preparation.encode(prompt, chat))
            text = cast("str", prompt)
            return list(await preparation.encode_text(text, adds=adds, parses=parses))

    async def pieces(
        self, token_ids: Sequence[int], special: bool = True
    ) -> list[bytes]:
        """
        The bytes of each of *token_ids*, which may be a part of a character.

        Args:
            special: control tokens have their names; otherwise nothing.
        """
        flag = checked_flag("special", special)
        async with self._sessions.session() as session:
            return await session.preparation.pieces(token_ids, flag)

    async def detokenize(self, token_ids: Sequence[int], special: bool = False) -> str:
        """
        The text of *token_ids*; bytes that are no UTF-8 become U+FFFD.

        Args:
            special: control tokens are written, too.
        """
        flag = checked_flag("special", special)
        async with self._sessions.session() as session:
            return await session.preparation.detokenize(token_ids, flag)

    async def count(self, prompt: Prompt, **options: Unpack[ChatOptions]) -> int:
        """
        Tokens of *prompt*, as `usage.prompt_tokens` will tell; it need not fit a slot.

        Raises:
            InvalidRequest: it has more than 2**20 tokens; and as generate().
        """
        chat = checked_chat(options)
        async with self._sessions.session() as session:
            return await session.preparation.count(prompt, chat)

    async def render(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> str:
        """The text that the chat template makes of *messages*; raises as generate()."""
        chat = checked_chat(options)
        async with self._sessions.session() as session:
            return await session.preparation.render(messages, chat)

    def events(self, max_events: int = 1024) -> event_streams.Events:
        """
        Events of the engine and of its requests, as they happen; see Events.

        Args:
            max_events: that wait for their reader; then the oldest are lost, and it is told.

        Raises, on entering the block:
            ClosedError, EngineStopped.
        """
        buffer_size = checked_number("max_events", max_events, 1, 2**20)
        return event_streams.Events(self._sessions, buffer_size)

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """
        Load the LoRA or control vector at *path*: `generate(..., adapters={name: 1.0})`.

        Raises:
            InvalidRequest: *name* or *path* is none.
            AdapterLoadFailed: there is no such file, it is damaged, or of another model.
            AdapterLimit: the adapters that requests use leave no room.
            Unsupported: the model generates no text.
            ClosedError, EngineStopped: as generate().
        """
        check_may_wait()
        file, checked = checked_file("path", path), checked_adapter(name)
        async with self._sessions.session() as session:
            load = partial(session.thread.adapters.load, checked, file)
            await self._sessions.workers.run("adapters", load)

    async def unload_adapter(self, name: str) -> None:
        """
        Let no further request have the adapter; it is freed when those that use it have ended.

        Raises:
            AdapterNotFound: there is none of that name.
        """
        self._thread.adapters.unload(checked_adapter(name))

    async def slots(self) -> tuple[SlotStats, ...]:
        """The slots that run a request, by number, between two steps."""
        return await self._sessions.between_steps(lambda parts: parts.scheduler.slots())

    async def save_slot(self, slot: int, path: str | Path) -> SlotFile:
        """
        Write what a slot holds, and no request computes, to a file of its own.

        Raises:
            InvalidRequest: there is no such slot, it holds nothing that others may have, or a
                request runs in it (see slots()); or *path* cannot be written.
            Unsupported: nothing is reused here, or no file says what model this is.
            WrongUse: the engine sleeps.
            SnapshotFailed, ClosedError, EngineStopped: as generate().
        """
        return await slot_files.save(self._sessions, slot, path)

    async def restore_slot(self, slot: int, path: str | Path) -> SlotFile:
        """
        Have a slot hold what save_slot() wrote, in place of what it holds.

        The next request that begins with it goes on from there.

        Raises:
            InvalidRequest: there is no such slot, a request runs in it, or the file is not of
                this model, these options and this library.
            Unsupported, WrongUse, SnapshotFailed, ClosedError, EngineStopped: as save_slot().
        """
        return await slot_files.restore(self._sessions, slot, path)

    async def cache_stats(self) -> CacheStats:
        """Tokens reused and bytes stored, between two steps."""
        return await self._sessions.between_steps(
            lambda parts: parts.scheduler.cache_stats()
        )

    async def clear_cache(self, cache_salt: str | None = None) -> int:
        """
        Forget what is kept of past requests: of *cache_salt*, or of all (None).

        Returns:
            Bytes of host memory freed. Running requests go on.

        Raises:
            InvalidRequest: no salt that a request could have.
        """
        salt = checked_salt(cache_salt)
        return await self._sessions.between_steps(lambda parts: parts.clear_cache(salt))

    async def warmup(self) -> None:
        """
        Compute a micro-batch of a prompt, and a token for each slot.

        So the first request waits for nothing that a device does once. Nothing of it stays.

        Raises:
            WrongUse: the engine sleeps, or another of these verbs runs.
            NativeError: a decode has failed; what runs is computed again.
            ClosedError, EngineStopped: as generate().
        """
        await self._sessions.warm_up()

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """
        Free memory of devices until wake(); can be repeated.

        Level 1 frees the context, and requests that run stop where they are. Level 2 first waits
        for them, and frees the weights, too. Requests that come wait (docs/life.md).

        Raises:
            InvalidRequest: there is no such level.
            SnapshotFailed, MemoryError: host memory is short; the engine goes on.
            WrongUse: another of these verbs runs, or requests of a level 1 keep the weights.
            ClosedError, EngineStopped: as generate().
        """
        await self._sessions.sleep(checked_number("level", level, 1, 2))

    async def wake(self) -> None:
        """
        Have the engine go on after sleep(); can be repeated.

        Requests that ran go on. After a sleep of level 2 the weights are loaded again, as the
        file has them by now.

        Raises:
            ModelLoadFailed, ContextFailed, NativeError: it sleeps on, and can be woken later.
            WrongUse: another of these verbs runs.
            ClosedError, EngineStopped: as generate().
        """
        await self._sessions.wake()

    async def reload(
        self,
        model: str | Path | Model | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        """
        Serve another model, or the same with other options, and fail no request.

        The new one is loaded beside the old one, which does the requests that came before. Where
        both do not fit the memory, call sleep(2) first (docs/life.md).

        Args:
            model: as of open(); None: the same, with what its file has now.
            config: as of open(); None: the same.
            progress: as of open().

        Raises:
            ConfigError, ClosedError, ModelLoadFailed, ContextFailed, Unsupported: as open();
                the old one goes on.
            AdapterLoadFailed, AdapterLimit: an adapter is of no use to the new one; likewise.
            WrongUse: another of these verbs runs, or the engine sleeps at level 1.
        """
        await self._sessions.reload(model, config, progress)

    async def rebuild_session(self, cause: str) -> None:
        """
        Make the context anew, between two steps; requests that run go on (docs/life.md).

        Args:
            cause: for the log.

        Raises:
            InvalidRequest: *cause* is no text.
            WrongUse: the engine sleeps, or another of these verbs runs.
            ContextFailed, NativeError: there is no context. It is made by the next step, or
                the engine ends.
            ClosedError, EngineStopped: as generate().
        """
        await self._sessions.rebuild(checked_text("cause", cause))
