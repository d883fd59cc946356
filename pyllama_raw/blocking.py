"""
The engine for programs without an event loop: the verbs of AsyncEngine, each waits.

Rules:
1. Any thread may call, also one whose own event loop runs, which then waits.
2. The event loop of an engine runs in a thread of its own. What is computed, checked and
   raised is AsyncEngine's: here is nothing but waiting.
3. A wait that is interrupted, as by Ctrl-C, ends what was waited for.
4. The interpreter does not end before the engine: what is left open is closed.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack
from weakref import WeakSet

import anyio
from anyio.from_thread import BlockingPortal

from pyllama_raw.api import AsyncEngine
from pyllama_raw.errors import ClosedError
from pyllama_raw.loading import Progress
from pyllama_raw.messages import Message
from pyllama_raw.model import Model
from pyllama_raw.prompt import Prompt

if TYPE_CHECKING:
    from pyllama_raw.config import EngineConfig
    from pyllama_raw.core.memory.cache_stats import CacheStats
    from pyllama_raw.engine.info import EngineInfo
    from pyllama_raw.generation import Generation
    from pyllama_raw.options import ChatOptions, RequestOptions
    from pyllama_raw.results import Delta, EngineStats, Result, Score
    from pyllama_raw.sampling.params import SamplingParams

T = TypeVar("T")


class Engine:
    """A loaded model that any thread may use; see AsyncEngine for each verb."""

    def __init__(self, make: Callable[[], Awaitable[AsyncEngine]]) -> None:
        """Use open(); *make* is called in the event loop of the engine."""
        self._closing = Lock()
        self._loop = _Loop()
        try:
            self._engine = self._loop.run(make)
        except BaseException:
            self._loop.stop()
            raise
        _open.add(self)

    @classmethod
    def open(
        cls,
        model: str | Path | Model | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
    ) -> Self:
        """Load *model*, or share a Model; close() or the end of a `with` block frees it."""

        async def make() -> AsyncEngine:
            return await AsyncEngine.open(model, config, progress=progress)

        return cls(make)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, drain_s: float = 0.0) -> None:
        """See AsyncEngine.aclose; can be repeated, by any thread."""
        if not self._loop.is_ours:  # the parent's: a fork has none of its threads
            return
        if drain_s and self._loop.is_running:
            self._loop.run(self._engine.aclose, drain_s)
        with self._closing:
            if self._loop.is_running:
                self._loop.run(self._engine.aclose)
                self._loop.stop()

    def __del__(self) -> None:
        """AsyncEngine ends its own thread and warns."""
        if hasattr(self, "_engine"):
            self._loop.leave()

    # -- facts ------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._engine.alive

    @property
    def error(self) -> BaseException | None:
        """What has ended the engine by itself; None: nothing did."""
        return self._engine.error

    @property
    def info(self) -> EngineInfo:
        """The model, what the options came to, and versions."""
        return self._engine.info

    @property
    def n_ctx_slot(self) -> int:
        """Prompt and output tokens one request may have together."""
        return self._engine.n_ctx_slot

    def stats(self) -> EngineStats:
        """See AsyncEngine.stats."""
        return self._engine.stats()

    def cache_stats(self) -> CacheStats:
        """See AsyncEngine.cache_stats."""
        return self._loop.run(self._engine.cache_stats)

    def clear_cache(self, cache_salt: str | None = None) -> int:
        """See AsyncEngine.clear_cache."""
        return self._loop.run(self._engine.clear_cache, cache_salt)

    # -- requests ---------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> BlockingGeneration:
        """A stream of output; use it as `with`, then `for`. See AsyncEngine.generate."""
        generation = self._engine.generate(prompt, params, **options)
        return BlockingGeneration(self._loop, generation)

    def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """See AsyncEngine.complete."""
        return self._loop.run(self._engine.complete, prompt, params, **options)

    def complete_n(
        self,
        prompt: Prompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> tuple[Result, ...]:
        """See AsyncEngine.complete_n."""
        return self._loop.run(self._engine.complete_n, prompt, params, **options)

    def complete_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Result]:
        """See AsyncEngine.complete_many."""
        return self._loop.run(self._engine.complete_many, prompts, params, **options)

    def score(
        self, prompt: Prompt, n_top: int = 0, **options: Unpack[RequestOptions]
    ) -> Score:
        """See AsyncEngine.score."""
        return self._loop.run(self._engine.score, prompt, n_top, **options)

    def tokenize(self, text: str) -> list[int]:
        """See AsyncEngine.tokenize."""
        return self._loop.run(self._engine.tokenize, text)

    def detokenize(self, token_ids: Sequence[int], special: bool = False) -> str:
        """See AsyncEngine.detokenize."""
        return self._loop.run(self._engine.detokenize, token_ids, special)

    def count(self, prompt: Prompt, **options: Unpack[ChatOptions]) -> int:
        """See AsyncEngine.count."""
        return self._loop.run(self._engine.count, prompt, **options)

    def render(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> str:
        """See AsyncEngine.render."""
        return self._loop.run(self._engine.render, messages, **options)


class BlockingGeneration:
    """What `Engine.generate` returns: a Generation whose reader waits."""

    def __init__(self, loop: _Loop, generation: Generation) -> None:
        self._loop = loop
        self._generation = generation

    def __enter__(self) -> Self:
        self._loop.run(self._generation.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        delta = self._loop.run(self._next)
        if delta is None:
            raise StopIteration
        return delta

    async def _next(self) -> Delta | None:
        return await anext(self._generation, None)

    def collect(self) -> Result:
        """See Generation.collect."""
        return self._loop.run(self._generation.collect)

    def collect_all(self) -> tuple[Result, ...]:
        """See Generation.collect_all."""
        return self._loop.run(self._generation.collect_all)

    @property
    def result(self) -> Result:
        """See Generation.result."""
        return self._generation.result

    @property
    def results(self) -> tuple[Result, ...]:
        """See Generation.results."""
        return self._generation.results

    def cancel(self) -> None:
        """End the request within one step; the result keeps what was generated."""
        self._generation.cancel()


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._begun: Future[BlockingPortal] = Future()
        self._thread = Thread(target=self._run, name="pyllama-loop", daemon=True)
        self._thread.start()
        self._portal = self._begun.result()
        self.is_running = True

    @property
    def is_ours(self) -> bool:
        return self._pid == os.getpid()

    def run(
        self, function: Callable[..., Awaitable[T]], /, *arguments: Any, **named: Any
    ) -> T:
        """What *function* returns or raises."""
        if not (self.is_running and self.is_ours):
            raise ClosedError("the engine is closed")
        try:
            future: Future[T] = self._portal.start_task_soon(
                partial(function, *arguments, **named)
            )
        except RuntimeError as error:  # it stopped just now
            raise ClosedError("the engine is closed") from error
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Let what runs end, then the thread."""
        self.is_running = False
        self._portal.call(self._portal.stop)
        self._thread.join()

    def leave(self) -> None:
        """Like stop(), but waits for nothing: for finalisers."""
        if self.is_running and self.is_ours:
            self.is_running = False
            with suppress(RuntimeError):
                self._portal.start_task_soon(self._portal.stop)

    def _run(self) -> None:
        anyio.run(self._main)

    async def _main(self) -> None:
        async with BlockingPortal() as portal:
            self._begun.set_result(portal)
            await portal.sleep_until_stopped()


_open: WeakSet[Engine] = WeakSet()


@atexit.register
def _close_all() -> None:
    for engine in list(_open):
        engine.close()
