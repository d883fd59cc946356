"""
The life of an engine: warm-up, sleep, reload, and a context that is made anew.

One of these verbs runs at a time. An engine that is not awake has its callers wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal
from weakref import ref

import anyio

from pyllama_raw.api.loading import Progress, Report, load
from pyllama_raw.api.model import Model, parts_of, release
from pyllama_raw.api.vector_verbs import VectorVerbs
from pyllama_raw.engine.engine_state import EngineState
from pyllama_raw.errors import PyllamaError, WrongUse
from pyllama_raw.options.arguments import (
    check_opening,
    checked_number,
    checked_text,
)

if TYPE_CHECKING:  # the rest comes in while a model loads
    from pyllama_raw.api.session import Session, Sessions
    from pyllama_raw.api.supervisor import Supervisor
    from pyllama_raw.engine.adapters import AdapterInfo
    from pyllama_raw.engine.kept import Kept
    from pyllama_raw.engine.life import Life
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.options.config import EngineConfig
    from pyllama_raw.options.requests import Need

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opener:
    """The arguments that an engine was opened with."""

    model: str | Path | Model | None
    config: EngineConfig | None
    needs: Need | None

    def parts(self, report: Report, *, kept: Kept | None = None) -> EngineParts:
        """Load the model; *kept* is there of earlier parts. Thread: a worker."""
        return parts_of(self.model, self.config, self.needs, report, kept)


class LifeVerbs(VectorVerbs):
    """An engine as far as its model and its context come and go."""

    def __init__(self, sessions: Sessions, source: Opener | None) -> None:
        super().__init__(sessions)
        self._source = source  # None: the parts were made by somebody else
        self._kept: Kept | None = None  # while the weights are freed
        self._changes = Lock()  # held while one of these verbs runs
        self._supervisor = _supervisor_of(self)
        if source is not None:
            self._supervisor.watch(sessions.current)

    async def warmup(self) -> None:
        """
        Compute a micro-batch of a prompt, and a token for each slot.

        So the first request waits for nothing that a device does once, such as loading
        kernels. Nothing of it stays in the cache or in counts. Requests that run wait for it.

        Raises:
            WrongUse: the engine sleeps, or another of these verbs runs.
            NativeError: a decode has failed; what runs is computed again.
            ClosedError, EngineStopped: as generate().
        """
        with self._changing("warmup()"):
            await self._in_engine(lambda life: life.warm_up())

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """
        Free memory of devices until wake(); can be repeated.

        Level 1 frees the context. Requests that run stop where they are, and go on after
        wake(). Level 2 frees the weights, too, unless other engines or a Model have them, and
        first waits for the requests that run. What the context held is in host memory
        meanwhile, so chats go on as if nothing had been.

        Requests that come wait. They end by their `deadline_s`, and do not wake the engine,
        because somebody may need its memory.

        Raises:
            InvalidRequest: there is no such level.
            SnapshotFailed, MemoryError: host memory is short; the engine goes on.
            WrongUse: another of these verbs runs, or requests of a level 1 keep the weights.
            ClosedError, EngineStopped: as generate().
        """
        level_now = checked_number("level", level, 1, 2)
        with self._changing("sleep()"):
            if self._kept is not None:
                return
            if level_now == 1:
                await self._in_engine(lambda life: life.sleep())
            else:
                await self._sleep_deeply()

    async def _sleep_deeply(self) -> None:
        from pyllama_raw.api.workers import arrival_of

        sessions, thread = self._sessions, self._thread
        if self._source is None:
            raise WrongUse(
                "an engine that was made of parts cannot load its weights again: give "
                "sleep() the level 1, or open it by AsyncEngine.open()"
            )
        if sessions.state is EngineState.SLEEPING and thread.opened:
            raise WrongUse(
                "requests of this engine stopped where they are when it fell asleep, and "
                "need its weights: wake() it, and call sleep(2) then"
            )
        try:
            await sessions.pause()
            await self._until_quiet()
            for session in sessions.all:  # earlier ones have weights, too
                if session is not sessions.current:
                    await arrival_of(session.thread.gone)
            await self._in_engine(lambda life: life.sleep())
            await self._in_engine(lambda _: None)  # the sleep is told before this
        except BaseException:
            sessions.resume()
            raise
        self._kept = self._taken()
        sessions.note(EngineState.SLEEPING)
        await _ended(sessions.current)

    def _taken(self) -> Kept:
        """Things that the next session has of the current one, which sleeps."""
        from pyllama_raw.engine.kept import Kept, KeptMemory
        from pyllama_raw.engine.logs import NO_LOGS

        parts, config = self._parts, self._sessions.current.info.config
        memory = KeptMemory(
            parts.scheduler,
            self._thread.loop.life.take_memory(),
            parts.span_keys,
            parts.model_files,
            config,
        )
        return Kept(parts.logs.share() or NO_LOGS, config.log, memory)

    async def _until_quiet(self) -> None:
        from pyllama_raw.api.workers import arrival_of

        if self._sessions.state is not EngineState.SLEEPING:
            await arrival_of(self._thread.quiet())

    async def wake(self) -> None:
        """
        Have the engine go on after sleep(); can be repeated.

        Requests that ran go on, and cached prefixes are there. After a sleep of level 2 the
        weights are loaded again; if the file is another one by now, its weights are, and no
        prefix is there.

        Raises:
            ModelLoadFailed, ContextFailed, NativeError: it sleeps on, and can be woken later.
            WrongUse: another of these verbs runs.
            ClosedError, EngineStopped: as generate().
        """
        with self._changing("wake()"):
            kept, source = self._kept, self._source
            if kept is None or source is None:
                await self._in_engine(lambda life: life.wake())
                return
            sessions = self._sessions
            sessions.tell(EngineState.LOADING)
            try:
                session = await self._opened(source, kept, None)
                woken = await self._replace(session)
            except BaseException:
                sessions.tell(EngineState.SLEEPING)
                raise
            await _until_awake(woken)

    async def reload(
        self,
        model: str | Path | Model | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        """
        Serve another model, or the same with other options, and fail no request.

        The new one is loaded beside the old one, which takes requests meanwhile. Requests
        that come afterwards get the new one. Those that came before are done by the old one,
        whose memory is free once the last of them has ended. Adapters are loaded for the new
        one, too. Statistics begin anew.

        Where both do not fit the memory, call sleep(2) first: requests then wait until the
        new one is there.

        Args:
            model: as of open(); None: the same, with what its file has now.
            config: as of open(); None: the same.
            progress: as of open().

        Raises:
            ConfigError, ClosedError, ModelLoadFailed, ContextFailed, Unsupported: as open();
                the old one goes on.
            AdapterLoadFailed, AdapterLimit: an adapter is of no use to the new one; likewise.
            WrongUse: another of these verbs runs, or the engine sleeps at level 1.
        """
        with self._changing("reload()"):
            self._sessions.check_open()
            source = self._changed(model, config, progress)
            kept = self._kept
            if kept is None:
                if self.state is EngineState.SLEEPING:
                    raise WrongUse("the engine sleeps: wake() it before reload()")
                kept = _logs_of(self._sessions.current)
            session = await self._opened(source, kept, progress, is_strict=True)
            woken = await self._replace(session)
            self._source = source
            await _until_awake(woken)

    def _changed(
        self,
        model: str | Path | Model | None,
        config: EngineConfig | None,
        progress: Progress | None,
    ) -> Opener:
        """The source that there will be. Raises ConfigError, WrongUse."""
        path = None if isinstance(model, Model) else model
        before = self._source
        needs = None if before is None else before.needs
        check_opening(path, config, progress, needs)
        if before is None:
            if model is None:
                raise WrongUse(
                    "an engine that was made of parts has no model: give one"
                )
            return Opener(model, config, needs)
        return Opener(model or before.model, config or before.config, needs)

    async def _opened(
        self,
        source: Opener,
        kept: Kept,
        progress: Progress | None,
        *,
        is_strict: bool = False,
    ) -> Session:
        """As _make(), in a worker thread; cancellation ends the loading itself."""
        make = partial(self._make, source, kept, is_strict=is_strict)
        return await load(make, progress, _end)

    def _make(
        self, source: Opener, kept: Kept, report: Report, *, is_strict: bool = False
    ) -> Session:
        """
        Open a session that nobody uses yet, with the adapters of the current one. It blocks.

        Args:
            is_strict: an adapter that cannot be loaded is an error.
        """
        adapters, parts = self.adapters(), source.parts(report, kept=kept)
        try:
            session = self._sessions.make(parts)
        except BaseException:
            release(parts)
            raise
        try:
            for each in adapters:
                _load_adapter(session, each, is_strict=is_strict)
        except BaseException:
            _end(session).result()
            raise
        self._supervisor.watch(session)
        return session

    async def _replace(self, session: Session) -> Future[None]:
        """
        Have *session* serve; it ends, if the engine was closed meanwhile.

        Until then it sleeps, if it has the scheduler of a session before it: what both know of
        slots must be true as long as another try may follow.

        Returns:
            Answered when it is awake, which comes before all that is asked of it.
        """
        try:
            woken = session.thread.call(session.thread.loop.life.wake)
            self._sessions.replace(session)
        except BaseException:
            await _ended(session)
            raise
        self._forget()
        self._sessions.resume()
        return woken

    def _remake(self, session: Session) -> None:
        """Have another session in place of *session*, which has ended by itself. It blocks."""
        from pyllama_raw.engine.kept import Kept

        with self._changes:
            sessions, source = self._sessions, self._source
            if source is None or session is not sessions.current:
                return
            parts = session.parts
            kept = Kept(parts.logs, session.info.config.log, restarts=parts.restarts)
            other = self._make(source, kept, lambda _: True)
            try:
                sessions.replace(other)
            except BaseException:
                _end(other).result()
                raise
            sessions.resume()

    async def rebuild_session(self, cause: str) -> None:
        """
        Make the context anew, between two steps; weights and host snapshots stay.

        Requests that run are computed again, from snapshots where there are some, and give
        the tokens they would have given.

        Args:
            cause: for the log.

        Raises:
            InvalidRequest: *cause* is no text.
            WrongUse: the engine sleeps, or another of these verbs runs.
            ContextFailed, NativeError: there is no context. It is made by the next step, or
                the engine ends.
            ClosedError, EngineStopped: as generate().
        """
        said = checked_text("cause", cause)
        with self._changing("rebuild_session()"):
            await self._in_engine(lambda life: life.rebuild(said))

    async def _in_engine(self, verb: Callable[[Life], None]) -> None:
        """Have the engine thread call *verb* between two steps."""
        from pyllama_raw.api.workers import answer_of

        thread = self._thread
        if self._kept is not None:
            raise WrongUse("the engine sleeps: wake() it first")
        await answer_of(thread.call(partial(verb, thread.loop.life)))

    def _forget(self) -> None:
        """Nothing is kept for a later session."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.logs.close()

    @contextmanager
    def _changing(self, verb: str) -> Iterator[None]:
        if not self._changes.acquire(blocking=False):
            raise WrongUse(
                f"{verb} was called while another task changes the engine: one of warmup, "
                "sleep, wake, reload and rebuild_session runs at a time; wait for it"
            )
        try:
            yield
        finally:
            self._changes.release()


def _supervisor_of(engine: LifeVerbs) -> Supervisor:
    """A supervisor that does not keep *engine*."""
    from pyllama_raw.api.supervisor import Supervisor

    found = ref(engine)

    def remake(session: Session) -> None:
        if (engine := found()) is not None:
            engine._remake(session)

    return Supervisor(engine._sessions, remake)


def _load_adapter(session: Session, known: AdapterInfo, *, is_strict: bool) -> None:
    try:
        session.thread.adapters.load(known.name, known.path)
    except PyllamaError as error:
        if is_strict:
            raise
        _log.warning("the adapter %r is gone: %s", known.name, error)


def _end(session: Session) -> Future[None]:
    """End *session*, which nobody uses."""
    session.thread.loop.is_replaced = True
    session.thread.close()
    return session.thread.gone


async def _ended(session: Session) -> None:
    from pyllama_raw.api.workers import arrival_of

    with anyio.CancelScope(shield=True):
        await arrival_of(_end(session))


async def _until_awake(woken: Future[None]) -> None:
    """Wait for the answer of _replace(), which nobody takes back."""
    from pyllama_raw.api.workers import arrival_of

    await arrival_of(woken)
    woken.result()


def _logs_of(session: Session) -> Kept:
    from pyllama_raw.engine.kept import Kept

    return Kept(session.parts.logs, session.info.config.log)
