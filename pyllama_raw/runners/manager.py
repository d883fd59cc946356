"""
Runners by name that can be exchanged while they serve.

The new runner starts before the old one gives way: requests that run end on the old one, which
is then closed. For that time there is memory for both. A new runner that cannot start changes
nothing but what `state` says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import anyio

from pyllama_raw.errors import ClosedError, ConfigError, PyllamaError, shown
from pyllama_raw.runners.local import LocalRunner
from pyllama_raw.runners.remote import RemoteRunner
from pyllama_raw.runners.runner import ModelRunner

logger = logging.getLogger(__name__)
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
