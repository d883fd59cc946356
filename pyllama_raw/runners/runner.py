"""
Runners serve requests: an engine here, a process, or a service far away, all used alike.

Rules of a runner:
1. `generate` refuses at once what the runner cannot do. It sends when its value is entered.
2. A runner may be used before start(), which does early what the first request would do.
3. aclose() can be repeated; a request after it raises ClosedError.
4. Calls of embed() and rank() count as open runs do, so nobody closes a runner beneath them.

A request that a runner serves is an async iterator that is also an async context manager:
1. Its source is an async generator. It gives None once the request is taken on, then deltas, then
   a Result for each output. It holds no cancel scope while it gives something.
2. Entering the block sends the request; leaving it ends the request and closes the source.
3. It can be read once, by one task at a time.
4. cancel() wakes the reader; the result keeps what was read.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from time import perf_counter
from types import EllipsisType
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar, Unpack, cast

import anyio
from anyio import CancelScope

from pyllama_raw import AsyncEngine, Prompt
from pyllama_raw.api.results import Delta, Result, Timings, Usage
from pyllama_raw.core.request import FinishReason
from pyllama_raw.errors import ClosedError, PyllamaError, Unsupported, WrongUse
from pyllama_raw.options.arguments import (
    checked_params,
    checked_texts,
    checked_texts_or_ids,
)
from pyllama_raw.options.requests import RequestOptions, TextOptions
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.runners.capabilities import (
    Cost,
    Prices,
    RunnerCapabilities,
    Verb,
    are_ids,
    check_length,
)
from pyllama_raw.runners.guards import Limits

if TYPE_CHECKING:
    from pyllama_raw.api.embedding import TextPooling
    from pyllama_raw.api.results import Ranked
    from pyllama_raw.api.vectors import Vectors


Item = Delta | Result | None
Source = AsyncGenerator[Item, None]


class RunHandle:
    """The value of `ModelRunner.generate`; it starts when entered or first read."""

    def __init__(self, make_source: Callable[[], Source]) -> None:
        self._make_source = make_source
        self._source: Source | None = None
        self._scope: CancelScope | None = None  # of the task that reads now
        self._results: dict[int, Result] = {}
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._ended = self._left = False
        self._started_at = perf_counter()

    async def __aenter__(self) -> Self:
        if self._source is not None or self._left:
            raise WrongUse("a run can be used once: generate() makes another one")
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()
        # If another task reads, its cancellation closes the source.
        if self._source is not None and self._scope is None:
            with CancelScope(shield=True):
                await self._source.aclose()

    def __aiter__(self) -> Self:
        if self._ended and not self._left:
            raise WrongUse(
                "this run has been read to its end: .result has all of it, and generate() "
                "makes another one"
            )
        return self

    async def __anext__(self) -> Delta:
        if self._source is None and not self._left:
            await self._start()
        while (item := await self._next()) is not None:
            if isinstance(item, Delta):
                self._deltas.append(item)
                return item
            self._results[item.index] = item
        raise StopAsyncIteration

    async def collect(self) -> Result:
        """Read to the end; the first output."""
        async for _ in self:
            pass
        return self.result

    async def collect_all(self) -> tuple[Result, ...]:
        """Read to the end; all outputs that did not fail."""
        await self.collect()
        return self.results

    @property
    def result(self) -> Result:
        """
        Everything of the first output, once the run has ended.

        Raises:
            PyllamaError: what it failed with.
            WrongUse: it has not ended.
        """
        return self.results[0]

    @property
    def results(self) -> tuple[Result, ...]:
        """The outputs by index, once the run has ended; raises as `result`."""
        if self._error is not None:
            raise self._error
        if not self._ended and not self._left:
            raise WrongUse("the run has not ended: read it to the end first")
        results = (self._cut_off() if self._left else {}) | self._results
        return tuple(results[index] for index in sorted(results))

    def cancel(self) -> None:
        """End the run; a task that reads it is woken."""
        self._left = self._left or not self._ended
        if self._scope is not None:
            self._scope.cancel()

    def __repr__(self) -> str:
        """The state of the run, without what it is about."""
        state = "failed" if self._error else "left" if self._left else "ended"
        state = state if self._ended or self._left else "running"
        state = state if self._source or self._left else "not begun"
        return f"<RunHandle: {state}, {len(self._deltas)} deltas read>"

    async def _start(self) -> None:
        self._source = self._make_source()
        first = await self._next()
        assert first is None, "a source gives None first"

    async def _next(self) -> Item:
        """The next item; None at the end and at the beginning."""
        if self._scope is not None:
            raise WrongUse("another task reads this run: let one task read it")
        if self._left or self._ended or self._source is None:
            return None
        try:
            with CancelScope() as self._scope:
                return await anext(self._source)
        except StopAsyncIteration:
            self._ended = True
        except Exception as error:
            self._ended, self._error = True, error
            raise
        finally:
            self._scope = None
        return None

    def _cut_off(self) -> dict[int, Result]:
        """Outputs of a run that was left, as far as they were read."""
        e2e_s, results = perf_counter() - self._started_at, {}
        timings = Timings(None, None, None, None, None, e2e_s)
        for index in {0, *(delta.index for delta in self._deltas)}:
            own = [delta for delta in self._deltas if delta.index == index]
            tokens = tuple(token for delta in own for token in delta.token_ids)
            text, usage = "".join(delta.text for delta in own), Usage(0, len(tokens), 0)
            reason = FinishReason.CANCELLED
            results[index] = Result(text, tokens, reason, usage, timings, None, index)
        return results


T = TypeVar("T")
CHARACTERS_A_TOKEN = 4  # of a prompt whose tokens nobody has counted
GENERATES = RunnerCapabilities()
Serving: TypeAlias = "AsyncEngine | ModelRunner"
# Makes a block with what serves the requests of a runner.
Lend: TypeAlias = Callable[[], AbstractAsyncContextManager[Serving]]


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
    is_idle: bool = False
    """Whether it has not begun yet: its first request loads or starts what serves."""


@dataclass(frozen=True, slots=True)
class RunnerMetadata:
    """A program that serves a model."""

    format: str
    """The format of the model's file."""
    runtime: str
    """The program."""
    version: str | None
    """Its version. None: not known, as before it was started."""
    on_device: bool | None
    """Whether layers are to be on a device. None: the program decides."""
    streams: bool = True
    """Whether text comes while it is made."""


@dataclass(frozen=True, slots=True)
class RunnerMemory:
    """Bytes that a runner takes of this machine, by device."""

    loaded: Mapping[str, int]
    """While it serves."""
    asleep: Mapping[str, int] | None = None
    """While it sleeps. None: it cannot sleep."""


class RunnerKind(StrEnum):
    """The place where a runner computes."""

    LOCAL_CPU = "local_cpu"
    """This process, on CPUs."""
    LOCAL_DEVICE = "local_device"
    """This process, with layers of the model on a device."""
    CHILD = "child"
    """A process that this one has started."""
    REMOTE = "remote"
    """A service."""
    SEVERAL = "several"
    """Several runners of any kind."""
    OTHER = "other"
    """Nothing of these, as of fakes and runners of your own."""


class RebuildCause(StrEnum):
    """The reason why a runner begins anew."""

    DEVICE_POISONED = "device_poisoned"
    """A device gives nothing but errors, as after a failed CUDA call."""
    AUTH_FAILED = "auth_failed"
    """The service does not know the key any more."""
    CONFIG_CHANGED = "config_changed"
    """The service or the program is configured in another way."""
    MANUAL = "manual"
    """A person wants it."""


@dataclass(slots=True)
class RunnerCounts:
    """Counts of a runner since it was made."""

    n_requests: int = 0
    """Requests that were taken on."""
    n_failed: int = 0
    """Requests that ended with an error."""
    n_retries: int = 0
    """Tries after the first one of a request."""
    n_moves: int = 0
    """Requests that went to another runner of a pool."""
    n_restarts: int = 0
    """Children that replaced another one."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens and price of a request at most, before it is sent."""

    n_prompt: int
    """Tokens of the prompt: counted if it is ids, else four characters a token."""
    n_output: int
    """Tokens of all outputs at most."""
    cost: Cost | None
    """The price of them. None: there is none, or nobody knows."""


class ModelRunner(ABC):
    """
    Everything that a program needs of a runner.

    Inherit it to make one of your own: give `_source`, `health` and the verbs that it has.
    """

    limits: Limits | None = None
    """Limits of what is sent to it. None: there are none."""
    counts: RunnerCounts
    """Counts of requests, for logs and metrics; read only."""

    def __init__(
        self,
        name: str,
        capabilities: RunnerCapabilities = GENERATES,
        prices: Prices | None = None,
    ) -> None:
        self.name, self._capabilities, self._prices = name, capabilities, prices
        self.n_open = 0  # runs and calls that have begun and not ended
        self.counts = RunnerCounts()
        self._closed = self._retires = False
        self._idle = anyio.Event()

    @property
    def capabilities(self) -> RunnerCapabilities:
        """The abilities that it has; more may be known after start()."""
        return self._capabilities

    @property
    def kind(self) -> RunnerKind:
        """The place where it computes."""
        return RunnerKind.OTHER

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
        sampling = checked_params(params)
        self.capabilities.check(prompt, sampling, options)

        return RunHandle(partial(self._counted, prompt, sampling, options))

    async def start(self) -> None:
        """Load, spawn or connect, where there is something to. Can be repeated."""
        self._check_open()

    async def embed(
        self,
        texts: Iterable[str | Sequence[int]],
        *,
        pooling: TextPooling | None = None,
        **options: Unpack[TextOptions],
    ) -> Vectors:
        """
        A vector for each text.

        Args:
            pooling: how the vectors of the tokens of a text become one. None: as the model says.
        """
        inputs = checked_texts_or_ids(texts)
        for index, text in enumerate(inputs):
            check_length(f"texts[{index}]", text)

        def call(serving: Serving) -> Awaitable[Vectors]:
            return serving.embed(inputs, pooling=pooling, **options)

        return await self._called("embed", call)

    async def rank(
        self, query: str, documents: Iterable[str], **options: Unpack[TextOptions]
    ) -> list[Ranked]:
        """*documents*, the best first."""
        texts = checked_texts(documents, "documents")
        return await self._called(
            "rank", lambda serving: serving.rank(query, texts, **options)
        )

    def cost(self, usage: Usage) -> Cost | None:
        """The price of a request with *usage*. None: there is none, or nobody knows."""
        return self._prices.cost(usage) if self._prices else None

    def estimate(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Estimate:
        """The tokens and the price of a request at most; nothing is sent."""
        params = checked_params(params)
        check_length("prompt", prompt)
        n_prompt = tokens_about(prompt)
        n_output = params.n * params.max_tokens
        return Estimate(n_prompt, n_output, self.cost(Usage(n_prompt, n_output, 0)))

    async def rebuild(
        self,
        api_key: str | EllipsisType | None = ...,
        *,
        cause: RebuildCause = RebuildCause.MANUAL,
    ) -> None:
        """
        Begin anew, because of *cause*; the runner stays.

        Args:
            api_key: another key of a service; None is none.

        Raises:
            Unsupported: the runner cannot, or not for this cause.
        """
        self._check_open()
        raise Unsupported("rebuild", f"{self!r} cannot begin anew: make another one")

    async def memory(self) -> RunnerMemory:
        """
        The memory that it takes, before it takes any; nothing, unless it computes here.

        Raises:
            PyllamaError: nobody could load it.
        """
        return RunnerMemory({})

    async def sleep(self) -> None:
        """Give back what it can of its memory, while no request runs; wake() has it again."""
        self._check_open()
        raise Unsupported("sleep", f"{self!r} cannot sleep: close it")

    async def wake(self) -> None:
        """Serve again after sleep()."""
        self._check_open()

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended; False: it has none of its own."""
        return False

    async def death(self) -> PyllamaError | None:
        """The end of its process, once that has ended. None, at once: it has no process of its own."""
        return None

    async def retire(self) -> None:
        """Close as soon as no run and no call is open: at once, or with the end of the last one."""
        self._retires = True
        if not self.n_open:
            await self.aclose()

    async def aclose(self) -> None:
        """End all requests and free what the runner has. Can be repeated."""
        self._closed = True

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:  # nobody gets it, and nobody could close it
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise
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

    def _health_before(self, detail: str) -> RunnerHealth:
        """The health while nothing serves yet, which *detail* says, or not any more."""
        is_open = not self._closed
        return RunnerHealth(
            live=is_open,
            ready=False,
            detail=detail if is_open else "closed",
            is_idle=is_open,
        )

    @abstractmethod
    def _source(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        """The source of a run; see run.py."""

    async def _called(self, verb: Verb, call: Callable[[Serving], Awaitable[T]]) -> T:
        """The answer at once to *call*, which asks for *verb*; this one has no verbs."""
        self.capabilities.check_verb(verb)
        raise Unsupported(verb, f"{self!r} says that it can, and has no {verb}()")

    async def _called_on(
        self, lend: Lend, verb: Verb, call: Callable[[Serving], Awaitable[T]]
    ) -> T:
        """The answer to *call* of what *lend* gives, counted as an open call."""
        self.capabilities.check_verb(verb)
        self._check_open()
        async with self._counting(), lend() as serving:
            return await call(serving)

    async def _counted(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        self._check_open()
        async with (
            self._counting(),
            aclosing(self._source(prompt, params, options)) as source,
        ):
            async for item in source:
                if isinstance(item, Result) and item.served_by is None:
                    yield replace(item, served_by=self.name)
                else:
                    yield item

    @asynccontextmanager
    async def _counting(self) -> AsyncIterator[None]:
        """A block that is an open run or call; the last one closes a runner that retires."""
        self.n_open += 1
        self.counts.n_requests += 1
        try:
            yield
        except Exception:
            self.counts.n_failed += 1
            raise
        finally:
            self.n_open -= 1
            if not self.n_open:
                self._idle.set()
                if self._retires:
                    with anyio.CancelScope(shield=True):
                        await self.aclose()


async def lent_source(
    lend: Lend, prompt: Prompt, params: SamplingParams, options: RequestOptions
) -> Source:
    """The source of a run on what *lend* gives."""
    async with (
        lend() as serving,
        serving.generate(prompt, params, **options) as run,
    ):
        yield None
        async for delta in run:
            yield delta
        for result in run.results:
            yield result


def prompt_bytes(prompt: Prompt) -> bytes:
    """*prompt* as bytes, four for a token id; none of what no runner takes."""
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass")
    try:
        if are_ids(prompt):
            return array("i", cast("Sequence[int]", prompt)).tobytes()
        return json.dumps(prompt, default=str).encode()
    except (ValueError, TypeError, OverflowError, RecursionError):
        return b""  # its runner says what is wrong


def tokens_about(prompt: Prompt) -> int:
    """Tokens of *prompt*: about four characters each."""
    n_characters = len(prompt) if isinstance(prompt, str) else len(prompt_bytes(prompt))
    return -(-n_characters // CHARACTERS_A_TOKEN)
