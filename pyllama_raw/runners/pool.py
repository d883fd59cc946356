"""
Several runners as one: each request goes to the one that the rule of routing.py names.

A runner that fails rests for a while. A request that failed before its first delta goes to the
next runner; after that its error is the reader's.
"""

from __future__ import annotations

import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from time import monotonic
from typing import Any, TypeVar

import anyio

from pyllama_raw import Prompt
from pyllama_raw.errors import ClosedError, ConfigError, PyllamaError, first_of
from pyllama_raw.options.requests import RequestOptions
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.routing import ROUTERS, RoutedRequest, RouterName, prefixes
from pyllama_raw.runners.capabilities import RunnerCapabilities, Verb
from pyllama_raw.runners.guards import FULL, Breaker, retried
from pyllama_raw.runners.run import Source
from pyllama_raw.runners.runner import (
    CHARACTERS_A_TOKEN,
    ModelRunner,
    RunnerHealth,
    RunnerKind,
    Serving,
    prompt_bytes,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
BLOCK_BYTES = 256  # of a prompt: 64 token ids, or as much text
UNKNOWN_CELLS = 2**17  # of a runner that does not say what it has


@dataclass(slots=True)
class PooledRunner:
    """A runner of a pool, as the rule sees it."""

    name: str
    runner: ModelRunner
    weight: float
    breaker: Breaker
    n_tokens: int = 0  # of requests that have not ended

    @property
    def n_open_tokens(self) -> int:
        """As a runner of weight 1 would feel them."""
        return int(self.n_tokens / self.weight)

    @property
    def n_cells(self) -> int:
        """KV cells that it has."""
        can = self.runner.capabilities
        return (can.n_ctx or UNKNOWN_CELLS) * (can.n_slots or 1)

    @contextmanager
    def holding(self, n_tokens: int) -> Iterator[None]:
        """A block in which it has a request, which is the probe if it has rested."""
        with self.breaker.watching(is_forced=self.breaker.state == "open"):
            self.n_tokens += n_tokens
            try:
                yield
            finally:
                self.n_tokens -= n_tokens


class Pool(ModelRunner):
    """
    Runners by name that serve the same model; aclose() closes all of them.

    Args:
        router: the rule; the option `client` is the session that prefix_affinity keeps together.
        weights: what a runner can do, compared with others; 1 if it is not named.
        rest_s: seconds that a runner which has failed gets nothing, unless all rest.
    """

    def __init__(
        self,
        runners: Mapping[str, ModelRunner],
        router: RouterName = "prefix_affinity",
        *,
        weights: Mapping[str, float] | None = None,
        rest_s: float = 10.0,
        clock: Callable[[], float] = monotonic,
        name: str = "pool",
    ) -> None:
        super().__init__(name)
        if not runners:
            raise ConfigError("a pool needs runners: give one or more by name")
        shares = dict(weights or {})
        if not shares.keys() <= runners.keys() or any(w <= 0 for w in shares.values()):
            raise ConfigError(
                f"weights={shares} are not allowed: give numbers above 0 for {[*runners]}"
            )
        self._members = [
            PooledRunner(n, runner, shares.get(n, 1.0), Breaker(1, rest_s, clock, n))
            for n, runner in runners.items()
        ]
        self._router = ROUTERS[router]()

    @property
    def kind(self) -> RunnerKind:
        """Several."""
        return RunnerKind.SEVERAL

    @property
    def capabilities(self) -> RunnerCapabilities:
        """The abilities that all runners have."""
        return common([member.runner.capabilities for member in self._members])

    async def start(self) -> None:
        """
        Start all at once.

        Raises:
            PyllamaError: one cannot start; the first one's error.
        """
        self._check_open()
        try:
            async with anyio.create_task_group() as group:
                for member in self._members:
                    group.start_soon(member.runner.start)
        except ExceptionGroup as errors:
            raise first_of(errors) from None

    async def health(self) -> RunnerHealth:
        """
        Well while one is; those that are not get nothing for a while.

        A member that has not begun yet is not kept away: a request has to begin it.
        """
        healths: dict[str, RunnerHealth] = {}

        async def ask(member: PooledRunner) -> None:
            health = healths[member.name] = await member.runner.health()
            if health.ready:
                member.breaker.succeeded()
            elif not health.is_idle:
                member.breaker.open()

        async with anyio.create_task_group() as group:
            for member in self._members:
                group.start_soon(ask, member)
        ready = [name for name, health in healths.items() if health.ready]
        return RunnerHealth(
            live=any(health.live for health in healths.values()),
            ready=bool(ready) and not self._closed,
            n_running=self.n_open,
            detail=f"ready: {', '.join(sorted(ready)) or 'none'}",
        )

    async def aclose(self) -> None:
        """Close all."""
        self._closed = True

        async def close(runner: ModelRunner) -> None:
            with anyio.CancelScope(
                shield=True
            ):  # if another one cannot, this one still does
                await runner.aclose()

        async with anyio.create_task_group() as group:
            for member in self._members:
                group.start_soon(close, member.runner)

    def _source(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        request = _routed(prompt, params, options)

        async def served(member: PooledRunner) -> Source:
            with member.holding(request.n_tokens):
                async with member.runner.generate(prompt, params, **options) as run:
                    self._router.sent(request, member.name)
                    yield None
                    async for delta in run:
                        yield delta
                    for result in run.results:
                        yield replace(result, served_by=member.name)

        return self._moved(request, served)

    async def _called(self, verb: Verb, call: Callable[[Serving], Awaitable[T]]) -> T:
        self._check_open()
        self.capabilities.check_verb(verb)

        request = RoutedRequest(1)

        async def served(member: PooledRunner) -> AsyncGenerator[T, None]:
            with member.holding(request.n_tokens):
                self._router.sent(request, member.name)
                yield await call(member.runner)

        async with self._counting():
            [answer] = [item async for item in self._moved(request, served)]
        return answer

    def _moved(
        self,
        request: RoutedRequest,
        serve: Callable[[PooledRunner], AsyncGenerator[T, None]],
    ) -> AsyncGenerator[T, None]:
        """Items of *serve*; a runner that fails before its first delta gives way to another."""
        rested = [m for m in self._members if m.breaker.state != "open"]
        fit = rested or self._members
        ranked = [fit[index] for index in self._router.rank(request, fit)]

        def wait_s(attempt: int, error: PyllamaError) -> float | None:
            is_fault = error.is_retryable or error.counts_as_circuit_failure
            may_move = is_fault or isinstance(error, (*FULL, ClosedError))
            if not may_move or attempt + 1 == len(ranked):
                return None
            self.counts.n_moves += 1
            here, there = ranked[attempt].name, ranked[attempt + 1].name
            logger.warning("%s: from %s to %s: %s", self.name, here, there, error)
            return 0

        return retried(map(serve, ranked).__next__, wait_s)


def common(all_of: Sequence[RunnerCapabilities]) -> RunnerCapabilities:
    """The abilities that each of *all_of* has."""

    def least(values: list[Any]) -> Any:
        limits = [value for value in values if value is not None]
        if not limits:
            return None
        is_set = isinstance(limits[0], frozenset)
        return frozenset.intersection(*limits) if is_set else min(limits)

    names = [field.name for field in fields(RunnerCapabilities)]
    return RunnerCapabilities(
        **{
            name: least([getattr(capabilities, name) for capabilities in all_of])
            for name in names
        }
    )


def _routed(
    prompt: Prompt, params: SamplingParams, options: RequestOptions
) -> RoutedRequest:
    """A request, as the rule sees it."""
    data = prompt_bytes(prompt)
    n_tokens = len(data) // CHARACTERS_A_TOKEN + params.n * params.max_tokens
    space = str(options.get("cache_salt") or "").encode(errors="surrogatepass")
    return RoutedRequest(
        n_tokens, prefixes(data, BLOCK_BYTES, space), options.get("client")
    )
