"""
A server of one's own as a runner: what aborts there does not end this process.

Rules:
1. The child listens on this machine only, at a port it chooses, and knows one random key from
   its environment.
2. A child that ended is replaced by the next request, after a wait that grows with each
   failure until a request is served. Requests that the old one had raise RunnerDied.
3. The child is killed when this process is.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from secrets import token_urlsafe
from typing import Protocol

import anyio

from pyllama_raw import Prompt
from pyllama_raw.errors import ConfigError, PyllamaError
from pyllama_raw.options.interpreter import NoInterpreter, interpreter
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.runners.capabilities import Verb
from pyllama_raw.runners.child import Child
from pyllama_raw.runners.connection import http_library
from pyllama_raw.runners.dialect import PYLLAMA, Dialect
from pyllama_raw.runners.errors import NetworkError, NotReady
from pyllama_raw.runners.llama_args import HOST
from pyllama_raw.runners.remote import RemoteRunner
from pyllama_raw.runners.runner import ModelRunner, RunnerHealth
from pyllama_raw.runners.tries import Backoff, Timeouts

logger = logging.getLogger(__name__)
LOG_S = 10.0  # between lines about a server that does not listen yet
LOOKS = Backoff()  # waits between two looks whether a server takes requests
NO_RETRIES = Backoff(max_retries=0)  # a child that is gone comes back at another port
NOTICED_S = 0.5  # for the end of a child to be known, once its connections broke
WARM_S = 30.0  # for the request that warms a server up


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


@dataclass(frozen=True, slots=True)
class OwnServer:
    """
    `pyllama-raw serve` with one model.

    Args:
        flags: further flags, such as `("--slots", "4")`.
    """

    model: str | Path | None = None
    flags: tuple[str, ...] = ()
    name: str = "pyllama-raw serve"
    served_name: str = "local-llm"
    dialect: Dialect = PYLLAMA

    def check(self) -> None:
        """Raise ConfigError if there is no Python to start; the server says all else."""
        try:
            interpreter()
        except NoInterpreter as error:
            raise ConfigError(f"{self.name}: {error}") from error

    async def command(self) -> list[str]:
        """By the Python of this process, or the one that is named."""
        model = [] if self.model is None else [str(self.model)]
        own = ["--alias", self.served_name, "--host", HOST, "--port", "0"]
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
        verbs: what the model can do. None: all that the program has words for.
        start_s: seconds until it must take requests.
        restarts: waits before a child is replaced.
        warms: whether a token is asked for before the first request.
    """

    def __init__(
        self,
        program: Program,
        *,
        name: str | None = None,
        verbs: Iterable[Verb] | None = None,
        timeouts: Timeouts | None = None,
        start_s: float = 120.0,
        restarts: Backoff | None = None,
        warms: bool = False,
    ) -> None:
        super().__init__(name or program.name, program.dialect.capabilities.only(verbs))
        self._program, self._timeouts = program, timeouts
        self._start_s, self._warms = start_s, warms
        self._restarts, self._n_failures = restarts or Backoff(), 0
        self._starting = anyio.Lock()
        self._child: Child | None = None
        self._remote: RemoteRunner | None = None

    @property
    def base_url(self) -> str:
        """The address of the child; empty while there is none."""
        child = self._child
        return "" if child is None or child.has_ended else child.url

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
            said = "closed" if self._closed else "Runtime not initialized"
            return RunnerHealth(live=not self._closed, ready=False, detail=said)
        if child.has_ended:
            said = f"Health check failed: {child.death}"
            return RunnerHealth(live=False, ready=False, detail=said)
        if remote is None:
            return RunnerHealth(live=True, ready=False, detail="starting")
        found = await remote.health()
        fault = "returned" if found.live else "failed"
        said = "healthy" if found.ready else f"Health check {fault}: {found.detail}"
        return RunnerHealth(found.live, found.ready, found.n_running, detail=said)

    async def aclose(self) -> None:
        """End the child; requests under way end with ClosedError."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            if self._remote is not None:
                await self._remote.aclose()
            if self._child is not None:
                await self._child.end()

    # -- inside ---------------------------------------------------------------

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[RemoteRunner]:
        """A block with the child's runner; a broken connection may be the child's death."""
        child, remote = await self._opened()
        try:
            yield remote
        except NetworkError as error:
            if not self._closed and await child.ended_within(NOTICED_S):
                raise child.death from error
            raise
        self._n_failures = 0

    async def _opened(self) -> tuple[Child, RemoteRunner]:
        """The child and its runner; starts one if there is none."""
        async with self._starting:
            self._check_open()
            child, remote = self._child, self._remote
            if child is not None and remote is not None and not child.has_ended:
                return child, remote
            if remote is not None:
                await remote.aclose()
                self._remote, self._n_failures = None, self._n_failures + 1
            if self._n_failures:
                await anyio.sleep(self._restarts.ceiling_s(self._n_failures - 1))
            return await self._started()

    async def _started(self) -> tuple[Child, RemoteRunner]:
        self._program.check()
        command, key = await self._program.command(), token_urlsafe(32)
        self._check_open()
        child = self._child = Child(
            self._program.name, command, self._program.environment(key)
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
        return child, remote

    async def _ready(self, child: Child, key: str) -> RemoteRunner:
        """The child's runner, once it takes requests."""
        began = anyio.current_time()
        while not child.url:
            await child.pause(LOG_S)
            if not child.url:
                seconds = anyio.current_time() - began
                logger.info("%s starts since %.0f s", child.name, seconds)
        remote = RemoteRunner(
            child.url,
            self._program.served_name,
            api_key=key,
            dialect=self._program.dialect,
            timeouts=self._timeouts,
            backoff=NO_RETRIES,
            name=self.name,
            transport=http_library().AsyncHTTPTransport(),  # which no proxy gets
        )
        try:
            for attempt in count():
                if (await remote.health()).ready:
                    break
                await child.pause(LOOKS.ceiling_s(attempt))
            if self._warms:
                await self._warm(remote)
        except BaseException:
            await remote.aclose()
            raise
        return remote

    async def _warm(self, remote: RemoteRunner) -> None:
        """Ask for a token; a server that cannot give one may still serve."""
        chat: Prompt = [{"role": "user", "content": "hi"}]
        try:
            with anyio.fail_after(WARM_S):
                params = SamplingParams(max_tokens=1, temperature=0)
                await remote.generate(chat, params).collect()
        except (PyllamaError, TimeoutError) as error:
            logger.warning("%s was not warmed up: %s", self.name, error)
