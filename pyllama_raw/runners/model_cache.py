"""
Models as a cache: runners by name, which are loaded when they are asked for.

`core/residency.py` decides what is in memory and who runs; this object does it, over runners of any
kind. A request has a *claim* on its model from when it comes until it has ended.

Rules:
1. A load belongs to its claims: it goes on while one of them waits, and ends with the last of them.
2. A runner is closed or put to sleep only while no claim runs on it.
3. A load or a wake that fails is a ModelUnavailable for those who wait, and for those who come until it
   may be tried again. The log says why.
4. What a model takes is asked of its runner before it is loaded the first time.
5. Facts of a model make no claim, so they neither load nor wake it, nor keep it awake.

Thread: that of the event loop which has entered the block.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic
from typing import Annotated, Any, Self

import anyio
from anyio import CancelScope, create_memory_object_stream
from anyio.abc import TaskGroup
from anyio.streams.memory import (
    MemoryObjectReceiveStream,
    MemoryObjectSendStream,
)
from pydantic import Field

from pyllama_raw.core.residency import (
    Claim,
    ModelState,
    Move,
    Residency,
    Resident,
)
from pyllama_raw.errors import (
    ClosedError,
    ConfigError,
    ModelNotFound,
    ModelTooLarge,
    ModelUnavailable,
    PyllamaError,
    QueueFull,
    WrongUse,
    first_of,
    shown,
)
from pyllama_raw.options.arguments import checked_wait
from pyllama_raw.options.frozen import Count, Whole, check_value
from pyllama_raw.runners.cached import (
    CachedModel,
    CachedRunner,
    ModelEvent,
    ModelStatus,
)
from pyllama_raw.runners.guards import Seconds
from pyllama_raw.runners.runner import (
    ModelRunner,
    RunnerMemory,
)

logger = logging.getLogger(__name__)
MODELS = "models"  # a number that has a limit beside bytes of devices
MAX_EVENTS = 1024  # that wait for their reader
NBytes = Annotated[int, Field(ge=0)]


@dataclass(slots=True, eq=False)
class _Entry:
    """A model with its runner, once there is one."""

    name: str
    model: CachedModel
    resident: Resident
    runner: ModelRunner | None = None
    is_sized: bool = False
    progress: float = 0.0
    checked_at: float = 0.0
    error: PyllamaError | None = None
    dead: ModelRunner | None = None  # the runner whose end is counted
    scope: CancelScope | None = None  # of its load, or of the question what it takes
    successor: CachedModel | None = None  # to be when it has left
    is_removed: bool = False
    sizing: anyio.Lock = field(default_factory=anyio.Lock)


@dataclass(slots=True, eq=False)
class _Wait:
    """The wait of a claim."""

    over: anyio.Event = field(default_factory=anyio.Event)
    error: PyllamaError | None = None


class ModelCache:
    """
    Runners by name, over memory for some of them.

    It is a block, `async with ModelCache(...) as cache`, whose end closes all runners. Without
    models, and with runners that are there already, it need not be entered.

    Args:
        models: by name.
        budget: bytes that all may take together, by device; without limit where none is named.
        there: runners that are loaded. They stay, and are closed with the others.
        max_models: models that are loaded at a time. None: any number.
        max_wait_s: seconds after which a claim is due, and others give way to its model.
        max_overtakes: later claims that may run before it.
        max_waiting: claims that may wait.
        max_waiting_bytes: bytes that requests whose claims wait may have, as far as claims tell; one alone
            may have any. None: any number.
        health_s: seconds after which a runner is asked whether it is well. One that is not is closed
            when its claims have ended, and loaded anew.
        evicted: called with the name of a model that has left.
    """

    def __init__(
        self,
        models: Mapping[str, CachedModel] | None = None,
        *,
        budget: Mapping[str, int] | None = None,
        there: Mapping[str, ModelRunner] | None = None,
        max_models: int | None = None,
        max_wait_s: float = 10.0,
        max_overtakes: int = 64,
        max_waiting: int = 1024,
        max_waiting_bytes: int | None = None,
        health_s: float = 10.0,
        evicted: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        check_value("max_models", max_models, Count | None)
        check_value("max_overtakes", max_overtakes, Whole)
        check_value("max_waiting", max_waiting, Whole)
        check_value("max_waiting_bytes", max_waiting_bytes, NBytes | None)
        check_value("max_wait_s", max_wait_s, Seconds)
        check_value("health_s", health_s, Seconds)
        for option, value in (("models", models), ("budget", budget), ("there", there)):
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"{option}={shown(value)}: give a mapping, by name")
        limits = dict(budget or {})
        for device, n_bytes in limits.items():
            check_value(f"budget[{device!r}]", n_bytes, NBytes)
        if not all(limits.values()):
            raise ConfigError(f"the budget {limits} has no room: give numbers above 0")
        if max_models is not None:
            limits[MODELS] = max_models
        self.max_models, self.max_waiting = max_models, max_waiting
        self._max_bytes = max_waiting_bytes
        self._n_bytes = 0  # of requests whose claims wait
        self._residency = Residency(
            limits, max_wait_s=max_wait_s, max_overtakes=max_overtakes
        )
        self._health_s, self._evicted, self._clock = health_s, evicted, clock
        self._entries: dict[str, _Entry] = {}
        self._waits: dict[Claim, _Wait] = {}
        self._keeps: dict[Claim, float | None] = {}
        self._readers: set[MemoryObjectSendStream[ModelEvent]] = set()
        self._group: TaskGroup | None = None
        self._changed = self._released = anyio.Event()
        self._closed = False
        for name, runner in (there or {}).items():
            resident = Resident(name, {}, is_pinned=True, state=ModelState.LOADED)
            model = CachedModel(partial(_there, runner), is_pinned=True)
            self._insert(_Entry(name, model, resident, runner, is_sized=True))
        self.is_dynamic = models is not None  # it loads, and lets go
        for name, model in (models or {}).items():
            self.add(name, model)

    # -- facts ----------------------------------------------------------------

    def __len__(self) -> int:
        return sum(not entry.is_removed for entry in self._entries.values())

    def __contains__(self, name: object) -> bool:
        entry = self._entries.get(name) if isinstance(name, str) else None
        return entry is not None and not entry.is_removed

    def __iter__(self) -> Iterator[str]:
        return iter([n for n, entry in self._entries.items() if not entry.is_removed])

    def loaded(self) -> dict[str, ModelRunner]:
        """Runners that are there, also those that sleep, by name."""
        states = (ModelState.LOADED, ModelState.SLEEPING, ModelState.LEAVING)
        return {
            name: entry.runner
            for name, entry in self._entries.items()
            if entry.runner is not None and entry.resident.state in states
        }

    def status(self, name: str) -> ModelStatus:
        """
        The state of a model, which it leaves as it is.

        Raises:
            ModelNotFound: there is no such model.
        """
        entry = self._entry(name)
        resident = entry.resident
        is_loading = resident.state is ModelState.LOADING
        return ModelStatus(
            name,
            resident.state,
            entry.progress if is_loading else None,
            resident.n_running,
            len(resident.waiting),
            {p: n for p, n in resident.occupies.items() if p != MODELS},
            resident.is_pinned,
            entry.error,
        )

    def adapters_of(self, name: str) -> frozenset[str]:
        """Names of the adapters that are loaded with a model. Raises ModelNotFound."""
        return self._entry(name).model.adapters

    def source_of(self, name: str) -> str:
        """The list that has a model. Raises ModelNotFound."""
        return self._entry(name).model.source

    @property
    def budget(self) -> dict[str, int]:
        """Bytes that all models may take together, by device."""
        return {p: n for p, n in self._residency.budget.items() if p != MODELS}

    def loading(self) -> dict[str, float]:
        """The fractions that are loaded of models that load, by name."""
        return {
            name: entry.progress
            for name, entry in self._entries.items()
            if entry.resident.state is ModelState.LOADING and not entry.is_removed
        }

    def free(self) -> dict[str, int]:
        """Bytes of the budget that no model takes, by device."""
        free = self._residency.free()
        free.pop(MODELS, None)
        return free

    @property
    def n_waiting(self) -> int:
        """Claims that wait for their models."""
        return len(self._waits)

    @contextmanager
    def events(self) -> Iterator[MemoryObjectReceiveStream[ModelEvent]]:
        """A block with a stream of changes. A reader who is too slow misses the rest."""
        send, receive = create_memory_object_stream[ModelEvent](MAX_EVENTS)
        self._readers.add(send)
        try:
            yield receive
        finally:
            self._readers.discard(send)
            send.close()
            receive.close()

    # -- the list of models -----------------------------------------------------

    def add(self, name: str, model: CachedModel) -> None:
        """Have a model, of a name that no other has, which loads nothing yet."""
        if not isinstance(model, CachedModel):
            raise ConfigError(f"models[{name!r}]={shown(model)}: give a CachedModel")
        if name in self._entries:
            raise ConfigError(f"there is a model {name!r} already: give another name")
        resident = Resident(name, {})
        entry = _Entry(name, model, resident)
        self._insert(entry)
        self._describe(entry, model)

    def replace(self, models: Mapping[str, CachedModel]) -> None:
        """
        Have *models*, and no others but those that were there from the beginning.

        One that is gone or changed is unloaded as soon as no claim runs on it. Claims that wait for
        one that is gone end with ModelNotFound.
        """
        for name, entry in [*self._entries.items()]:
            if name in models:
                # What an earlier list had leave leaves, and is what this one says after that.
                leaves = entry.is_removed or entry.successor is not None
                entry.is_removed = False
                if leaves or entry.model.key != models[name].key:
                    entry.successor = models[name]
                    self._let_go(entry)
                else:
                    self._describe(entry, models[name])
            elif entry.model.key is not None:
                entry.is_removed = True
                error = ModelNotFound(name, "it is not in the list of models any more")
                self._end(self._residency.dismiss(name), error)
                if entry.scope is not None:
                    entry.scope.cancel()
                self._let_go(entry)
        for name, model in models.items():
            if name not in self._entries:
                self.add(name, model)
        self.tell(ModelEvent("*"))
        self._turn()

    def runner(self, name: str) -> CachedRunner:
        """A model as a runner, whose requests load it."""
        self._entry(name)
        return CachedRunner(name, self.lent, self.loaded)

    # -- claims -------------------------------------------------------------------

    @asynccontextmanager
    async def lent(
        self, name: str, *, client: str = "", keep_alive_s: float | None = None
    ) -> AsyncIterator[ModelRunner]:
        """
        A block with the runner of a model, which stays loaded meanwhile.

        Args:
            client: clients take turns where models have to.
            keep_alive_s: seconds that the model stays loaded without use from then on, 0 or more.
                None: as long as always.

        Raises:
            ModelNotFound: there is no such model.
            ModelTooLarge: it takes more than the budget.
            ModelUnavailable: it could not be loaded.
            QueueFull: too many wait.
            ClosedError: the cache is closed.
        """
        claim = await self.claim(name, client=client, keep_alive_s=keep_alive_s)
        try:
            runner = self._entries[name].runner
            assert runner is not None
            yield runner
        finally:
            self.release(claim)

    async def claim(
        self,
        name: str,
        *,
        client: str = "",
        keep_alive_s: float | None = None,
        n_bytes: int = 0,
    ) -> Claim:
        """
        Return once the model is loaded, until release(); raises as lent().

        Args:
            n_bytes: of the request, which it keeps in memory while it waits.
        """
        self._n_bytes += n_bytes
        try:
            # The model may become another one meanwhile, whose size is not known yet.
            while True:
                claim = await self._claim(name, client, keep_alive_s, n_bytes)
                if claim.is_running:
                    return claim
                self.release(claim)
        finally:
            self._n_bytes -= n_bytes

    async def _claim(
        self, name: str, client: str, keep_alive_s: float | None, n_bytes: int
    ) -> Claim:
        """A claim that runs, or that has to be made anew; raises as lent()."""
        entry = self._entry(name)
        self._check_open()
        while not entry.is_sized:
            self._check_bytes(n_bytes)
            await self._size(entry)
            entry = self._entry(name)  # the list may be another one by now
        if entry.resident.state is ModelState.LOADED:
            await self._check_health(entry)
            entry = self._entry(name)
        self._check_open()  # it may have been closed meanwhile, and nobody would end the wait
        self._check_rest(entry)
        if len(self._waits) >= self.max_waiting:
            raise QueueFull("max_waiting", len(self._waits) + 1, self.max_waiting)
        claim = self._residency.enter(name, self._clock(), client)
        self._keeps[claim] = keep_alive_s
        wait = self._waits[claim] = _Wait()
        try:
            self._turn()
            if not wait.over.is_set():
                self._check_bytes(n_bytes)
            await wait.over.wait()
        except BaseException:
            self.release(claim)
            raise
        finally:
            del self._waits[claim]
        if wait.error is not None:
            self.release(claim)
            raise copy(wait.error) from wait.error.__cause__
        return claim

    def release(self, claim: Claim) -> None:
        """Have no claim any more, which runs or waits."""
        keep_s = self._keeps.pop(claim, None)
        entry = self._entries.get(claim.model)
        if entry is None:  # a claim that waited for a model which is gone
            return
        self._residency.leave(claim, self._clock(), keep_s)
        self._released.set()
        resident = entry.resident
        # A load that nobody waits for any more is of use to nobody.
        if (
            resident.state is ModelState.LOADING
            and not resident.waiting
            and entry.scope
        ):
            entry.scope.cancel()
        self._turn()

    async def load(self, name: str) -> None:
        """Load a model, or wake it; raises as lent()."""
        async with self.lent(name):
            pass

    def begin(self, name: str) -> None:
        """Begin to load a model, for nobody. A failure is told by events and status()."""
        self._entry(name)
        assert self._group is not None
        self._group.start_soon(self._loaded_for_nobody, name)

    def unload(self, name: str) -> None:
        """
        Have a model leave as soon as no claim runs on it.

        A load is ended, and those who wait for it get ModelUnavailable.
        """
        entry = self._entry(name)
        if entry.resident.state is ModelState.LOADING:
            error = ModelUnavailable(name, "it was unloaded while it was loading", 1.0)
            self._end(self._residency.dismiss(name), error)
            if entry.scope is not None:
                entry.scope.cancel()
        self._let_go(entry)
        self._turn()

    # -- the block ----------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._watch)
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        group = self._group
        assert group is not None
        group.cancel_scope.cancel()
        try:
            return await group.__aexit__(*error)
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        finally:
            await self.aclose()

    def refuse(self) -> None:
        """Take no more claims, and end those that wait; those that run go on."""
        self._closed = True
        error = ClosedError("the models are closed: make another cache")
        for entry in self._entries.values():
            self._end(self._residency.dismiss(entry.name), error)
            if entry.scope is not None:
                entry.scope.cancel()
        self._changed.set()

    async def aclose(self, drain_s: float = 0.0) -> None:
        """
        Close all runners; can be repeated.

        Args:
            drain_s: seconds that claims which run have to end before that.
        """
        wait_s = checked_wait("drain_s", drain_s)
        self.refuse()
        with anyio.move_on_after(wait_s):
            while any(e.resident.n_running for e in self._entries.values()):
                self._released = anyio.Event()
                await self._released.wait()
        entries = [*self._entries.values()]
        with CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for entry in entries:
                    group.start_soon(self._close, entry)

    # -- inside ---------------------------------------------------------------------

    def _insert(self, entry: _Entry) -> None:
        self._entries[entry.name] = entry
        self._residency.add(entry.resident)

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name) if name in self else None
        if entry is None:
            has = ", ".join(self) or "none"
            raise ModelNotFound(name, f"there is no such model: there are {has}")
        return entry

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the models are closed: make another cache")
        if self.is_dynamic and self._group is None:
            raise WrongUse("use `async with` on the cache of models first")

    def _check_bytes(self, n_bytes: int) -> None:
        """Raise QueueFull if those that wait have too many bytes with these, which are counted."""
        limit, n_all = self._max_bytes, self._n_bytes
        if limit is not None and n_all > limit and n_all > n_bytes:
            raise QueueFull("max_waiting_bytes", n_all, limit)

    def _describe(self, entry: _Entry, model: CachedModel) -> None:
        resident, entry.model = entry.resident, model
        resident.is_pinned = model.is_pinned
        resident.sleep_s, resident.unload_s = model.sleep_s, model.unload_s

    def _check_rest(self, entry: _Entry) -> None:
        """Raise ModelUnavailable while a model rests after a failure."""
        rest_s = entry.resident.retry_at - self._clock()
        if rest_s > 0:
            raise _unavailable(entry, entry.error, rest_s)

    async def _check_health(self, entry: _Entry) -> None:
        """Have a runner that is not well leave, which a claim then loads anew."""
        now, runner = self._clock(), entry.runner
        # A client may know by the end of its request, before _follow() does.
        if runner is not None and runner.has_ended:
            self._died(entry, runner, await runner.death())
            return
        if now - entry.checked_at < self._health_s or runner is None:
            return
        entry.checked_at = now
        health = await runner.health()
        is_well = health.ready or health.is_idle
        if not is_well and entry.runner is runner and self.is_dynamic:
            logger.warning("%s is loaded anew: %s", entry.name, health.detail)
            self._residency.unload(entry.name)

    async def _size(self, entry: _Entry) -> None:
        """Ask the runner of a model what it takes."""
        async with entry.sizing:
            if entry.is_sized or self._entries.get(entry.name) is not entry:
                return
            self._check_open()
            self._check_rest(entry)
            failure, memory, runner = None, RunnerMemory({}), entry.runner
            scope = entry.scope = CancelScope()
            try:
                with scope:
                    if runner is None:
                        make = entry.model.make
                        runner = make(partial(setattr, entry, "progress"))
                        entry.runner = runner
                    memory = await runner.memory()
            except Exception as error:  # noqa: BLE001 - whatever a runner raises
                failure = error
            finally:
                entry.scope = None
            # It is closed, or has another list of models: who wants this one looks again.
            if scope.cancelled_caught:
                return
            # The list became another one meanwhile: this is the size of a model that is gone.
            if entry.runner is not runner or entry is not self._entries.get(entry.name):
                return
            if failure is not None:
                entry.runner = None
                raise self._failed(entry, failure) from failure
            self._set_size(entry.resident, memory)
            entry.is_sized = True

    def _set_size(self, resident: Resident, memory: RunnerMemory) -> None:
        resident.need = {**memory.loaded, MODELS: 1}
        resident.parked = memory.asleep or {}
        if memory.asleep is None:
            resident.sleep_s = inf

    def _failed(self, entry: _Entry, error: Exception) -> ModelUnavailable:
        """Take in that a model cannot be loaded now."""
        logger.error("%s cannot be loaded: %s", entry.name, error, exc_info=error)
        entry.error = PyllamaError(f"{type(error).__name__}: {error}")
        if isinstance(error, PyllamaError):
            entry.error = error
        now = self._clock()
        claims = self._residency.failed(entry.name, now)
        failure = _unavailable(entry, error, entry.resident.retry_at - now)
        failure.__cause__ = error
        self._end(claims, failure)
        self.tell(ModelEvent(entry.name, entry.resident.state, entry.error))
        return failure

    def _end(self, claims: tuple[Claim, ...], error: PyllamaError) -> None:
        """End the waits of *claims* with *error*."""
        for claim in claims:
            if (wait := self._waits.get(claim)) is not None:
                wait.error = error
                wait.over.set()

    def _let_go(self, entry: _Entry) -> None:
        self._residency.unload(entry.name)
        if entry.resident.state is ModelState.UNLOADED:
            self._settle(entry)

    def _settle(self, entry: _Entry) -> None:
        """Make of a model that has left what it is to be."""
        if entry.is_removed and entry.resident.is_idle:
            self._residency.forget(entry.name)
            del self._entries[entry.name]
        elif entry.successor is not None:
            self._describe(entry, entry.successor)
            entry.successor, entry.runner, entry.is_sized = None, None, False
            entry.error, entry.resident.retry_at = None, -inf
            # Nobody knows yet what it takes: who waits for it asks that first.
            for claim in self._residency.dismiss(entry.name):
                self._waits[claim].over.set()

    def tell(self, event: ModelEvent) -> None:
        """Tell all readers of a change."""
        for reader in self._readers:
            with suppress(anyio.WouldBlock):
                reader.send_nowait(event)

    def _turn(self) -> None:
        """Do what is to be done now."""
        if self._closed:
            return
        turn = self._residency.decide(self._clock())
        for claim in turn.run:
            if (wait := self._waits.get(claim)) is not None:
                wait.over.set()
        for name, move in turn.moves:
            entry = self._entries[name]
            assert self._group is not None
            if move is Move.LOAD:
                self.tell(ModelEvent(name, ModelState.LOADING))
                self._group.start_soon(self._load, entry)
            else:
                self._group.start_soon(self._part, entry, move)
        self._changed.set()

    async def _watch(self) -> None:
        """Look again when time alone changes what is to be done."""
        while not self._closed:
            self._changed = anyio.Event()
            now = self._clock()
            with anyio.move_on_after(self._residency.next_time(now) - now) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                self._turn()

    async def _loaded_for_nobody(self, name: str) -> None:
        try:
            await self.load(name)
        except ModelTooLarge as error:  # of which no load has told, as there was none
            entry = self._entry(name)
            entry.error = error
            self.tell(ModelEvent(name, entry.resident.state, error))
        except PyllamaError:
            pass

    async def _load(self, entry: _Entry) -> None:
        """Load or wake a model."""
        name, began, resident = entry.name, self._clock(), entry.resident
        is_asleep, entry.progress = resident.sleeps, 0.0
        error: Exception | None = None
        with CancelScope() as entry.scope:
            if not resident.waiting:  # they left before it began
                entry.scope.cancel()
            try:
                if entry.runner is None:
                    entry.runner = entry.model.make(partial(setattr, entry, "progress"))
                await (entry.runner.wake() if is_asleep else entry.runner.start())
            except Exception as failure:  # noqa: BLE001 - whatever a runner raises
                error = failure
        is_cancelled, entry.scope = entry.scope.cancelled_caught, None
        # A runner that could not start is of no use; one that sleeps on may be woken later.
        if (error is not None or is_cancelled) and not is_asleep:
            await self._close(entry)
        if error is not None:
            self._failed(entry, error)
        elif is_cancelled:
            self._residency.gave_up(name)
            self.tell(ModelEvent(name, resident.state))
        else:
            now = self._clock()
            entry.checked_at, entry.error = now, None
            self._residency.loaded(name, now, now - began)
            logger.info("%s is loaded after %.2f s", name, now - began)
            self.tell(ModelEvent(name, ModelState.LOADED))
            if not is_asleep and self._group is not None:
                self._group.start_soon(self._follow, entry)
        if resident.state is ModelState.UNLOADED:
            self._settle(entry)
        self._turn()

    async def _follow(self, entry: _Entry) -> None:
        """Have a model leave whose runner has ended by itself."""
        runner = entry.runner
        if runner is not None:
            self._died(entry, runner, await runner.death())

    def _died(
        self, entry: _Entry, runner: ModelRunner, death: PyllamaError | None
    ) -> None:
        """Take in once that the process of *runner* has ended."""
        if death is None or entry.runner is not runner or entry.dead is runner:
            return
        entry.dead, entry.error = runner, death
        logger.error("%s is gone: %s", entry.name, death)
        self._describe(
            entry, entry.model
        )  # it may sleep again, if a sleep has failed by this
        self._residency.died(entry.name, self._clock())
        self._turn()

    async def _part(self, entry: _Entry, move: Move) -> None:
        """Unload a model, or put it to sleep."""
        name = entry.name
        if move is Move.SLEEP and entry.runner is not None:
            try:
                await entry.runner.sleep()
            except Exception as error:  # noqa: BLE001 - whatever a runner raises
                logger.warning("%s stays awake: %s", name, error)
                self._residency.stayed(name)
            else:
                self._residency.gone(name, asleep=True)
                self.tell(ModelEvent(name, ModelState.SLEEPING))
        else:
            await self._close(entry)
            self._residency.gone(name)
            logger.info("%s is unloaded", name)
            self.tell(ModelEvent(name, ModelState.UNLOADED, entry.error))
            try:
                self._evicted(name)
            except Exception:
                logger.exception("evicted(%r) failed", name)
            self._settle(entry)
        self._turn()

    async def _close(self, entry: _Entry) -> None:
        """Close the runner of a model, which then has none."""
        runner, entry.runner = entry.runner, None
        if runner is not None:
            with CancelScope(shield=True):
                try:
                    await runner.aclose()
                except Exception:
                    logger.exception("%s could not be closed", entry.name)


def _there(runner: ModelRunner, _: Callable[[float], object]) -> ModelRunner:
    """Make nothing: the runner is there."""
    return runner


def _unavailable(
    entry: _Entry, error: Exception | None, rest_s: float
) -> ModelUnavailable:
    code = error.code if isinstance(error, PyllamaError) else type(error).__name__
    reason = (
        f"it could not be loaded ({code}), and may be tried again in {rest_s:.0f} s"
    )
    return ModelUnavailable(entry.name, f"{reason}: the log says why", max(rest_s, 1.0))
