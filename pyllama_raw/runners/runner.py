"""
What serves requests: an engine here, a process, or a service far away, all used alike.

Rules:
1. `generate` refuses at once what the runner cannot do. It sends when its value is entered.
2. A runner may be used before start(), which does early what the first request would do.
3. aclose() can be repeated; a request after it raises ClosedError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, Unpack

from pyllama_raw import Prompt
from pyllama_raw.api.results import Usage
from pyllama_raw.errors import ClosedError
from pyllama_raw.options.requests import RequestOptions, TextOptions
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.runners.capabilities import Capabilities
from pyllama_raw.runners.run import Run, Source

if TYPE_CHECKING:
    from pyllama_raw.results import Ranked, Vectors
    from pyllama_raw.runners.limits import Limits


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
    """What a person may want to know."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Money for one request."""

    usd: float
    """US dollars."""
    model: str = ""
    """The model whose price it is."""


class ModelRunner(Protocol):
    """Everything that a program needs of a runner."""

    @property
    def name(self) -> str:
        """What logs and pools call it."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; more is known after start()."""

    @property
    def limits(self) -> Limits | None:
        """Limits of what is sent to it. None: there are none."""

    async def start(self) -> None:
        """Load, spawn or connect. Can be repeated."""

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Run:
        """A stream of output, as AsyncEngine.generate gives one."""

    async def embed(
        self, texts: Iterable[str | Sequence[int]], **options: Unpack[TextOptions]
    ) -> Vectors:
        """A vector for each text."""

    async def rank(
        self, query: str, documents: Iterable[str], **options: Unpack[TextOptions]
    ) -> list[Ranked]:
        """*documents* by how well they answer *query*, the best first."""

    async def health(self) -> RunnerHealth:
        """The state now, within a few seconds; it never raises."""

    def cost(self, usage: Usage) -> Cost | None:
        """The price of a request with *usage*. None: there is none, or nobody knows."""

    async def aclose(self) -> None:
        """End all requests and free what the runner has. Can be repeated."""


class Runner(ABC):
    """A base of runners, with what is the same in most of them."""

    limits: Limits | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._closed = False

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it can do."""

    @abstractmethod
    def _source(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        """The source of a run; see run.py."""

    @abstractmethod
    async def health(self) -> RunnerHealth:
        """The state now."""

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Run:
        """A stream of output; raises Unsupported at once."""
        wanted = params or SamplingParams()
        self.capabilities.check(prompt, wanted, options)

        def make() -> Source:
            self._check_open()
            return self._source(prompt, wanted, options)

        return Run(make)

    async def start(self) -> None:
        """Do nothing: there is nothing to load."""
        self._check_open()

    async def embed(
        self, texts: Iterable[str | Sequence[int]], **options: Unpack[TextOptions]
    ) -> Vectors:
        """A vector for each text."""
        self.capabilities.check_verb("embed")
        raise NotImplementedError(f"{type(self).__name__} says that it embeds")

    async def rank(
        self, query: str, documents: Iterable[str], **options: Unpack[TextOptions]
    ) -> list[Ranked]:
        """*documents*, the best first."""
        self.capabilities.check_verb("rank")
        raise NotImplementedError(f"{type(self).__name__} says that it ranks")

    def cost(self, usage: Usage) -> Cost | None:
        """None: a runner without prices costs nothing that is known."""
        return None

    async def aclose(self) -> None:
        """Refuse all further requests."""
        self._closed = True

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{': closed' * self._closed}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r}: it takes no more requests, make another one")
