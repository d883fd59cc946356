"""
An engine of this process as a runner, and a runner that says what it is told to.

The first request of a LocalRunner loads the model. A MockRunner is for tests of programs that use
runners.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

from pyllama_raw import AsyncEngine, Model, Prompt, SamplingParams, estimate_memory
from pyllama_raw.api.model import fit_memory
from pyllama_raw.api.results import Delta, Result, Timings, Usage
from pyllama_raw.core.request import FinishReason
from pyllama_raw.errors import ClosedError, Unsupported
from pyllama_raw.options.requests import RequestOptions
from pyllama_raw.runners.capabilities import VERBS, Prices, RunnerCapabilities, Verb
from pyllama_raw.runners.runner import (
    ModelRunner,
    RebuildCause,
    RunnerHealth,
    RunnerKind,
    RunnerMemory,
    Serving,
    Source,
    lent_source,
)

if TYPE_CHECKING:
    from pyllama_raw import EngineConfig, RequestOptions


T = TypeVar("T")
POOLINGS = ("mean", "cls", "last")  # that make one vector of a text
UNKNOWN = RunnerCapabilities(  # of a model that is not loaded: the engine says what it cannot do
    verbs=VERBS,
    logprobs=True,
    prompt_logprobs=True,
    tools=True,
    json_schema=True,
    grammars=True,
    n=True,
    media=True,
    token_ids=True,
)
HOST = "CPU"  # the device of each machine
# Makes a model and options of those that were given, in a worker thread.
Prepare: TypeAlias = (
    "Callable[[str | Path | None, EngineConfig | None], "
    "tuple[str | Path | None, EngineConfig | None]]"
)
TEXTS = RunnerCapabilities(token_ids=True)  # of a model that does not generate


class LocalRunner(ModelRunner):
    """
    A model in this process.

    Args:
        model: as AsyncEngine.open takes it, or an open engine, which is the runner's from then
            on: aclose() closes it.
        prices: what its tokens cost, if somebody pays for them.
        prepare: makes the model and the options of the engine of those that are given, in a
            worker thread.
        on_open: awaited with each engine before it serves.
        progress: as of AsyncEngine.open().
        room: bytes that the model may take at most, by device: with `fit_ctx` it has as many cells
            as fit.
    """

    def __init__(
        self,
        model: str | Path | Model | AsyncEngine | None = None,
        config: EngineConfig | None = None,
        *,
        name: str | None = None,
        prices: Prices | None = None,
        prepare: Prepare | None = None,
        on_open: Callable[[AsyncEngine], Awaitable[None]] | None = None,
        progress: Callable[[float], object] | None = None,
        room: Mapping[str, int] | None = None,
    ) -> None:
        is_open = isinstance(model, AsyncEngine)
        super().__init__(
            name or ("engine" if is_open else _name_of(model)), UNKNOWN, prices
        )
        self._engine = model if isinstance(model, AsyncEngine) else None
        self._model = None if isinstance(model, AsyncEngine) else model
        self._config, self._loading = config, anyio.Lock()
        self._prepare, self._on_open, self._progress = prepare, on_open, progress
        self._room = room

    @property
    def engine(self) -> AsyncEngine | None:
        """The engine, once there is one."""
        return self._engine

    @property
    def kind(self) -> RunnerKind:
        """LOCAL_CPU until an engine has a device."""
        devices = () if self._engine is None else self._engine.info.devices
        is_cpu = {*devices} <= {HOST}
        return RunnerKind.LOCAL_CPU if is_cpu else RunnerKind.LOCAL_DEVICE

    @property
    def capabilities(self) -> RunnerCapabilities:
        """All that any model can do, until it is loaded."""
        if self._engine is None:
            return UNKNOWN
        abilities = self._engine.capabilities
        can = UNKNOWN if "generate" in abilities.operations else TEXTS
        return replace(
            can,
            verbs=frozenset(
                operation.value
                for operation in abilities.operations
                if operation != "embed" or abilities.model.pooling in POOLINGS
            ),
            tools=self._engine.info.chat_template is not None,
            media=abilities.images or abilities.sounds,
            n_ctx=self._engine.n_ctx_slot,
            n_slots=self._engine.info.n_slots,
        )

    async def start(self) -> None:
        """Load the model."""
        await self._opened()

    async def health(self) -> RunnerHealth:
        """As the engine tells it; one that is not loaded is not ready."""
        engine = self._engine
        if engine is None or self._closed:
            return self._health_before("not loaded")
        health, stats = engine.health(), engine.stats()
        return RunnerHealth(
            live=health.state not in ("stalled", "dead"),
            ready=health.is_ready,
            n_running=stats.running,
            n_waiting=stats.waiting,
            cache_usage=stats.n_cells_used / stats.n_cells if stats.n_cells else None,
            detail=health.state,
        )

    async def rebuild(
        self,
        api_key: str | EllipsisType | None = ...,
        *,
        cause: RebuildCause = RebuildCause.MANUAL,
    ) -> None:
        """
        Make the memory of the engine anew; requests that run go on and give the same tokens.

        Raises:
            Unsupported: *cause* is about a service, or there is a key.
            PyllamaError: as AsyncEngine.rebuild_session.
        """
        self._check_open()
        if api_key is not ... or cause in (
            RebuildCause.AUTH_FAILED,
            RebuildCause.CONFIG_CHANGED,
        ):
            raise Unsupported(f"rebuild for {cause}", "a model here has no service")
        if self._engine is not None:
            await self._engine.rebuild_session(str(cause))

    async def memory(self) -> RunnerMemory:
        """
        The memory that libllama reckons; none of an engine that was open before.

        Asleep it takes what its cells hold, in host memory.

        Raises:
            PyllamaError: as `estimate_memory`.
        """
        if isinstance(self._model, Model) or self._engine is not None:
            return RunnerMemory({})
        model, config = await self._prepared()
        estimate = await to_thread.run_sync(estimate_memory, model, config)
        loaded = {part.device: part.total_bytes for part in estimate.devices}
        n_cells_bytes = sum(part.kv_bytes for part in estimate.devices)
        return RunnerMemory(loaded, {HOST: n_cells_bytes})

    async def sleep(self) -> None:
        """Free the context and the weights, as `AsyncEngine.sleep(2)`."""
        self._check_open()
        if self._engine is not None:
            await self._engine.sleep(2)

    async def wake(self) -> None:
        """Have the engine go on, as `AsyncEngine.wake()`."""
        await (await self._opened()).wake()

    async def aclose(self) -> None:
        """Close the engine; one that is just being loaded, then."""
        self._closed = True
        async with self._loading:
            if self._engine is not None:
                await self._engine.aclose()

    def _source(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        return lent_source(self._lent, prompt, params, options)

    async def _called(self, verb: Verb, call: Callable[[Serving], Awaitable[T]]) -> T:
        return await self._called_on(self._lent, verb, call)

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[AsyncEngine]:
        yield await self._opened()

    async def _opened(self) -> AsyncEngine:
        async with self._loading:
            self._check_open()
            if self._engine is None:
                model, config = await self._prepared()
                engine = await AsyncEngine.open(model, config, progress=self._progress)
                try:
                    if self._on_open is not None:
                        await self._on_open(engine)
                except BaseException:
                    with anyio.CancelScope(shield=True):
                        await engine.aclose()
                    raise
                self._engine = engine
            return self._engine

    async def _prepared(self) -> tuple[Any, EngineConfig | None]:
        """The model, and the options of its engine."""
        if isinstance(self._model, Model):
            return self._model, self._config
        model, config = self._model, self._config
        if self._prepare is not None:
            model, config = await to_thread.run_sync(self._prepare, model, config)
        if self._room is not None and config is not None:
            fit = partial(fit_memory, model, config, self._room)
            config = await to_thread.run_sync(fit)
        return model, config


def _name_of(model: object) -> str:
    """The file of *model*, without its folder."""
    path = model.path if isinstance(model, Model) else model
    return "default" if path is None else Path(str(path)).name


CAPABILITIES = RunnerCapabilities(n=True, token_ids=True, n_ctx=4096, n_slots=4)


class MockRunner(ModelRunner):
    """
    A runner without a model; each piece counts as a token.

    Args:
        pieces: what it says, in order.
        error: what it raises after *n_before* pieces. None: nothing.
        before: awaited before each piece, with its index: a test can hold it up there.
        usage: what it tells. None: one token of prompt, and the pieces.

    Attributes:
        requests: (prompt, params) of all that were taken on.
    """

    def __init__(
        self,
        pieces: Sequence[str] = ("hello ", "world"),
        *,
        name: str = "mock",
        error: Exception | None = None,
        n_before: int = 0,
        before: Callable[[int], Awaitable[None]] | None = None,
        usage: Usage | None = None,
        capabilities: RunnerCapabilities = CAPABILITIES,
    ) -> None:
        super().__init__(name, capabilities)
        self._pieces, self._error, self._n_before = tuple(pieces), error, n_before
        self._before, self._usage = before, usage
        self.requests: list[tuple[Prompt, SamplingParams]] = []

    async def health(self) -> RunnerHealth:
        """Well, until it is closed."""
        is_open = not self._closed
        return RunnerHealth(live=is_open, ready=is_open, n_running=self.n_open)

    async def _source(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        started_at = perf_counter()
        self.requests.append((prompt, params))
        yield None
        pieces = self._pieces[: params.max_tokens]
        for at in range(max(len(pieces), self._n_before) + 1):
            await checkpoint()
            if self._before is not None and at < len(pieces):
                await self._before(at)
            if self._error is not None and at == self._n_before:
                raise self._error
            if self._closed:
                raise ClosedError(f"{self!r} was closed while it said something")
            for index in range(params.n if at < len(pieces) else 0):
                yield Delta(pieces[at], (at,), index)
        is_cut = len(pieces) < len(self._pieces)
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        text, tokens = "".join(pieces), tuple(range(len(pieces)))
        usage = self._usage or Usage(1, len(pieces), 0)
        timings = Timings(None, None, None, None, None, perf_counter() - started_at)
        for index in range(params.n):
            seed = (params.seed or 0) + index
            yield Result(text, tokens, reason, usage, timings, seed, index)
