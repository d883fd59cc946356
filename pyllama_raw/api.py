"""The engine as asyncio and trio programs use it."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from operator import length_hint
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import anyio
from anyio import to_thread

from pyllama_raw.engine.lifetime import close_at_exit
from pyllama_raw.errors import InvalidRequest, PyllamaError
from pyllama_raw.loading import Progress, load
from pyllama_raw.prompt import Prompt, PromptEncoder

if TYPE_CHECKING:  # the rest comes in while a model loads
    from pyllama_raw.config import EngineConfig
    from pyllama_raw.core.cache_stats import CacheStats
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.generation import Generation
    from pyllama_raw.preparation import RequestOptions
    from pyllama_raw.results import EngineStats, Result, Score
    from pyllama_raw.sampling.params import SamplingParams


class AsyncEngine:
    """A loaded model that serves any number of requests at once."""

    def __init__(
        self, parts: EngineParts, encoder: PromptEncoder | None = None
    ) -> None:
        """Use open(); this is for tests and for own executors."""
        from pyllama_raw.engine.loop import EngineThread
        from pyllama_raw.preparation import Preparation

        self._parts = parts
        encoder = encoder or PromptEncoder.of(parts)
        self._thread = EngineThread(
            parts.scheduler,
            parts.executor,
            parts.flag,
            files=parts.files,
            release=partial(_release, encoder, parts),
        )
        self._preparation = Preparation(parts, encoder, self._thread.clock)
        close_at_exit(self._thread)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
    ) -> AsyncIterator[Self]:
        """
        Load *model* in a worker thread and close it at the end of the block.

        Args:
            model: a GGUF file; None: the default model, downloaded if need be.
            progress: called in the worker thread with the loaded fraction, 0 to 1.

        Raises:
            ModelLoadFailed, ContextFailed, LibraryNotBuilt, Unsupported.
        """
        parts, encoder = await load(model, config, progress)
        async with cls(parts, encoder) as engine:
            yield engine

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every request with what it has and free the model; can be repeated."""
        self._thread.close()
        with anyio.CancelScope(shield=True):
            # A limiter of its own: closing must not wait for other blocking calls.
            limiter = anyio.CapacityLimiter(1)
            await to_thread.run_sync(self._thread.join, limiter=limiter)

    def __del__(self) -> None:
        if hasattr(self, "_thread") and self._thread.alive:
            self._thread.close()
            warnings.warn(
                f"{self!r} was dropped before aclose(): use `async with`",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    # -- requests ---------------------------------------------------------------

    @property
    def n_ctx_slot(self) -> int:
        """Prompt and output tokens one request may have together."""
        return self._parts.scheduler.limits.n_ctx_slot

    def stats(self) -> EngineStats:
        """Running, waiting, slots, KV cells and totals, as of the latest step."""
        from pyllama_raw.results import EngineStats

        times = self._parts.executor.times
        return EngineStats(
            **asdict(self._thread.stats),
            decode_s=times.decode_s,
            sample_s=times.sample_s,
            capture_s=times.capture_s,
            restore_s=times.restore_s,
            dropped_steps=times.n_dropped,
            lane_attaches=times.lane_attaches,
            lane_reserves=times.lane_reserves,
            lane_fallbacks=times.lane_fallbacks,
        )

    async def cache_stats(self) -> CacheStats:
        """Tokens reused and bytes stored, between two steps."""
        answer = self._thread.call(self._parts.scheduler.cache_stats)
        return await to_thread.run_sync(answer.result)

    async def clear_cache(self, cache_salt: str | None = None) -> int:
        """
        Forget what is kept of past requests: of *cache_salt*, or of all (None).

        Returns:
            Bytes of host memory freed. Running requests go on.
        """
        forget = partial(self._parts.scheduler.clear_cache, cache_salt)
        return await to_thread.run_sync(self._thread.call(forget).result)

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

        Raises, on entering the block:
            InvalidRequest, PromptTooLong, Unsupported, ClosedError, EngineStopped.
        Raises, on reading:
            QueueFull, NativeError, EngineStopped.
        """
        from pyllama_raw.generation import Generation
        from pyllama_raw.sampling.params import SamplingParams

        params = params or SamplingParams()
        prepare = partial(self._preparation.prepare, prompt, params, options)
        return Generation(self._thread, self._parts.vocab.pieces, prepare)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """Like generate(), all at once; for one output (n=1)."""
        if params is not None and params.n > 1:
            raise InvalidRequest("n", params.n, "1, or use complete_n()")
        async with self.generate(prompt, params, **options) as generation:
            return await generation.collect()

    async def complete_n(
        self,
        prompt: Prompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> tuple[Result, ...]:
        """
        Like generate(), all *params.n* outputs at once, by index.

        The prompt is computed once, unless the cache is off. An output that fails is
        left out; if all do, the error of the first is raised.
        """
        async with self.generate(prompt, params, **options) as generation:
            return await generation.collect_all()

    async def complete_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Result]:
        """
        Results in the order of *prompts*; the first error ends all of them.

        At most twice as many as there are slots are submitted at a time, so that any
        number fits the queue; *deadline_s* counts from there.
        """
        complete = partial(self.complete, params=params, **options)
        return await _gather(complete, prompts, 2 * self._thread.stats.n_slots)

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
            InvalidRequest: the prompt is a single token: there is nothing to score.
        """
        from pyllama_raw.results import Score
        from pyllama_raw.sampling.params import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=n_top)
        async with self.generate(prompt, params, **options) as generation:
            tokens = generation.prompt_token_ids
            if len(tokens) < 2:
                raise InvalidRequest("prompt", prompt, "two tokens or more")
            result = await generation.collect()
        return Score(tokens, result.prompt_logprobs)


async def _gather(
    complete: Callable[[Prompt], Awaitable[Result]],
    prompts: Iterable[Prompt],
    n_tasks: int,
) -> list[Result]:
    """Complete *prompts* in order, *n_tasks* at a time; raises the first error bare."""
    numbered = enumerate(prompts)
    results: dict[int, Result] = {}
    errors: list[PyllamaError] = []

    async def work() -> None:
        for index, prompt in numbered:
            try:
                results[index] = await complete(prompt)
            except PyllamaError as error:
                errors.append(error)
                group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for _ in range(min(n_tasks, length_hint(prompts, n_tasks) or 1)):
            group.start_soon(work)
    if errors:
        raise errors[0]
    return [results[index] for index in sorted(results)]


def _release(encoder: PromptEncoder, parts: EngineParts) -> None:
    encoder.close()
    parts.release()
