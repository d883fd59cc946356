"""
Sessions: a model that is loaded, and all that serves it, and how one follows another.

`Sessions` owns what an engine is beyond one thread: which session serves callers, whether they
wait, and the state of the engine while no thread runs. What a thread is doing is its own
(engine/life.py).

Rules:
1. A request belongs to one session, from its preparation to its end.
2. A session that was replaced takes no new callers, and ends when it has neither a caller nor
   a request.
3. Watchers are told of all sessions. What becomes of the engine is told of the latest one.
4. While there is no session that runs, callers wait, as many as may wait in an engine.
5. One verb of life runs at a time: warm-up, sleep, wake, reload, rebuild. So does a restart.
6. An exception of the executor does not end a session. An engine thread that ends otherwise is
   replaced by another session, as many times as options allow; its requests have ended with
   EngineStopped. Whoever closes or reloads the engine meanwhile is obeyed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import count
from logging import getLogger
from math import inf
from pathlib import Path
from threading import Event, Lock, RLock, Thread
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import anyio

from pyllama_raw.api.batches import Branches
from pyllama_raw.api.embedding import Embedder
from pyllama_raw.api.model import Model, Opener, Progress, Report, load, release
from pyllama_raw.api.preparation import Preparation
from pyllama_raw.api.results import EngineStats
from pyllama_raw.engine.info import Capabilities, EngineInfo, EngineState
from pyllama_raw.engine.life import RETRY_S, Life
from pyllama_raw.engine.logs import NO_LOGS
from pyllama_raw.engine.mailbox import Workers, answer_of, arrival_of, check_may_wait
from pyllama_raw.engine.parts import EngineParts, Inheritance, KeptMemory
from pyllama_raw.engine.thread import EngineThread
from pyllama_raw.engine.watcher import Watcher, Watchers
from pyllama_raw.errors import (
    ClosedError,
    DeadlineExceeded,
    PyllamaError,
    QueueFull,
    WaitedTooLong,
    WrongUse,
)
from pyllama_raw.options.arguments import check_opening
from pyllama_raw.prompts.chat import are_printed
from pyllama_raw.prompts.prompt import PromptEncoder

if TYPE_CHECKING:
    from pyllama_raw.options.config import EngineConfig
    from pyllama_raw.options.requests import TextOptions

T = TypeVar("T")

NO_LIMITS: TextOptions = {}

_log = getLogger(__name__)


class Session:
    """Parts of an engine that run."""

    def __init__(
        self, parts: EngineParts, workers: Workers, request_ids: Iterator[int]
    ) -> None:
        self.encoder = encoder = PromptEncoder.of(parts)
        self.parts = parts
        self.thread = EngineThread(parts, encoder.close)
        self.preparation = Preparation(
            parts, encoder, self.thread, workers, request_ids
        )
        self._workers, self._request_ids = workers, request_ids
        self.embedder = Embedder(parts, encoder, self.thread, workers, request_ids)
        self.n_callers = 0  # that may still submit requests

    @cached_property
    def branches(self) -> Branches:
        """The maker of requests of continuations."""
        return Branches(self.parts, self.encoder, self._workers, self._request_ids)

    @cached_property
    def info(self) -> EngineInfo:
        """See Facts.info."""
        return self.parts.describe()

    @cached_property
    def capabilities(self) -> Capabilities:
        """See Facts.capabilities. The template is asked when somebody reads `prints_tools`."""
        tried = partial(
            are_printed, self.parts.chat_template, self.parts.template_process
        )
        return replace(self.parts.capabilities, prints_tools=tried)

    def end(self) -> Future[None]:
        """End a session that nobody uses, and that says no more of the engine."""
        self.thread.silence()
        self.thread.close()
        return self.thread.gone

    async def ended(self) -> None:
        """As end(); returns when its memory is free, also if the caller is cancelled."""
        with anyio.CancelScope(shield=True):
            await arrival_of(self.end())


class Sessions:
    """The session of an engine, and those before it that have not ended. Thread: any."""

    def __init__(self, parts: EngineParts, source: Opener | None = None) -> None:
        """
        Args:
            source: opens the sessions that follow; None: the parts were made by somebody else.
        """
        if not isinstance(parts, EngineParts):
            raise TypeError(
                "use AsyncEngine.open(model, config) in an `async with` block"
            )
        self.workers = Workers()
        self._request_ids = count(1)
        self._source = source
        self._lock = RLock()  # a finaliser can leave where the lock is held
        self._changes = Lock()  # held while a verb of life runs
        self._closed = Event()  # wakes a thread that waits to restart the engine
        self._old = set[Session]()
        self._watchers: list[Watcher] = []
        self._state: EngineState | None = None  # while no session runs
        self._inheritance: Inheritance | None = (
            None  # of the session before, while the weights are freed
        )
        self._pause: Future[None] | None = None  # answered when callers may go on
        self._why_paused = ""  # for whoever waited for that too long
        self._n_waiting = 0  # for that
        self._unused: Future[None] | None = None  # answered when no caller is left
        self._n_mended = 0  # of earlier sessions
        try:
            self.current = self._make(parts)
        except BaseException:
            self.workers.close()
            raise

    def _make(self, parts: EngineParts) -> Session:
        """A session that nobody uses yet."""
        session = Session(parts, self.workers, self._request_ids)
        session.thread.is_survived = partial(self._survives, session)
        return session

    @property
    def state(self) -> EngineState:
        """The state of the engine."""
        return self._state or self.current.thread.state

    @property
    def n_mended(self) -> int:
        """Chats that their template took only changed."""
        return self._n_mended + self.current.encoder.n_mended

    def stats(self, queue_s: float | None) -> EngineStats:
        """See Facts.stats."""
        session = self.current
        parts, thread = session.parts, session.thread
        # The formula stays what it is: asdict() would make a dict of it.
        cost = thread.stats.step_cost
        counts, times = asdict(thread.stats), asdict(parts.executor.times)
        del counts["step_cost"]
        media = {} if parts.media is None else asdict(parts.media.encoder.stats)
        return EngineStats(
            **counts,
            **times,
            **media,
            state=self.state,
            step_cost=cost,
            watcher_faults=thread.driver.watchers.n_faults,
            relaxed_schemas=session.preparation.n_relaxed,
            mended_chats=self.n_mended,
            queue_s=queue_s,
            products={} if parts.watch is None else parts.watch.products,
        )

    @property
    def all(self) -> list[Session]:
        """Sessions that have not ended, and the latest one."""
        with self._lock:
            return [*self._old, self.current]

    # -- callers ---------------------------------------------------------------------------

    @asynccontextmanager
    async def session(self, limits: TextOptions = NO_LIMITS) -> AsyncIterator[Session]:
        """
        The session for one caller, which ends after the caller has left.

        Args:
            limits: seconds that the caller may wait for one.

        Raises:
            ClosedError, EngineStopped, QueueFull.
            DeadlineExceeded, WaitedTooLong: no session ran until then.
        """
        check_may_wait()
        if not self.current.thread.is_ours:  # a fork, where nobody lets go of the lock
            self.current.thread.check()
        # One more caller of the session, unless callers wait for another one.
        session = None
        with self._lock:
            if self._pause is None:
                session = self.current
                session.n_callers += 1
        if session is None:
            session = await self._wait(limits)
        try:
            session.thread.check()
            yield session
        finally:
            # The last caller of a session that was replaced ends it; a verb of life may wait
            # for the last one of the current session.
            with self._lock:
                session.n_callers -= 1
                is_last = not session.n_callers
                if is_last and session is not self.current:
                    session.thread.close(drains=True)
                elif is_last and self._unused is not None:
                    self._unused.set_result(None)
                    self._unused = None

    def _enter(self) -> Session | None:
        with self._lock:
            if self._pause is not None:
                return None
            self.current.n_callers += 1
            return self.current

    async def _wait(self, limits: TextOptions) -> Session:
        limit = self.current.parts.admission.max_waiting
        with self._lock:
            if self._n_waiting >= limit:
                raise QueueFull("max_waiting", self._n_waiting + 1, limit)
            self._n_waiting += 1
        try:
            deadline_s, max_wait_s = limits.get("deadline_s"), limits.get("max_wait_s")
            seconds = [s for s in (deadline_s, max_wait_s) if s is not None]
            with anyio.move_on_after(min(seconds, default=inf)):
                while True:
                    if (pause := self._pause) is not None:
                        await arrival_of(pause)
                    if (session := self._enter()) is not None:
                        return session
        finally:
            with self._lock:
                self._n_waiting -= 1
        if max_wait_s is not None and (deadline_s is None or max_wait_s < deadline_s):
            raise WaitedTooLong("max_wait_s", max_wait_s, max_wait_s)
        raise DeadlineExceeded(0, 1, f"requests had begun, because {self._why_paused}")

    def _hold(self, why: str) -> None:
        """Let callers wait from now on; *why* they did, for those whose time is over."""
        with self._lock:
            if not self._closed.is_set():
                self._pause, self._why_paused = self._pause or Future(), why

    def _resume(self) -> None:
        """Let callers go on."""
        with self._lock:
            pause, self._pause = self._pause, None
        if pause is not None:
            pause.set_result(None)

    # -- watchers, and what they are told -----------------------------------------------------

    def watch(self, watcher: Watcher) -> Future[None]:
        """See Facts.watch."""
        if not self.current.thread.is_ours:
            self.current.thread.check()
        with self._lock:
            if self._state is None:
                beginning = self.current.thread.watch(watcher)
            else:
                beginning = Future()
                Watchers([watcher]).engine(self._state, self.current.thread.clock())
                beginning.set_result(None)
            self._watchers.append(watcher)
            return beginning

    def unwatch(self, watcher: Watcher) -> None:
        """See Facts.unwatch."""
        with self._lock:
            self._watchers = [other for other in self._watchers if other is not watcher]
        for session in self.all:
            session.thread.unwatch(watcher)

    def _note(self, state: EngineState) -> None:
        """Have *state* while no session runs. Watchers know of it."""
        with self._lock:
            is_last = state.has_ended or self._closed.is_set()
            self._state = None if is_last else state

    def _tell(self, state: EngineState) -> None:
        """As _note(), and tell the watchers."""
        with self._lock:
            if not self._closed.is_set():
                self._note(state)
                Watchers(self._watchers).engine(state, self.current.thread.clock())

    # -- verbs of life -------------------------------------------------------------------------

    async def warm_up(self) -> None:
        """See AsyncEngine.warmup."""
        with self._changing("warmup()"):
            await self._in_engine(lambda life: life.warm_up())

    async def rebuild(self, cause: str) -> None:
        """See AsyncEngine.rebuild_session."""
        with self._changing("rebuild_session()"):
            await self._in_engine(lambda life: life.rebuild(cause))

    async def sleep(self, level: int) -> None:
        """See AsyncEngine.sleep."""
        with self._changing("sleep()"):
            if self._inheritance is not None:  # there are no weights
                return
            if level == 1:
                await self._free_context()
            else:
                await self._sleep_without_weights()

    async def _free_context(self) -> None:
        """Have the context freed. Who leaves meanwhile leaves the engine as it was."""
        was_asleep, thread = self.state is EngineState.SLEEPING, self.current.thread
        try:
            await self._in_engine(lambda life: life.sleep())
            await self._in_engine(lambda _: None)  # the sleep is told before this
        except BaseException:
            # The engine thread may be at it, and nobody would know that it sleeps.
            if not was_asleep:
                with suppress(PyllamaError):
                    thread.call(thread.life.wake)
            raise

    async def _sleep_without_weights(self) -> None:
        session = self.current
        if self._source is None:
            raise WrongUse(
                "an engine that was made of parts cannot load its weights again: give "
                "sleep() the level 1, or open it by AsyncEngine.open()"
            )
        if self.state is EngineState.SLEEPING and session.thread.records:
            raise WrongUse(
                "requests of this engine stopped where they are when it fell asleep, and "
                "need its weights: wake() it, and call sleep(2) then"
            )
        try:
            # Nobody comes any more, and those who are there have gone.
            with self._lock:
                self._check_open()
                self._hold("the engine slept")
                if session.n_callers:
                    self._unused = self._unused or Future()
                unused = self._unused if session.n_callers else None
            if unused is not None:
                await arrival_of(unused)
            if self.state is not EngineState.SLEEPING:
                await arrival_of(session.thread.quiet())
            # Earlier sessions have weights, too.
            for other in self.all:
                if other is not session:
                    await arrival_of(other.thread.gone)
            await self._free_context()
        except BaseException:
            self._resume()
            raise
        # The next session has the memory of this one, which ends.
        parts, config = session.parts, session.info.config
        memory = KeptMemory(
            parts.scheduler,
            session.thread.life.take_memory(),
            parts.span_keys,
            parts.model_files,
            config,
        )
        self._inheritance = Inheritance(
            parts.logs.share() or NO_LOGS, config.log, memory
        )
        self._note(EngineState.SLEEPING)
        await session.ended()

    async def wake(self) -> None:
        """See AsyncEngine.wake."""
        with self._changing("wake()"):
            if self._inheritance is None or self._source is None:
                await self._in_engine(lambda life: life.wake())
                return
            self._tell(EngineState.LOADING)
            try:
                session = await self._opened(self._source, self._inheritance, None)
                awake = await self._replace(session)
            except BaseException:
                self._tell(EngineState.SLEEPING)
                raise
            # Its weights are there: who leaves now leaves an engine that is awake, and knows it.
            with anyio.CancelScope(shield=True):
                await arrival_of(awake)
            awake.result()

    async def reload(
        self,
        model: str | Path | Model | None,
        config: EngineConfig | None,
        progress: Progress | None,
    ) -> None:
        """See AsyncEngine.reload."""
        with self._changing("reload()"):
            self._check_open()
            path = None if isinstance(model, Model) else model
            before = self._source or Opener(None, None, None)
            check_opening(path, config, progress, before.needs)
            if model is None and self._source is None:
                raise WrongUse(
                    "an engine that was made of parts has no model: give one"
                )
            source = Opener(
                model or before.model, config or before.config, before.needs
            )
            inheritance = self._inheritance
            if inheritance is None:
                if self.state is EngineState.SLEEPING:
                    raise WrongUse("the engine sleeps: wake() it before reload()")
                session = self.current
                inheritance = Inheritance(session.parts.logs, session.info.config.log)
            session = await self._opened(source, inheritance, progress, is_strict=True)
            awake = await self._replace(session)
            self._source = source
            await arrival_of(awake)
            awake.result()

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

    async def _in_engine(self, verb: Callable[[Life], None]) -> None:
        """Have the engine thread call *verb* between two steps."""
        if self._inheritance is not None:
            raise WrongUse("the engine sleeps: wake() it first")
        thread = self.current.thread
        await answer_of(thread.call(partial(verb, thread.life)))

    async def between_steps(self, function: Callable[[EngineParts], T]) -> T:
        """The answer of *function*, which the engine thread calls."""
        session = self.current
        if self._inheritance is not None:  # there is no thread, and so no step
            return function(session.parts)
        return await answer_of(session.thread.call(partial(function, session.parts)))

    # -- one session after the other -----------------------------------------------------------

    async def _opened(
        self,
        source: Opener,
        inheritance: Inheritance,
        progress: Progress | None,
        *,
        is_strict: bool = False,
    ) -> Session:
        """As _open(), in a worker thread; cancellation ends the loading itself."""
        make = partial(self._open, source, inheritance, is_strict=is_strict)
        return await load(make, progress, Session.end)

    def _open(
        self,
        source: Opener,
        inheritance: Inheritance,
        report: Report,
        *,
        is_strict: bool = False,
    ) -> Session:
        """
        Open a session that nobody uses yet, with the adapters of the current one. It blocks.

        Args:
            is_strict: an adapter that cannot be loaded is an error.
        """
        adapters = self.current.thread.adapters.all()
        parts = source.parts(report, inheritance=inheritance)
        try:
            session = self._make(parts)
        except BaseException:
            release(parts)
            raise
        try:
            for adapter in adapters:
                try:
                    session.thread.adapters.load(adapter.name, adapter.path)
                except PyllamaError as error:
                    if is_strict:
                        raise
                    _log.warning("the adapter %r is gone: %s", adapter.name, error)
        except BaseException:
            session.end().result()
            raise
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
            awake = session.thread.call(session.thread.life.wake)
            self._serve_by(session)
        except BaseException:
            await session.ended()
            raise
        self.forget()
        self._resume()
        return awake

    def _serve_by(self, session: Session) -> None:
        """
        Give all callers from now on *session*.

        Raises:
            ClosedError: the engine is closed, and *session* is as before.
        """
        with self._lock:
            self._check_open()
            old, self.current, self._state = self.current, session, None
            self._n_mended += old.encoder.n_mended
            old.thread.silence()
            for watcher in self._watchers:
                session.thread.watch(watcher)
            if not old.thread.gone.done():
                self._old.add(old)
                old.thread.gone.add_done_callback(lambda _: self._discard(old))
            if not old.n_callers:
                old.thread.close(drains=True)

    def _discard(self, session: Session) -> None:
        with self._lock:
            self._old.discard(session)

    def _check_open(self) -> None:
        """Raise ClosedError after close()."""
        if self._closed.is_set():
            raise ClosedError("the engine is closed")

    def forget(self) -> None:
        """Keep nothing for a later session."""
        inheritance, self._inheritance = self._inheritance, None
        if inheritance is not None:
            inheritance.logs.close()

    # -- restarts ------------------------------------------------------------------------------

    def _survives(self, session: Session, error: BaseException) -> bool:
        """
        Whether the engine goes on although the thread of *session* ends by *error*.

        Then another session is opened as soon as that one is gone. Thread: the session's.
        """
        if self._source is None or not self._may_restart(session):
            return False
        if not session.parts.restarts.take(monotonic(), error):
            return False
        session.parts.logs.share()  # the next one goes on with them
        self._hold("the engine had ended by itself and was opened again")
        self._tell(EngineState.LOADING)
        restart = Thread(
            target=self._restart, args=(session,), name="pyllama-restart", daemon=True
        )
        session.thread.gone.add_done_callback(lambda _: restart.start())
        return True

    def _may_restart(self, session: Session) -> bool:
        """Whether nobody has closed the engine, or replaced *session*."""
        return not self._closed.is_set() and session is self.current

    def _restart(self, session: Session) -> None:
        """Open another session in place of *session*, as many times as it is allowed."""
        try:
            while self._may_restart(session):
                try:
                    self._reopen(session)
                except Exception as error:  # noqa: BLE001 - it is told in the log
                    if not self._may_restart(session):
                        return
                    if not session.parts.restarts.take(monotonic(), error):
                        self._tell(EngineState.ERROR)
                        self._resume()
                        return
                    self._closed.wait(RETRY_S)
        finally:
            session.parts.logs.close()

    def _reopen(self, session: Session) -> None:
        with self._changes:  # a verb of life may replace it meanwhile
            if self._source is None or session is not self.current:
                return
            parts = session.parts
            inheritance = Inheritance(
                parts.logs, session.info.config.log, restarts=parts.restarts
            )
            other = self._open(self._source, inheritance, lambda _: True)
            try:
                self._serve_by(other)
            except BaseException:
                other.end().result()
                raise
            self._resume()

    # -- the end -------------------------------------------------------------------------------

    async def aclose(self, drain_s: float) -> None:
        """See AsyncEngine.aclose."""
        check_may_wait()
        if not self.current.thread.is_ours:  # the parent's
            return
        threads = self.close()
        try:
            if drain_s:
                for thread in threads:
                    thread.close(drains=True)
                with anyio.move_on_after(drain_s):
                    for thread in threads:
                        await arrival_of(thread.gone)
        finally:
            for thread in threads:
                thread.close()
            with anyio.CancelScope(shield=True):
                for thread in threads:
                    await arrival_of(thread.gone)
            self.workers.close()
            for thread in threads:
                thread.join()
            self.workers.join()
            self.forget()

    def leave(self) -> None:
        """As aclose(), without a wait: for finalisers."""
        self.workers.close()  # also of an engine that has failed
        for thread in self.close():
            thread.close()
        self.forget()

    def close(self) -> list[EngineThread]:
        """Take no caller and no session any more; those to be closed."""
        with self._lock:
            if self._state is not None:
                self._tell(EngineState.CLOSED)
            self._closed.set()
            self._state = None
        self._resume()
        return [session.thread for session in self.all]
