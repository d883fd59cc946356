"""
Runners by name that can be exchanged while they serve.

The new runner starts before the old one gives way: requests that run end on the old one, which
is then closed. For that time there is memory for both. A new runner that cannot start changes
nothing but what `state` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import anyio

from pyllama_raw.errors import ConfigError, PyllamaError, shown
from pyllama_raw.runners.local import LocalRunner
from pyllama_raw.runners.remote import RemoteRunner
from pyllama_raw.runners.runner import ModelRunner

SUPPORTED = "FILE.gguf, hf:OWNER/REPO/FILE.gguf or http://HOST:PORT/v1#MODEL"


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


class RunnerManager:
    """
    Runners by name.

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
        self._changing = anyio.Lock()

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
            PyllamaError: it cannot be made or started.
        """
        async with self._changing:
            managed = self._managed.setdefault(name, Managed(spec))
            old = managed.runner
            managed.spec, managed.error = spec, None
            managed.state = ManagedState.STARTING
            try:
                is_same = old is not None and managed.serves == spec
                if old is not None and is_same and (await old.health()).ready:
                    new = old
                else:
                    new = managed.runner = await self._started(spec)
                    managed.serves = spec
            except BaseException as error:
                managed.state = ManagedState.FAILED
                managed.error = error if isinstance(error, PyllamaError) else None
                raise
            managed.state = ManagedState.READY
        if old is not None and old is not new:
            await self._retire(old)
        return new

    async def remove(self, name: str) -> None:
        """Serve *name* no more; its requests have drain_s to end."""
        managed = self._managed.pop(name, None)
        if managed is not None and managed.runner is not None:
            await self._retire(managed.runner)

    async def aclose(self) -> None:
        """Close all at once, without a wait for their requests."""
        managed, self._managed = self._managed, {}
        for each in managed.values():
            if each.runner is not None:
                await each.runner.aclose()

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
        try:
            with anyio.move_on_after(self._drain_s):
                await runner.drained()
        finally:
            with anyio.CancelScope(shield=True):
                await runner.aclose()


def runner_for(spec: str) -> ModelRunner:
    """
    A runner for a file or a service.

    Raises:
        ConfigError: *spec* is neither.
    """
    url, _, model = spec.partition("#")
    if url.startswith(("http://", "https://")) and model:
        return RemoteRunner(url, model)
    if spec.lower().endswith(".gguf"):
        return LocalRunner(spec)
    raise ConfigError(f"no runner is known for {shown(spec)}: give {SUPPORTED}")
