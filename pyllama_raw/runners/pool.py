"""
Several runners: as one, by name, or by key.

A Pool is a runner: each request goes to the one that the rule of routing.py names. A runner that
fails rests for a while. A request that failed before its first delta goes to the next runner;
after that its error is the reader's.

In a RunnerManager the new runner starts before the old one gives way: requests that run end on the
old one, which is then closed. For that time there is memory for both. A new runner that cannot
start changes nothing but what `state` says.
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
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from time import monotonic
from typing import Any, TypeVar

import anyio

from pyllama_raw import Prompt
from pyllama_raw.errors import ClosedError, ConfigError, PyllamaError, first_of, shown
from pyllama_raw.options.frozen import Factor, check_value
from pyllama_raw.options.requests import RequestOptions
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.routing import ROUTERS, RoutedRequest, RouterName, prefixes
from pyllama_raw.runners.capabilities import RunnerCapabilities, Verb
from pyllama_raw.runners.guards import FULL, Breaker, Seconds, retried
from pyllama_raw.runners.local import LocalRunner
from pyllama_raw.runners.remote import RemoteRunner
from pyllama_raw.runners.runner import (
    CHARACTERS_A_TOKEN,
    ModelRunner,
    RunnerHealth,
    RunnerKind,
    Serving,
    Source,
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
        members: object = runners
        if not isinstance(members, Mapping) or not members:
            raise ConfigError("a pool needs runners: give one or more by name")
        for key, runner in runners.items():
            if not isinstance(runner, ModelRunner):
                raise ConfigError(f"runners[{key!r}]={shown(runner)}: give a runner")
        check_value("router", router, RouterName)
        check_value("rest_s", rest_s, Seconds)
        shares = dict(weights or {})
        for key, share in shares.items():
            check_value(f"weights[{key!r}]", share, Factor)
        if not shares.keys() <= runners.keys():
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


SUPPORTED = "FILE.gguf, hf:OWNER/REPO/FILE.gguf, hf:OWNER/REPO:QUANT or http://HOST:PORT/v1#MODEL"


class ManagedState(StrEnum):
    """The latest that happened to a name."""

    STARTING = "starting"
    """A new runner is being started."""
    READY = "ready"
    """Its runner has started."""
    FAILED = "failed"
    """The new runner could not start; the old one, if there was one, goes on."""


@dataclass(slots=True)
class Managed:
    """A name of a manager."""

    spec: str
    """The specification that was asked for last."""
    state: ManagedState = ManagedState.STARTING
    """The fate of it."""
    error: PyllamaError | None = None
    """The reason why it failed."""
    runner: ModelRunner | None = None
    """The runner that serves."""
    serves: str = ""
    """The specification that the runner was made of."""
    _changing: anyio.Lock = field(default_factory=anyio.Lock, repr=False)
    _start: anyio.CancelScope | None = field(default=None, repr=False)


class RunnerManager:
    """
    Runners by name.

    swap() changes one name at a time, in the order of the calls. remove() and aclose() end the
    changes of their names that run or wait: these raise ClosedError, and the runner that one of
    them was starting is closed before remove() or aclose() returns.

    Args:
        make: makes a runner of a specification.
        drain_s: seconds that requests of a runner which gives way have to end.
    """

    def __init__(
        self,
        make: Callable[[str], ModelRunner] | None = None,
        *,
        drain_s: float = 30.0,
    ) -> None:
        check_value("drain_s", drain_s, Seconds)
        self._make, self._drain_s = make or runner_for, drain_s
        self._managed: dict[str, Managed] = {}
        self._draining: list[ModelRunner] = []  # serve the last of their requests
        self._closed = False

    def get(self, name: str) -> ModelRunner:
        """
        The runner that serves as *name*.

        Raises:
            ConfigError: there is none.
            PyllamaError: it could not start.
        """
        managed = self._managed.get(name)
        if managed is not None and managed.runner is not None:
            return managed.runner
        if managed is not None and managed.error is not None:
            raise managed.error
        has = ", ".join(sorted(self._managed)) or "none"
        raise ConfigError(f"no runner {shown(name)} has started: there are {has}")

    def state(self, name: str) -> Managed | None:
        """The facts of *name*. None: nothing is known of it."""
        return self._managed.get(name)

    async def swap(self, name: str, spec: str) -> ModelRunner:
        """
        Serve *spec* as *name*; a runner that is well and made of the same stays.

        Raises:
            ClosedError: the manager is closed, or *name* was removed meanwhile.
            PyllamaError: it cannot be made or started.
        """
        if self._closed:
            raise ClosedError("this manager is closed: make another one")
        managed = self._managed.setdefault(name, Managed(spec))
        async with managed._changing:
            self._check_present(name, managed)
            old = managed.runner
            managed.spec, managed.error = spec, None
            managed.state = ManagedState.STARTING
            try:
                new = await self._serving(managed, spec)
                if new is not old and self._managed.get(name) is not managed:
                    with anyio.CancelScope(shield=True):
                        await new.aclose()
                self._check_present(name, managed)
            except BaseException as error:
                managed.state = ManagedState.FAILED
                managed.error = error if isinstance(error, PyllamaError) else None
                raise
            managed.runner, managed.serves = new, spec
            managed.state = ManagedState.READY
            logger.info("%s is served by %s", name, spec)
        if old is not None and old is not new:
            await self._retire(old)
        return new

    async def remove(self, name: str) -> None:
        """Serve *name* no more; its requests have drain_s to end."""
        managed = self._managed.pop(name, None)
        if managed is None:
            return
        with anyio.CancelScope(shield=True):  # a caller that leaves leaves no runner
            runner = await self._taken(managed)
        if runner is not None:
            await self._retire(runner)

    async def aclose(self) -> None:
        """Close all at once, without a wait for their requests. Can be repeated."""
        self._closed = True
        names, self._managed = self._managed, {}
        with anyio.CancelScope(shield=True):
            for managed in names.values():
                if (runner := await self._taken(managed)) is not None:
                    await runner.aclose()
            for runner in [*self._draining]:
                await runner.aclose()

    # -- inside ---------------------------------------------------------------

    def _check_present(self, name: str, managed: Managed) -> None:
        """Raise ClosedError if *managed* was taken away while a change of it ran or waited."""
        if self._managed.get(name) is not managed:
            raise ClosedError(f"the runner {shown(name)} was removed meanwhile")

    async def _serving(self, managed: Managed, spec: str) -> ModelRunner:
        """The runner of *managed* if it is well and made of *spec*; else a new one."""
        old = managed.runner
        managed._start = scope = anyio.CancelScope()
        with scope:
            try:
                if (
                    old is not None
                    and managed.serves == spec
                    and (await old.health()).ready
                ):
                    return old
                return await self._started(spec)
            finally:
                managed._start = None
        raise ClosedError(f"{spec} was removed while it started")

    async def _taken(self, managed: Managed) -> ModelRunner | None:
        """The runner of a name that is gone, once no change of it runs any more."""
        if managed._start is not None:
            managed._start.cancel()
        async with managed._changing:
            return managed.runner

    async def _started(self, spec: str) -> ModelRunner:
        """A new runner, closed if it cannot start."""
        runner = self._make(spec)
        try:
            await runner.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await runner.aclose()
            raise
        return runner

    async def _retire(self, runner: ModelRunner) -> None:
        self._draining.append(runner)
        try:
            with anyio.move_on_after(self._drain_s):
                await runner.drained()
        finally:
            with anyio.CancelScope(shield=True):
                await runner.aclose()
            self._draining.remove(runner)


def runner_for(spec: str) -> ModelRunner:
    """
    A runner for a file or a service.

    Raises:
        ConfigError: *spec* is neither.
    """
    url, _, model = spec.partition("#")
    if url.startswith(("http://", "https://")) and model:
        return RemoteRunner(url, model)
    if spec.startswith("hf:") or spec.lower().endswith(".gguf"):
        return LocalRunner(spec)
    raise ConfigError(f"no runner is known for {shown(spec)}: give {SUPPORTED}")
