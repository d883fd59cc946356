"""
The engine for programs without an event loop: the verbs of AsyncEngine, each waits.

`generate()` and `score()` are single calls. Each opens an engine of its own: for several calls,
open an `Engine`.

Rules:
1. Any thread may call, also one whose own event loop runs, which then waits.
2. The event loop of an engine runs in a thread of its own. What is computed, checked and
   raised is AsyncEngine's: here is nothing but waiting.
3. A wait that is interrupted, as by Ctrl-C, ends what was waited for.
4. The interpreter does not end before the engine: what is left open is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from threading import Lock, Thread
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeGuard,
    TypeVar,
    Unpack,
    overload,
)
from weakref import WeakSet

import anyio
from anyio.from_thread import BlockingPortal

from pyllama_raw.api.engine import AsyncEngine
from pyllama_raw.api.facts import Facts
from pyllama_raw.api.generation import Generation
from pyllama_raw.api.model import Model, Owner, Progress
from pyllama_raw.api.results import Result, Score
from pyllama_raw.engine.mailbox import check_may_wait
from pyllama_raw.errors import ClosedError, PyllamaError
from pyllama_raw.options.arguments import (
    SINGLE,
    checked_params,
    checked_top,
    reading_prompt,
)
from pyllama_raw.options.config import ContextConfig, EngineConfig, SchedulerConfig
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.prompts.messages import Message
from pyllama_raw.prompts.prompt import Prompt

if TYPE_CHECKING:
    from pyllama_raw.api.events import Event, Events
    from pyllama_raw.api.results import Delta
    from pyllama_raw.options.requests import Need, RequestOptions

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")
SCORING = EngineConfig(
    context=ContextConfig(n_outputs_max=256), scheduler=SchedulerConfig(n_slots=1)
)
Prompts = Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Message]]


class _Blocking(Owner, Generic[A_co]):
    """Has an object whose methods are awaited in the event loop of another thread."""

    _loop: _Loop
    _awaited: A_co


def _waiting(
    verb: Callable[Concatenate[A, P], Awaitable[T]],
) -> Callable[Concatenate[_Blocking[A], P], T]:
    """The method *verb* of an awaited object for callers that wait."""

    @wraps(verb)
    def wait(self: _Blocking[A], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        return self._loop.run(verb, self._awaited, *arguments, **keywords)

    return wait


class Engine(Facts, _Blocking[AsyncEngine]):
    """A loaded model that any thread may use; see AsyncEngine for each verb."""

    def __init__(self, make: Callable[[], Awaitable[AsyncEngine]]) -> None:
        """Use open(); *make* is called in the event loop of the engine."""
        if not callable(make):
            raise TypeError("use Engine.open(model, config) in a `with` block")
        check_may_wait()
        self._closing = Lock()
        self._loop = _Loop()
        try:
            self._awaited = self._loop.run(make)
        except BaseException:
            self._loop.stop()
            raise
        super().__init__(self._awaited._sessions)
        _open.add(self)

    @classmethod
    def open(
        cls,
        model: str | Path | Model | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        needs: Need | None = None,
    ) -> Self:
        """Load *model*, or share a Model; close() or the end of a `with` block frees it."""

        async def make() -> AsyncEngine:
            return await AsyncEngine.open(model, config, progress=progress, needs=needs)

        return cls(make)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, drain_s: float = 0.0) -> None:
        """See AsyncEngine.aclose; can be repeated, by any thread."""
        check_may_wait()
        if not self._loop.is_ours:  # the parent's: a fork has none of its threads
            return
        if drain_s and self._loop.is_running:
            self._loop.run(self._awaited.aclose, drain_s)
        with self._closing:
            if self._loop.is_running:
                self._loop.run(self._awaited.aclose)
                self._loop.stop()

    def __del__(self) -> None:
        """AsyncEngine ends its own thread and warns."""
        if hasattr(self, "_awaited"):
            self._loop.leave()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> BlockingGeneration:
        """A stream of output; use it as `with`, then `for`. See AsyncEngine.generate."""
        generation = self._awaited.generate(prompt, params, **options)
        return BlockingGeneration(self._loop, generation)

    @overload
    def complete_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        errors: Literal["raise"] = "raise",
        progress: Callable[[int], object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Result]: ...

    @overload
    def complete_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        errors: Literal["return"],
        progress: Callable[[int], object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Result | PyllamaError]: ...

    def complete_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        errors: Literal["raise", "return"] = "raise",
        progress: Callable[[int], object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Result] | list[Result | PyllamaError]:
        """See AsyncEngine.complete_many; *progress* is called in the thread of the loop."""
        complete_many: Any = partial(  # its overloads stand above
            self._awaited.complete_many, errors=errors, progress=progress, **options
        )
        results: list[Result] = self._loop.run(complete_many, prompts, params)
        return results

    def events(self, max_events: int = 1024) -> BlockingEvents:
        """Events of the engine and of its requests; use it as `with`, then `for`."""
        return BlockingEvents(self._loop, self._awaited.events(max_events))

    complete = _waiting(AsyncEngine.complete)
    complete_n = _waiting(AsyncEngine.complete_n)
    score = _waiting(AsyncEngine.score)
    score_many = _waiting(AsyncEngine.score_many)
    classify = _waiting(AsyncEngine.classify)
    embed = _waiting(AsyncEngine.embed)
    embed_tokens = _waiting(AsyncEngine.embed_tokens)
    chunks = _waiting(AsyncEngine.chunks)
    rank = _waiting(AsyncEngine.rank)
    tokenize = _waiting(AsyncEngine.tokenize)
    detokenize = _waiting(AsyncEngine.detokenize)
    pieces = _waiting(AsyncEngine.pieces)
    count = _waiting(AsyncEngine.count)
    render = _waiting(AsyncEngine.render)
    load_adapter = _waiting(AsyncEngine.load_adapter)
    unload_adapter = _waiting(AsyncEngine.unload_adapter)
    warmup = _waiting(AsyncEngine.warmup)
    sleep = _waiting(AsyncEngine.sleep)
    wake = _waiting(AsyncEngine.wake)
    reload = _waiting(AsyncEngine.reload)
    rebuild_session = _waiting(AsyncEngine.rebuild_session)
    slots = _waiting(AsyncEngine.slots)
    save_slot = _waiting(AsyncEngine.save_slot)
    restore_slot = _waiting(AsyncEngine.restore_slot)
    cache_stats = _waiting(AsyncEngine.cache_stats)
    clear_cache = _waiting(AsyncEngine.clear_cache)


class BlockingEvents(_Blocking["Events"]):
    """The value of `Engine.events`: Events with a reader that waits."""

    def __init__(self, loop: _Loop, events: Events) -> None:
        self._loop = loop
        self._awaited = events

    def __enter__(self) -> Self:
        self._loop.run(self._awaited.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self._awaited.leave()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        return self._loop.next(self._awaited)


class BlockingGeneration(_Blocking[Generation]):
    """The value of `Engine.generate`: a Generation with a reader that waits."""

    def __init__(self, loop: _Loop, generation: Generation) -> None:
        self._loop = loop
        self._awaited = generation

    def __enter__(self) -> Self:
        self._loop.run(self._awaited.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Self:
        aiter(self._awaited)  # raises if it has been read
        return self

    def __next__(self) -> Delta:
        return self._loop.next(self._awaited)

    collect = _waiting(Generation.collect)
    collect_all = _waiting(Generation.collect_all)

    @property
    def result(self) -> Result:
        """See Generation.result."""
        return self._awaited.result

    @property
    def results(self) -> tuple[Result, ...]:
        """See Generation.results."""
        return self._awaited.results

    def cancel(self) -> None:
        """End the request within one step; the result keeps what was generated."""
        self._awaited.cancel()


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._beginning: Future[BlockingPortal] = Future()
        self._thread = Thread(target=self._run, name="pyllama-loop", daemon=True)
        self._thread.start()
        self._portal = self._beginning.result()
        self.is_running = True

    @property
    def is_ours(self) -> bool:
        return self._pid == os.getpid()

    def run(
        self,
        function: Callable[P, Awaitable[T]],
        /,
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> T:
        """Return or raise as *function* does; WrongUse in the thread of an engine."""
        check_may_wait()
        if not self.is_ours:
            raise ClosedError(
                "the engine belongs to the parent process: open one after the fork"
            )
        if not self.is_running:
            raise ClosedError("the engine is closed")
        try:
            future: Future[T] = self._portal.start_task_soon(
                partial(function, *arguments, **keywords)
            )
        except RuntimeError as error:  # it stopped just now
            raise ClosedError("the engine is closed") from error
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def next(self, items: AsyncIterator[T]) -> T:
        """The next one of *items*. Raises StopIteration."""

        async def take() -> T | None:
            return await anext(items, None)

        item = self.run(take)
        if item is None:
            raise StopIteration
        return item

    def stop(self) -> None:
        """Let what runs end, then the thread."""
        self.is_running = False
        self._portal.call(self._stopped.set)
        self._thread.join()

    def leave(self) -> None:
        """Like stop(), but waits for nothing: for finalisers, in whatever thread."""
        if self.is_running and self.is_ours:
            self.is_running = False
            with suppress(RuntimeError):
                self._events.call_soon_threadsafe(self._stopped.set)

    def _run(self) -> None:
        anyio.run(self._main)

    async def _main(self) -> None:
        self._events, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        async with BlockingPortal() as portal:
            self._beginning.set_result(portal)
            await self._stopped.wait()


_open: WeakSet[Engine] = WeakSet()


@atexit.register
def _close_all() -> None:
    for engine in list(_open):
        engine.close()


@overload
def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str
    prompt: str | Sequence[int] | Sequence[Message],
    params: SamplingParams | None = None,
    *,
    model: str | Path | None = None,
    config: EngineConfig | None = None,
) -> Result: ...


@overload
def generate(
    prompt: Prompts,
    params: SamplingParams | None = None,
    *,
    model: str | Path | None = None,
    config: EngineConfig | None = None,
) -> list[Result]: ...


def generate(
    prompt: Prompt | Prompts,
    params: SamplingParams | None = None,
    *,
    model: str | Path | None = None,
    config: EngineConfig | None = None,
) -> Result | list[Result]:
    """
    Complete one prompt, or several at once; any thread may call.

    The model is loaded for this call and freed after it: an `Engine` keeps it for several.
    An event loop that runs in this thread waits: await AsyncEngine there.

    Args:
        prompt: text, token ids or chat messages, or a list of such prompts; a list gives
            a list of results in the same order.
        model: a GGUF file; None: the default model, downloaded if need be.

    Raises, as AsyncEngine.open(), complete() and complete_many():
        ConfigError, ModelLoadFailed, InvalidRequest, PromptTooLong, NativeError, and others.
    """
    params = checked_params(params)
    are_several = are_many(prompt)  # a mistake is told before a model is loaded

    with Engine.open(model, config, needs="generate") as engine:
        if are_several:
            return engine.complete_many(prompt, params)  # type: ignore[arg-type]
        return engine.complete(prompt, params)  # type: ignore[arg-type]


def score(
    prompt: Prompt,
    n_top: int = 0,
    *,
    model: str | Path | None = None,
    config: EngineConfig | None = None,
) -> Score:
    """
    Tell how likely the model finds each token of one prompt; see AsyncEngine.score.

    Args:
        n_top: most likely tokens listed at each place, 0 to 20.
        model: a GGUF file; None: the default model, downloaded if need be.
        config: None: one slot, and many output rows a step.

    Raises, as AsyncEngine.open() and score():
        ConfigError, ModelLoadFailed, InvalidRequest, PromptTooLong, NativeError, and others.
    """
    n_listed = checked_top(n_top)

    with Engine.open(model, config or SCORING, needs="generate") as engine:
        return engine.score(prompt, n_listed)


def are_many(prompt: Any) -> TypeGuard[Prompts]:
    """Whether *prompt* is a list of prompts: its items are neither ids nor messages."""
    with reading_prompt(prompt):
        if isinstance(prompt, SINGLE) or not len(prompt):
            return False
        return hasattr(prompt[0], "__len__") and not isinstance(prompt[0], Mapping)
