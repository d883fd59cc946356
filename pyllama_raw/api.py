"""The engine as asyncio and trio programs use it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Self, Unpack

import anyio
from anyio import to_thread

from pyllama_raw.arguments import (
    check_opening,
    checked_adapter,
    checked_chat,
    checked_file,
    checked_number,
    checked_options,
    checked_params,
    checked_prompts,
    checked_salt,
    checked_top,
)
from pyllama_raw.engine.lifetime import close_at_exit
from pyllama_raw.errors import ClosedError, DeadlineExceeded, InvalidRequest
from pyllama_raw.facts import Facts
from pyllama_raw.loading import Opening, Progress, Report, load
from pyllama_raw.many import complete_all
from pyllama_raw.messages import Message
from pyllama_raw.model import Model, build_on
from pyllama_raw.options import ChatOptions, Need, RequestOptions, TextOptions
from pyllama_raw.prompt import Prompt, PromptEncoder
from pyllama_raw.workers import in_worker

if TYPE_CHECKING:  # the rest comes in while a model loads
    from pyllama_raw.config import EngineConfig
    from pyllama_raw.core.memory.cache_stats import CacheStats
    from pyllama_raw.embedding import TextPooling, Told, Vectors
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.events import Events
    from pyllama_raw.generation import Generation
    from pyllama_raw.ranking import Ranked
    from pyllama_raw.results import Result, Score
    from pyllama_raw.sampling.params import SamplingParams


class AsyncEngine(Facts):
    """A loaded model that serves any number of requests at once."""

    def __init__(
        self, parts: EngineParts, encoder: PromptEncoder | None = None
    ) -> None:
        """Use open(); this is for tests and for own executors."""
        from pyllama_raw.embedding import Embedders
        from pyllama_raw.engine.adapters import Adapters
        from pyllama_raw.engine.capabilities import Operation
        from pyllama_raw.engine.loop import EngineThread
        from pyllama_raw.preparation import Preparation

        self._parts = parts
        encoder = encoder or PromptEncoder.of(parts)
        self._thread = EngineThread(
            parts.scheduler,
            parts.executor,
            admission=parts.admission,
            files=parts.files,
            logs=parts.logs,
            media=parts.media,
            adapters=Adapters(
                parts.adapter_host, parts.max_adapter_bytes, parts.span_keys
            ),
            release=partial(_release, encoder, parts),
        )
        self._preparation = Preparation(
            parts, encoder, self._thread.clock, self._thread.adapters
        )
        close_at_exit(self._thread)
        self._check_generates = partial(parts.capabilities.check, Operation.GENERATE)
        self._check_ranks = partial(parts.capabilities.check, Operation.RANK)
        self._embedders = Embedders(parts, encoder, self._thread)

    @classmethod
    def open(
        cls,
        model: str | Path | Model | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        needs: Need | None = None,
    ) -> Opening[Self]:
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
            made = await load(partial(_build, model, config, needs), progress, _give_up)
            return cls(*made)

        return Opening(make)

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
        if not drain_s >= 0:
            raise InvalidRequest("drain_s", drain_s, "seconds, 0 or more")
        # A limiter of its own: closing must not wait for other blocking calls.
        join = partial(to_thread.run_sync, limiter=anyio.CapacityLimiter(2))
        try:
            if drain_s:
                self._thread.close(drains=True)
                wait_s = min(drain_s, TIMEOUT_MAX)
                await join(self._thread.join, wait_s, abandon_on_cancel=True)
        finally:
            self._thread.close()
            with anyio.CancelScope(shield=True):
                await join(self._embedders.close)
                await join(self._thread.join)

    def __del__(self) -> None:
        if hasattr(self, "_embedders") and self._thread.alive:
            self._thread.close()
            self._embedders.leave()
            warnings.warn(
                f"{self!r} was dropped before aclose(): use `async with`",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    def events(self, max_events: int = 1024) -> Events:
        """
        What becomes of the engine and of requests, as it happens; see Events.

        Args:
            max_events: that wait for their reader; then the oldest are lost, and it is told.

        Raises, on entering the block:
            ClosedError, EngineStopped.
        """
        from pyllama_raw.events import Events

        most = checked_number("max_events", max_events, 1, 2**20)
        return Events(self._thread, most)

    # -- adapters ---------------------------------------------------------------

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """
        Load the LoRA or control vector at *path*: `generate(..., adapters={name: 1.0})`.

        Requests that run go on. An earlier adapter of that name is as if unloaded. Adapters
        that no request uses give way, the longest unused first, to keep max_adapter_bytes.

        Raises:
            InvalidRequest: *name* or *path* is none.
            AdapterLoadFailed: there is no such file, it is damaged, or of another model.
            AdapterLimit: the adapters that requests use leave no room.
            Unsupported: the model generates no text.
            ClosedError, EngineStopped: as generate().
        """
        self._thread.check()
        file = checked_file("path", path)
        load = partial(self._thread.adapters.load, checked_adapter(name), file)
        await in_worker("adapters", load)

    async def unload_adapter(self, name: str) -> None:
        """
        Let no further request have the adapter; it is freed when those that use it have ended.

        Raises:
            AdapterNotFound: there is none of that name.
        """
        self._thread.adapters.unload(checked_adapter(name))

    # -- requests ---------------------------------------------------------------

    async def cache_stats(self) -> CacheStats:
        """Tokens reused and bytes stored, between two steps."""
        answer = self._thread.call(self._parts.scheduler.cache_stats)
        return await in_worker("call", answer.result)

    async def clear_cache(self, cache_salt: str | None = None) -> int:
        """
        Forget what is kept of past requests: of *cache_salt*, or of all (None).

        Returns:
            Bytes of host memory freed. Running requests go on.

        Raises:
            InvalidRequest: no salt that a request could have.
        """
        salt = checked_salt(cache_salt)
        forget = partial(self._parts.scheduler.clear_cache, salt)
        return await in_worker("call", self._thread.call(forget).result)

    async def tokenize(self, text: str) -> list[int]:
        """
        Token ids of *text* as a prompt: special tokens are added and understood.

        Raises:
            InvalidRequest: not text.
            PromptTooLong: it does not fit a slot; as of generate().
        """
        if not isinstance(text, str):
            raise InvalidRequest("text", text, "text")
        return list(await self._preparation.encode(text))

    async def detokenize(self, token_ids: Sequence[int], special: bool = False) -> str:
        """
        The text of *token_ids*; bytes that are no UTF-8 become U+FFFD.

        Args:
            special: control tokens are written, too.
        """
        return await self._preparation.detokenize(token_ids, special)

    async def count(self, prompt: Prompt, **options: Unpack[ChatOptions]) -> int:
        """
        Tokens of *prompt*, as `usage.prompt_tokens` will tell.

        Raises:
            InvalidRequest, PromptTooLong, Unsupported, ClosedError: as generate().
        """
        return len(await self._preparation.encode(prompt, checked_chat(options)))

    async def render(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> str:
        """The text that the chat template makes of *messages*; raises as generate()."""
        return await self._preparation.render(messages, checked_chat(options))

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
            NativeError, EngineFault, EngineStalled, EngineStopped.
        """
        from pyllama_raw.generation import Generation

        self._check_generates()
        params, checked = checked_params(params), checked_options(options)
        prepare = partial(self._preparation.prepare, prompt, params, checked)
        return Generation(self._thread, self._parts.vocab.pieces, prepare)

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
        _check_whole((result,))
        return result

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
        _check_whole(results)
        return results

    async def complete_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Result]:
        """
        Results in the order of *prompts*; the first error ends all of them.

        At most twice as many as there are slots are submitted at a time, and what finds
        the queue full waits for another one to end; *deadline_s* counts from there.

        Raises, besides:
            QueueFull: requests of others fill the engine, and none of these runs.
        """
        checked = checked_options(options)  # iterators are read once, for all prompts
        complete = partial(self.complete, params=checked_params(params), **checked)
        admission = self._parts.admission
        n_tasks = min(2 * admission.n_slots, admission.max_requests)
        return await complete_all(complete, checked_prompts(prompts), n_tasks)

    async def score(
        self, prompt: Prompt, n_top: int = 0, **options: Unpack[RequestOptions]
    ) -> Score:
        """
        How likely the model finds each token of *prompt* after those before it.

        Nothing is taken from the cache: every token is computed. One step computes at
        most ContextConfig.n_outputs_max of them.

        Args:
            n_top: most likely tokens listed at each place, 0 to 20.

        Raises:
            InvalidRequest: n_top is something else, or the prompt is a single token:
                there is nothing to score.
            DeadlineExceeded: *deadline_s* was over before every token had its score.
        """
        from pyllama_raw.results import Score
        from pyllama_raw.sampling.params import SamplingParams

        n_listed = checked_top(n_top)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=n_listed)
        async with self.generate(prompt, params, **options) as generation:
            tokens = generation.prompt_token_ids
            if len(tokens) < 2:
                raise InvalidRequest("prompt", prompt, "two tokens or more")
            result = await generation.collect()
        _check_whole((result,))
        n_scored, n_wanted = len(result.prompt_logprobs), len(tokens) - 1
        if n_scored < n_wanted:
            raise DeadlineExceeded(n_scored, n_wanted)
        return Score(tokens, result.prompt_logprobs)

    async def embed(
        self,
        texts: Iterable[str],
        dimensions: int | None = None,
        normalize: bool = True,
        pooling: TextPooling | None = None,
        *,
        progress: Told | None = None,
        **options: Unpack[TextOptions],
    ) -> Vectors:
        """
        A vector for each text: a row of an array of float32, in the order of *texts*.

        The first call on a model that generates opens a context of its own for this.

        Args:
            dimensions: only the first ones of each vector; None: all.
            normalize: make vectors as long as 1, after they are cut.
            pooling: how the vectors of the tokens of a text become one; None: as the model
                says.
            progress: called with the number of texts that have a vector.

        Raises:
            InvalidRequest: there is no text, one is empty, or an argument is not allowed.
            TextTooLong: a text has too many tokens for the model or for a step.
            Unsupported: the model states no pooling, and none is given.
            EmbeddingFailed: the model makes something of a text that is no number.
            DeadlineExceeded: *deadline_s* was over before every text had its vector.
            QueueFull, ClosedError, EngineStopped, NativeError: as generate().
        """
        embedder = await self._embedders.get()
        wanted = embedder.pooling(pooling)
        shape = embedder.shape(dimensions, normalize=normalize)
        (rows,) = await embedder.embed(
            texts, wanted, shape, progress, joined=True, **options
        )
        return rows

    async def embed_tokens(
        self,
        texts: Iterable[str],
        dimensions: int | None = None,
        normalize: bool = True,
        *,
        progress: Told | None = None,
        **options: Unpack[TextOptions],
    ) -> list[Vectors]:
        """Like embed(), with an array for each text that has a row for each token."""
        from pyllama_raw.engine.model_info import Pooling

        embedder = await self._embedders.get()
        shape = embedder.shape(dimensions, normalize=normalize)
        return await embedder.embed(texts, Pooling.NONE, shape, progress, **options)

    async def rank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        progress: Told | None = None,
        **options: Unpack[TextOptions],
    ) -> list[Ranked]:
        """
        *documents* by how well they answer *query*, the best first.

        Scores are as the model gives them, so those of other models differ in range.

        Raises:
            Unsupported: the model is no reranker.
            InvalidRequest, TextTooLong, EmbeddingFailed, DeadlineExceeded: as embed().
            QueueFull, ClosedError, EngineStopped, NativeError: as generate().
        """
        from pyllama_raw.ranking import rank

        self._check_ranks()
        embedder = await self._embedders.get()
        return await rank(embedder, query, documents, progress, **options)


def _build(
    model: str | Path | Model | None,
    config: EngineConfig | None,
    needs: Need | None,
    report: Report,
) -> tuple[EngineParts, PromptEncoder]:
    """Thread: a worker."""
    from pyllama_raw import models
    from pyllama_raw.engine import opening

    if isinstance(model, Model):
        config = with_projector(config, None, Path(model.path))
        parts = build_on(model, config, needs)
    else:
        path = models.resolve_model(model)
        config = with_projector(config, model, path)
        parts = opening.build(path, config, needs, report)
    try:
        return parts, PromptEncoder.of(parts)
    except BaseException:
        parts.release()
        raise


def with_projector(
    config: EngineConfig | None, model: str | Path | None, path: Path
) -> EngineConfig | None:
    """*config* with the file of the projector that it names. Raises ModelNotFound."""
    if config is None or config.media.mmproj is None:
        return config
    from pyllama_raw.models import resolve_projector

    found = resolve_projector(config.media.mmproj, model, path)
    media = config.media.model_copy(update={"mmproj": found})
    return config.model_copy(update={"media": media})


def _give_up(made: tuple[EngineParts, PromptEncoder]) -> None:
    made[0].release()


def _check_whole(results: tuple[Result, ...]) -> None:
    """Cut text is no result of a call that has no other way to tell."""
    from pyllama_raw.core.request import FinishReason

    if any(result.finish_reason is FinishReason.CLOSED for result in results):
        raise ClosedError(
            "the engine was closed before the output was whole: `results` of this error "
            "has what there is; aclose(drain_s=...) waits for what runs",
            results,
        )


def _release(encoder: PromptEncoder, parts: EngineParts) -> None:
    encoder.close()
    try:
        parts.release()
    finally:
        parts.logs.close()
