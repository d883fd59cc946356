"""
The engine as asyncio and trio programs use it.

All that can be checked is checked here, in the caller's task, before the engine thread
hears of a request; errors name the parameter.
"""

from __future__ import annotations

import math
import os
import warnings
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from operator import length_hint
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

from pyllama_raw.config import EngineConfig
from pyllama_raw.engine.lifetime import close_at_exit
from pyllama_raw.errors import InvalidRequest, PyllamaError
from pyllama_raw.loading import Progress, load
from pyllama_raw.prompt import (
    LONG_PROMPT,
    Prompt,
    PromptEncoder,
    prompt_size,
)
from pyllama_raw.sampling.declared import with_declared
from pyllama_raw.sampling.params import SamplingParams

if TYPE_CHECKING:  # the rest comes in while a model loads
    from pyllama_raw.core.cache_stats import CacheStats
    from pyllama_raw.core.request import Request
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.generation import Generation, Prepared
    from pyllama_raw.results import EngineStats, Result, Score

MAX_PRIORITY = 2**31 - 1
MAX_SEED = 2**32 - 2


class RequestOptions(TypedDict, total=False):
    """How a request is served; nothing here changes its output."""

    priority: int  # lower runs first; 0
    deadline_s: float | None  # seconds from now; it then ends with what it has
    cache_salt: str | None  # only requests with an equal salt share cached prefixes
    cache_points: Iterable[int]  # positions of the prompt worth a snapshot


class AsyncEngine:
    """A loaded model that serves any number of requests at once."""

    def __init__(
        self, parts: EngineParts, encoder: PromptEncoder | None = None
    ) -> None:
        """Use open(); this is for tests and for own executors."""
        from pyllama_raw.engine.loop import EngineThread

        self._parts = parts
        self._encoder = encoder or PromptEncoder.of(parts)
        self._request_ids = count(1)
        self._thread = EngineThread(
            parts.scheduler,
            parts.executor,
            parts.flag,
            files=parts.files,
            release=partial(_release, self._encoder, parts),
        )
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
        parts, encoder = await load(model, config or EngineConfig(), progress)
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

        params = params or SamplingParams()
        prepare = partial(self._prepare, prompt, params, options)
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

        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=n_top)
        async with self.generate(prompt, params, **options) as generation:
            tokens = generation.prompt_token_ids
            if len(tokens) < 2:
                raise InvalidRequest("prompt", prompt, "two tokens or more")
            result = await generation.collect()
        return Score(tokens, result.prompt_logprobs)

    async def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
    ) -> Prepared:
        from pyllama_raw.core.request import Request

        started = self._thread.clock()
        deadline_s = options.get("deadline_s")
        params = with_declared(params, self._parts.metadata)
        self._check(params, options)
        constraint = await self._constrain(params)
        tokens = await self._encode(prompt)
        stop_tokens = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_tokens |= self._parts.vocab.eog_tokens
        seed = random_seed() if params.seed is None else params.seed
        request_ids = [next(self._request_ids) for _ in range(params.n)]
        request = Request(
            request_id=request_ids[0],
            tokens=tokens,
            max_tokens=params.max_tokens,
            constraint=constraint,
            stop=tuple(stop.encode() for stop in params.stop),
            stop_token_ids=stop_tokens,
            priority=options.get("priority", 0),
            deadline=None if deadline_s is None else started + deadline_s,
            namespace=self._namespace(options.get("cache_salt"), request_ids[0]),
            cache_points=tuple(options.get("cache_points", ())),
        )
        return _fork(request, params, seed, request_ids)

    async def _constrain(self, params: SamplingParams) -> object:
        if params.constraint is None and not params.dries:
            return None
        constrain = partial(self._parts.constrain, params)
        return await to_thread.run_sync(self._encoder.run, constrain)

    async def _encode(self, prompt: Prompt) -> array[int]:
        if prompt_size(prompt) > LONG_PROMPT:
            return await to_thread.run_sync(self._encoder.encode, prompt)
        await checkpoint()
        return self._encoder.encode(prompt)

    def _namespace(self, salt: str | None, request_id: int) -> Hashable:
        """Who shares the cache with a request; with scope "salt" nobody without one."""
        if salt is None and self._parts.cache_scope == "salt":
            return request_id
        return salt

    def _check(self, params: SamplingParams, options: RequestOptions) -> None:
        priority, deadline_s = options.get("priority", 0), options.get("deadline_s")
        check_tokens(params, self._parts.vocab.n_tokens)
        if abs(priority) > MAX_PRIORITY:
            allowed = f"whole numbers from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            raise InvalidRequest("priority", priority, allowed)
        if deadline_s is not None and not 0 < deadline_s < math.inf:
            raise InvalidRequest("deadline_s", deadline_s, "seconds above 0, or None")
        for point in options.get("cache_points", ()):
            if point < 1:
                raise InvalidRequest("cache_points", point, "positions from 1")


def _fork(
    request: Request, params: SamplingParams, seed: int, request_ids: list[int]
) -> Prepared:
    """A request for each output; equal prompts of one namespace are computed once."""
    from pyllama_raw.generation import Prepared

    seeds = tuple((seed + index) % (MAX_SEED + 1) for index in range(len(request_ids)))
    requests: list[Request] = []
    for request_id, own_seed in zip(request_ids, seeds, strict=True):
        changes: dict[str, object] = {"seed": own_seed}
        if requests:  # the first one scores the prompt
            changes["prompt_logprobs"] = None
        sampling = params.model_copy(update=changes)
        requests.append(
            replace(
                request,
                request_id=request_id,
                sampling=sampling,
                scores_prompt=sampling.prompt_logprobs is not None,
            )
        )
    return Prepared(tuple(requests), seeds)


def random_seed() -> int:
    """0 to MAX_SEED; the module `secrets` would load OpenSSL for it."""
    return int.from_bytes(os.urandom(8)) % (MAX_SEED + 1)


def check_tokens(params: SamplingParams, n_vocab: int) -> None:
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
