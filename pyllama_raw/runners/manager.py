"""
Runners that a program holds: by name, exchanged while they serve; or by key, for a while.

In a RunnerManager the new runner starts before the old one gives way: requests that run end on the
old one, which is then closed. For that time there is memory for both. A new runner that cannot
start changes nothing but what `state` says.

KeptRunners gives up those that were unused the longest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic
from typing import Generic, TypeVar

import anyio
from anyio import CancelScope

from pyllama_raw.errors import ClosedError, ConfigError, PyllamaError, shown
from pyllama_raw.runners.local import LocalRunner
from pyllama_raw.runners.remote import RemoteRunner
from pyllama_raw.runners.runner import ModelRunner

logger = logging.getLogger(__name__)
SUPPORTED = "FILE.gguf, hf:OWNER/REPO/FILE.gguf, hf:OWNER/REPO:QUANT or http://HOST:PORT/v1#MODEL"
K = TypeVar("K", bound=Hashable)


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


@dataclass(slots=True)
class _Entry:
    runner: ModelRunner
    used_at: float
    checked_at: float


class KeptRunners(Generic[K]):
    """
    Runners by a key, such as a model and a device.

    A runner that is given up serves its calls to their end, and is closed then; aclose() closes
    all at once.

    Args:
        max_kept: runners at most.
        ttl_s: seconds without use after which one is given up.
        health_s: seconds after which one is asked whether it is well.
        evicted: called with the key of what is given up, before that is closed; what it raises
            is logged.
    """

    def __init__(
        self,
        max_kept: int = 5,
        *,
        ttl_s: float = 60.0,
        health_s: float = 10.0,
        evicted: Callable[[K], None] = lambda _: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._max, self._ttl_s, self._health_s = max_kept, ttl_s, health_s
        self._evicted, self._clock = evicted, clock
        self._entries = dict[K, _Entry]()  # longest unused first
        self._closed = False
        self._retiring: list[ModelRunner] = []  # serve their last calls
        self._n_gets = self._n_hits = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of gets that found a runner; None: there were none."""
        return self._n_hits / self._n_gets if self._n_gets else None

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, key: K) -> ModelRunner | None:
        """The runner of *key*, if it is there and well."""
        self._n_gets += 1
        now = self._clock()
        for unused, entry in [*self._entries.items()]:
            if now - entry.used_at > self._ttl_s and not entry.runner.n_open:
                await self._give_up(unused)
        hit = self._entries.get(key)
        if hit is None:
            return None
        if now - hit.checked_at >= self._health_s:
            hit.checked_at = now
            is_well = (await hit.runner.health()).ready
            if self._entries.get(key) is not hit:  # given up or replaced meanwhile
                return None
            if not is_well:
                await self._give_up(key)
                return None
        hit.used_at = now
        self._entries[key] = self._entries.pop(key)
        self._n_hits += 1
        return hit.runner

    async def put(self, key: K, runner: ModelRunner) -> None:
        """
        Keep *runner*; one that had the key is given up.

        Raises:
            ClosedError: all are given up, and *runner* with them.
        """
        old = self._entries.get(key)
        if old is None or old.runner is not runner:
            await self._give_up(key)
        if self._closed:
            await runner.aclose()
            raise ClosedError("these kept runners are closed: make others")
        now = self._clock()
        self._entries.pop(key, None)
        self._entries[key] = _Entry(runner, now, now)
        while len(self._entries) > self._max:
            await self._give_up(next(iter(self._entries)))

    async def aclose(self) -> None:
        """Give up all, and close what serves still. Can be repeated."""
        self._closed = True
        for key in [*self._entries]:
            await self._give_up(key)
        with CancelScope(shield=True):
            for runner in self._retiring:
                await runner.aclose()
        self._retiring.clear()

    async def _give_up(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        try:
            self._evicted(key)
        except Exception:
            logger.exception("evicted(%r) failed", key)
        self._retiring = [runner for runner in self._retiring if runner.n_open]
        self._retiring.append(entry.runner)
        with CancelScope(shield=True):
            await entry.runner.retire()
