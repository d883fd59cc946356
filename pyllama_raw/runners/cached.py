"""
A model of a cache as programs see it: what it is made of, its status, its changes, and it as a runner.

`model_cache.py` is the cache.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, TypeVar

from pyllama_raw import Prompt
from pyllama_raw.core.residency import ModelState
from pyllama_raw.errors import PyllamaError
from pyllama_raw.options.frozen import Checked
from pyllama_raw.options.requests import RequestOptions
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.runners.capabilities import RunnerCapabilities, Verb
from pyllama_raw.runners.guards import Seconds
from pyllama_raw.runners.local import UNKNOWN
from pyllama_raw.runners.runner import (
    ModelRunner,
    RunnerHealth,
    RunnerKind,
    Serving,
    Source,
)

T = TypeVar("T")
LendModel = Callable[..., AbstractAsyncContextManager[ModelRunner]]
# Makes a runner, which may tell the fraction of its model that is loaded, from any thread.
MakeRunner = Callable[[Callable[[float], object]], ModelRunner]


@dataclass(frozen=True, slots=True)
class CachedModel(Checked):
    """A model that is loaded when it is asked for. Raises ConfigError for a wrong value."""

    make: MakeRunner
    """Makes its runner, which loads nothing before start()."""
    is_pinned: bool = False
    """Whether it never gives way, nor rests by itself."""
    sleep_s: Seconds = inf
    """Seconds without use after which it sleeps."""
    unload_s: Seconds = inf
    """Seconds without use after which it is unloaded."""
    key: object = None
    """Its identity: replace() changes a model that has another key."""
    adapters: frozenset[str] = frozenset()
    """Names of adapters that are loaded with it."""
    source: str = "preset"
    """The list that has it, in a word of who makes the list."""


@dataclass(frozen=True, slots=True)
class ModelEvent:
    """A change of a model, or of the list of models if it has neither a state nor a kind."""

    model: str
    """Its name; "*": the list is another one."""
    state: ModelState | None = None
    """The state that it has now."""
    error: PyllamaError | None = None
    """The reason, if a load has failed."""
    kind: str | None = None
    """A word of who tells it, if it is none of the cache."""
    data: Mapping[str, Any] | None = None
    """Facts of that kind."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model at one moment."""

    name: str
    """Its name."""
    state: ModelState
    """The state that it has."""
    progress: float | None
    """The fraction that is loaded, while it loads."""
    n_running: int
    """Claims that run."""
    n_waiting: int
    """Claims that wait for it."""
    n_bytes: Mapping[str, int]
    """Bytes that it takes now, by device."""
    is_pinned: bool
    """Whether it never gives way."""
    error: PyllamaError | None
    """The failure of the latest load. None: it has not failed."""


class CachedRunner(ModelRunner):
    """A model of a cache as a runner: each request has a claim on it; closing it closes no model."""

    def __init__(
        self, name: str, lend: LendModel, there: Callable[[], Mapping[str, ModelRunner]]
    ) -> None:
        """
        Args:
            lend: makes a block in which the model is loaded.
            there: the runners of the cache that are there now.
        """
        super().__init__(name, UNKNOWN)
        self._lend, self._there = lend, there

    @property
    def kind(self) -> RunnerKind:
        """The place where the model computes, once it is loaded."""
        runner = self._there().get(self.name)
        return RunnerKind.OTHER if runner is None else runner.kind

    @property
    def capabilities(self) -> RunnerCapabilities:
        """All that any model can do, until it is loaded."""
        runner = self._there().get(self.name)
        return UNKNOWN if runner is None else runner.capabilities

    async def start(self) -> None:
        """Load the model."""
        self._check_open()
        async with self._lend(self.name):
            pass

    async def health(self) -> RunnerHealth:
        """The health of the model's runner; one that is not loaded is not ready."""
        runner = self._there().get(self.name)
        if runner is None or self._closed:
            return self._health_before("not loaded")
        return replace(await runner.health(), n_running=self.n_open)

    async def _source(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        client = options.get("client") or ""
        async with (
            self._lend(self.name, client=client) as runner,
            runner.generate(prompt, params, **options) as run,
        ):
            yield None
            async for delta in run:
                yield delta
            for result in run.results:
                yield replace(result, served_by=self.name)

    async def _called(self, verb: Verb, call: Callable[[Serving], Awaitable[T]]) -> T:
        return await self._called_on(partial(self._lend, self.name), verb, call)
