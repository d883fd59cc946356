"""
Runners serve requests: an engine here, a process, or a service far away, all used alike.

Rules:
1. `generate` refuses at once what the runner cannot do. It sends when its value is entered.
2. A runner may be used before start(), which does early what the first request would do.
3. aclose() can be repeated; a request after it raises ClosedError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar, Unpack

import anyio

from pyllama_raw import AsyncEngine, Prompt
from pyllama_raw.api.results import Usage
from pyllama_raw.errors import ClosedError
from pyllama_raw.options.requests import RequestOptions, TextOptions
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.runners.capabilities import RunnerCapabilities, Verb
from pyllama_raw.runners.limits import Limits
from pyllama_raw.runners.prices import Cost, Prices
from pyllama_raw.runners.run import RunHandle, Source

if TYPE_CHECKING:
    from pyllama_raw.results import Ranked, Vectors

T = TypeVar("T")
GENERATES = RunnerCapabilities()
Serving: TypeAlias = "AsyncEngine | ModelRunner"


@dataclass(frozen=True, slots=True)
class RunnerHealth:
    """A runner at one moment; None: not known."""

    live: bool
    """Whether it makes progress; False: replace it."""
    ready: bool
    """Whether requests may be sent."""
    n_running: int | None = None
    """Requests that are served now."""
    n_waiting: int | None = None
    """Requests that wait for that."""
    cache_usage: float | None = None
    """Share of the KV cells that are used, 0 to 1."""
    detail: str = ""
    """Words for a person."""


class ModelRunner(ABC):
    """
    Everything that a program needs of a runner.

    Inherit it to make one of your own: give `_lent`, or `_source` and the verbs that it has.
    """

    limits: Limits | None = None
    """Limits of what is sent to it. None: there are none."""

    def __init__(
        self,
        name: str,
        capabilities: RunnerCapabilities = GENERATES,
        prices: Prices | None = None,
    ) -> None:
        self.name, self._capabilities, self._prices = name, capabilities, prices
        self.n_open = 0  # runs that have begun and not ended
        self._closed = False
        self._idle = anyio.Event()

    @property
    def capabilities(self) -> RunnerCapabilities:
        """The abilities that it has; more may be known after start()."""
        return self._capabilities

    @abstractmethod
    async def health(self) -> RunnerHealth:
        """The state now, within a few seconds; it never raises."""

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RunHandle:
        """
        A stream of output, as AsyncEngine.generate gives one.

        Raises, at once:
            Unsupported: the runner cannot do it.
        """
        wanted = params or SamplingParams()
        self.capabilities.check(prompt, wanted, options)

        return RunHandle(partial(self._counted, prompt, wanted, options))

    async def start(self) -> None:
        """Load, spawn or connect, where there is something to. Can be repeated."""
        self._check_open()

    async def embed(
        self, texts: Iterable[str | Sequence[int]], **options: Unpack[TextOptions]
    ) -> Vectors:
        """A vector for each text."""
        given = list(texts)
        return await self._called("embed", lambda one: one.embed(given, **options))

    async def rank(
        self, query: str, documents: Iterable[str], **options: Unpack[TextOptions]
    ) -> list[Ranked]:
        """*documents*, the best first."""
        given = list(documents)
        return await self._called("rank", lambda one: one.rank(query, given, **options))

    def cost(self, usage: Usage) -> Cost | None:
        """The price of a request with *usage*. None: there is none, or nobody knows."""
        return self._prices.cost(usage) if self._prices else None

    async def aclose(self) -> None:
        """End all requests and free what the runner has. Can be repeated."""
        self._closed = True

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def drained(self) -> None:
        """Return when no run is open."""
        while self.n_open:
            self._idle = anyio.Event()
            await self._idle.wait()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{': closed' * self._closed}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r}: it takes no more requests, make another one")

    def _lent(self) -> AbstractAsyncContextManager[Serving]:
        """A block with what serves the requests of this runner."""
        raise NotImplementedError(f"{type(self).__name__} has no _lent()")

    async def _source(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        """The source of a run; see run.py."""
        async with (
            self._lent() as serving,
            serving.generate(prompt, params, **options) as run,
        ):
            yield None
            async for delta in run:
                yield delta
            for result in run.results:
                yield result

    async def _called(self, verb: Verb, call: Callable[[Serving], Awaitable[T]]) -> T:
        """The answer at once to *call*, which asks for *verb*."""
        self.capabilities.check_verb(verb)
        async with self._lent() as serving:
            return await call(serving)

    async def _counted(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        self._check_open()
        self.n_open += 1
        try:
            async with aclosing(self._source(prompt, params, options)) as source:
                async for item in source:
                    yield item
        finally:
            self.n_open -= 1
            if not self.n_open:
                self._idle.set()
