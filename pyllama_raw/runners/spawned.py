"""
A server of one's own as a runner: what aborts there does not end this process.

Rules:
1. The child listens on this machine only, at a port it chooses, unless the program says
   otherwise, and knows one key from its environment, random unless it is given.
2. A child that ended is replaced by the next request, after a wait that grows with each
   failure until a request is served. Requests that the old one had raise RunnerDied.
3. A child that was asked to end, and takes no requests any more, serves those that it has. The
   next request starts another one beside it.
4. The child and what it has started are killed when this process is.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from secrets import token_urlsafe
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio

from pyllama_raw import Prompt, __version__
from pyllama_raw.errors import ConfigError, PyllamaError, shown
from pyllama_raw.options.frozen import check_value
from pyllama_raw.options.machine import NoInterpreter, interpreter
from pyllama_raw.options.requests import RequestOptions
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.runners.capabilities import VERBS, Verb
from pyllama_raw.runners.child import HOST, STOP_S, Child, Hears
from pyllama_raw.runners.connection import http_library
from pyllama_raw.runners.errors import (
    NetworkError,
    NotReady,
    RunnerDied,
    RunnerFault,
    ServerError,
)
from pyllama_raw.runners.guards import Backoff, Seconds, Timeouts, retried
from pyllama_raw.runners.remote import PYLLAMA, Dialect, RemoteRunner
from pyllama_raw.runners.runner import (
    ModelRunner,
    RebuildCause,
    RunnerHealth,
    RunnerKind,
    RunnerMetadata,
    Serving,
    Source,
    lent_source,
)

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")
logger = logging.getLogger(__name__)
UNAVAILABLE = 503
LOG_S = 10.0  # between lines about a server that does not listen yet
LOOKS = Backoff()  # waits between two looks whether a server takes requests
NO_RETRIES = Backoff(max_retries=0)  # a child that is gone comes back at another port
NOTICED_S = 2.0  # for the end of a child to be known, once its connections broke
LEARN_S = 5.0  # for what a child says of itself
WARM_S = 30.0  # for the request that warms a server up
DRAIN_S = 30.0  # for requests of a child that a rebuild ends
N_CONNECTIONS = 64  # to a child, that stay open without a request
PARTS = ("name", "served_name", "dialect", "check", "command", "environment")
MAX_LEAVING = 2  # children that serve their last requests, at once


class Program(Protocol):
    """A server that can be spawned; it tells where it listens and answers `/health`."""

    @property
    def name(self) -> str:
        """A word for it in errors."""

    @property
    def served_name(self) -> str:
        """The name of its model in requests."""

    @property
    def dialect(self) -> Dialect:
        """Its words."""

    def check(self) -> None:
        """Raise ConfigError if it cannot be started."""

    async def command(self) -> list[str]:
        """The program and its arguments, without a key: others see them."""

    def environment(self, key: str) -> dict[str, str]:
        """Variables that it needs beside those of this process."""


def check_interpreter(name: str) -> None:
    """Raise ConfigError if there is no Python that a program called *name* could run in."""
    try:
        interpreter()
    except NoInterpreter as error:
        raise ConfigError(f"{name}: {error}") from error


@dataclass(frozen=True, slots=True)
class OwnServer:
    """
    `pyllama-raw serve` with one model.

    Args:
        flags: further flags, such as `("--slots", "4")`.
        host: the address at which it listens; with 0.0.0.0 other machines reach it by the key.
        port: 0 is a free one.
    """

    model: str | Path | None = None
    flags: tuple[str, ...] = ()
    name: str = "pyllama-raw serve"
    served_name: str = "local-llm"
    dialect: Dialect = PYLLAMA
    host: str = HOST
    port: int = 0

    @property
    def metadata(self) -> RunnerMetadata:
        """The package of this process."""
        return RunnerMetadata("GGUF", "pyllama_raw", __version__, None)

    def check(self) -> None:
        """Raise ConfigError if there is no Python to start; the server says all else."""
        check_interpreter(self.name)

    async def command(self) -> list[str]:
        """By the Python of this process, or the one that is named."""
        model = [] if self.model is None else [str(self.model)]
        place = ["--host", self.host, "--port", str(self.port)]
        own = ["--alias", self.served_name, *place]
        serve = [interpreter(), "-m", "pyllama_raw", "serve"]
        return [*serve, *model, *own, *self.flags]

    def environment(self, key: str) -> dict[str, str]:
        """Its key."""
        return {"PYLLAMA_RAW_API_KEYS": key}


class SpawnedRunner(ModelRunner):
    """
    A server that this process starts and ends.

    Args:
        program: an OwnServer, a LlamaServer, or anything that is told alike.
        verbs: what the model can do. None: what the program says once it runs; until then all
            that it has words for.
        api_key: the key of the child. None: a random one for each child.
        start_s: seconds until it must take requests.
        restarts: waits before a child is replaced.
        warms: whether a token is asked for before the first request.
    """

    stop_s = STOP_S
    """Seconds that the child has to end when this is closed."""
    hears: Hears | None = None
    """A function that is called with each line that the child writes, in a thread of its own."""

    def __init__(
        self,
        program: Program,
        *,
        name: str | None = None,
        verbs: Iterable[Verb] | None = None,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        start_s: float = 120.0,
        restarts: Backoff | None = None,
        warms: bool = False,
    ) -> None:
        if not all(hasattr(program, part) for part in PARTS):
            raise ConfigError(
                f"program={shown(program)} is no program: give OwnServer(MODEL), LlamaServer(MODEL) or "
                f"an object with {', '.join(PARTS)}"
            )
        check_value("start_s", start_s, Seconds)
        own = getattr(program, "verbs", None) if verbs is None else verbs
        super().__init__(name or program.name, program.dialect.capabilities.only(own))
        self._program, self._timeouts = program, timeouts
        self._asks_for_verbs = own is None
        self._fixed_key, self._key = api_key, api_key or ""
        self._start_s, self._warms = start_s, warms
        self._restarts, self._n_failures = restarts or Backoff(), 0
        self._starting = anyio.Lock()
        self._child: Child | None = None
        self._remote: RemoteRunner | None = None
        self._version: str | None = None
        self._leaving: list[Child] = []
        self._has_served = False

    @property
    def kind(self) -> RunnerKind:
        """A child."""
        return RunnerKind.CHILD

    @property
    def base_url(self) -> str:
        """The address of the child; empty while there is none."""
        child = self._child
        return "" if child is None or child.has_ended else child.url

    @property
    def api_key(self) -> str:
        """
        The key with which others reach the child at base_url; empty while there is none.

        It is a secret of the owner: no log, repr or error has it.
        """
        return self._key

    @property
    def metadata(self) -> RunnerMetadata | None:
        """The program and, once it has run, its version. None: it says nothing of itself."""
        program: RunnerMetadata | None = getattr(self._program, "metadata", None)
        if program is None or self._version is None:
            return program
        return replace(program, version=self._version)

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        child = self._child
        return None if child is None or child.has_ended else child.pid

    async def start(self) -> None:
        """
        Start the server, and wait until it takes requests.

        Raises:
            ConfigError: it cannot be started as it is described.
            RunnerDied: it has ended.
            NotReady: it took longer than start_s, and was ended.
        """
        await self._opened()

    async def health(self) -> RunnerHealth:
        """The child's answer within `Timeouts.health_s`; it starts none."""
        child, remote = self._child, self._remote
        if self._closed or child is None:
            return self._health_before("Runtime not initialized")
        if child.has_ended:
            detail = f"Health check failed: {child.death}"
            return RunnerHealth(live=False, ready=False, detail=detail)
        if remote is None:
            return RunnerHealth(live=True, ready=False, detail="starting")
        answer = await remote.health()
        fault = "returned" if answer.live else "failed"
        detail = "healthy" if answer.ready else f"Health check {fault}: {answer.detail}"
        return RunnerHealth(answer.live, answer.ready, answer.n_running, detail=detail)

    @property
    def has_ended(self) -> bool:
        """Whether there was a child, and it has ended."""
        return self._child is not None and self._child.has_ended

    async def death(self) -> PyllamaError | None:
        """The end of the child, once it has ended, whoever ended it. None, at once: there is none."""
        child = self._child
        if child is None:
            return None
        await child.ended()
        return child.death

    @asynccontextmanager
    async def exchange(
        self,
        method: str,
        path: str,
        content: bytes | AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        """
        A block with an answer of the child as it is, as `RemoteRunner.exchange` gives it; starts none.

        Raises:
            RunnerDied: there is no child any more, or it ended meanwhile.
            NetworkError, RunnerTimeout, ClosedError: as there.
        """
        self._check_open()
        child, remote = self._child, self._remote
        if child is None or remote is None or child.has_ended:
            raise RunnerDied(None) if child is None else child.death
        async with self._counting():
            try:
                async with remote.exchange(method, path, content, headers) as response:
                    yield response
            except NetworkError as error:
                if await child.ended_within(NOTICED_S):
                    raise child.death from error
                raise

    async def rebuild(
        self,
        api_key: str | EllipsisType | None = ...,
        *,
        cause: RebuildCause = RebuildCause.MANUAL,
    ) -> None:
        """
        End the child, and start another one.

        Requests of the old one have DRAIN_S to end, unless its device is poisoned; new ones wait.

        Args:
            api_key: the key of the new child; None is a random one.

        Raises:
            PyllamaError: as start().
        """
        async with self._starting:
            self._check_open()
            child, remote = self._child, self._remote
            if remote is not None and cause is not RebuildCause.DEVICE_POISONED:
                with anyio.move_on_after(DRAIN_S):
                    await remote.drained()
            if child is not None:
                logger.info("%s is started anew: %s", self.name, cause)
                await child.end()
            if remote is not None:
                await remote.retire()
            self._child = self._remote = None
            if not isinstance(api_key, EllipsisType):
                self._fixed_key = api_key
            self._check_open()
            await self._started()

    async def aclose(self) -> None:
        """End the child; requests under way end with ClosedError."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            if self._remote is not None:
                await self._remote.aclose()
            for child in (self._child, *self._leaving):
                if child is not None:
                    await child.end(self.stop_s)

    # -- inside ---------------------------------------------------------------

    def _source(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        served = partial(lent_source, self._lent, prompt, params, options)
        return retried(served, self._wait_s)

    async def _called(self, verb: Verb, call: Callable[[Serving], Awaitable[T]]) -> T:
        async def once() -> AsyncGenerator[T, None]:
            yield await self._called_on(self._lent, verb, call)

        [answer] = [item async for item in retried(once, self._wait_s)]
        return answer

    def _wait_s(self, attempt: int, error: PyllamaError) -> float | None:
        """No time before a request goes to another child, once, if its own one did not take it."""
        may_move = attempt == 0 and not self._closed and _was_not_taken(error)
        is_gone = self._child is None or self._child.has_ended
        if not (may_move and is_gone):
            return None
        self.counts.n_retries += 1
        return 0.0

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[RemoteRunner]:
        """A block with the child's runner; a broken connection may be the child's death."""
        child, remote = await self._opened()
        try:
            yield remote
        except RunnerFault as error:
            is_broken = isinstance(error, NetworkError)
            if self._closed:
                raise
            if is_broken and await child.ended_within(NOTICED_S):
                raise child.death from error
            if _was_not_taken(error) and not (await remote.health()).ready:
                await self._let_go(child, remote)
            raise
        self._n_failures = 0

    async def _let_go(self, child: Child, remote: RemoteRunner) -> None:
        """Let *child* serve what it has; the next request starts another one."""
        if self._child is not child:
            return
        logger.warning("%s (pid %d) takes no more requests", self.name, child.pid)
        self._child = self._remote = None
        self._n_failures += 1
        self._leaving = [old for old in self._leaving if not old.has_ended]
        self._leaving.append(child)
        await remote.retire()
        while len(self._leaving) > MAX_LEAVING:
            await self._leaving.pop(0).end()

    async def _opened(self) -> tuple[Child, RemoteRunner]:
        """The child and its runner; starts one if there is none."""
        async with self._starting:
            self._check_open()
            child, remote = self._child, self._remote
            if child is not None and remote is not None and not child.has_ended:
                return child, remote
            if child is not None and remote is not None:
                logger.warning("%s is replaced: %s", self.name, child.death)
                await remote.retire()  # its requests see for themselves that it died
                self._remote, self._n_failures = None, self._n_failures + 1
            if self._n_failures:
                await anyio.sleep(self._restarts.ceiling_s(self._n_failures - 1))
            return await self._started()

    async def _started(self) -> tuple[Child, RemoteRunner]:
        began = anyio.current_time()
        self._program.check()
        command = await self._program.command()
        key = self._key = self._fixed_key or token_urlsafe(32)
        self._check_open()
        logger.info("%s: %s", self._program.name, shlex.join(command))
        environment = self._program.environment(key)
        child = self._child = Child(
            self._program.name, command, environment, hears=self.hears
        )
        try:
            with anyio.fail_after(self._start_s):
                remote = self._remote = await self._ready(child, key)
        except PyllamaError:
            self._check_open()
            raise
        except TimeoutError as error:
            raise NotReady(child.name, self._start_s, child.said) from error
        finally:
            if self._remote is None:
                self._n_failures += 1
                await child.end()
        self.counts.n_restarts += self._has_served
        self._has_served = True
        seconds = anyio.current_time() - began
        message = "%s (pid %d) serves at %s after %.1f s"
        logger.info(message, self.name, child.pid, child.url, seconds)
        return child, remote

    async def _ready(self, child: Child, key: str) -> RemoteRunner:
        """The child's runner, once it takes requests."""
        began = anyio.current_time()
        while not child.url:
            await child.pause(LOG_S)
            if not child.url:
                seconds = anyio.current_time() - began
                logger.info("%s starts since %.0f s", child.name, seconds)
        http = http_library()
        any_number = http.Limits(
            max_connections=None, max_keepalive_connections=N_CONNECTIONS
        )
        remote = RemoteRunner(
            child.url,
            self._program.served_name,
            api_key=key,
            dialect=self._program.dialect,
            timeouts=self._timeouts,
            backoff=NO_RETRIES,
            name=self.name,
            transport=http.AsyncHTTPTransport(limits=any_number),  # which no proxy gets
        )
        try:
            for attempt in count():
                if (await remote.health()).ready:
                    break
                await child.pause(LOOKS.ceiling_s(attempt))
            await self._learn(remote)
            if self._warms:
                await self._warm(remote)
        except BaseException:
            await remote.aclose()
            raise
        return remote

    async def _learn(self, remote: RemoteRunner) -> None:
        """Take in what the child says of itself and its model, if it says something."""
        with suppress(PyllamaError), anyio.move_on_after(LEARN_S):
            if self._asks_for_verbs:
                verbs = (await remote.card()).get("capabilities")
                own = VERBS.intersection(verbs if isinstance(verbs, list) else ())
                if own:
                    self._capabilities = self._capabilities.only(own)
            if getattr(self._program, "metadata", None) is not None:
                self._version = await remote.version()

    async def _warm(self, remote: RemoteRunner) -> None:
        """Ask for a token; a server that cannot give one may still serve."""
        chat: Prompt = [{"role": "user", "content": "hi"}]
        try:
            with anyio.fail_after(WARM_S):
                params = SamplingParams(max_tokens=1, temperature=0)
                await remote.generate(chat, params).collect()
        except (PyllamaError, TimeoutError) as error:
            logger.warning("%s was not warmed up: %s", self.name, error)


def _was_not_taken(error: PyllamaError) -> bool:
    """Whether a request that failed with *error* was served by nobody, not even in part."""
    cause = error.__cause__ if isinstance(error.__cause__, PyllamaError) else error
    if isinstance(cause, NetworkError):
        return not cause.is_sent
    return isinstance(cause, ServerError) and cause.status == UNAVAILABLE
