"""
Sessions: a model that is loaded, and all that serves it. A reload makes another one.

Rules:
1. A request belongs to one session, from its preparation to its end.
2. A session that was replaced takes no new callers, and ends when it has neither a caller nor
   a request.
3. Watchers are told of all sessions. What becomes of the engine is told of the latest one.
4. While there is no session that runs, callers wait, as many as may wait in an engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from math import inf
from threading import RLock
from typing import TYPE_CHECKING

import anyio

from pyllama_raw.api.embedding import Embedder
from pyllama_raw.api.preparation import Preparation
from pyllama_raw.api.workers import Workers, arrival_of
from pyllama_raw.engine.capabilities import Capabilities
from pyllama_raw.engine.engine_state import EngineState
from pyllama_raw.engine.info import EngineInfo
from pyllama_raw.engine.mailbox import check_may_wait
from pyllama_raw.engine.parts import EngineParts
from pyllama_raw.engine.thread import EngineThread
from pyllama_raw.engine.watcher import Watcher, Watchers
from pyllama_raw.errors import ClosedError, DeadlineExceeded, QueueFull, WaitedTooLong
from pyllama_raw.prompts.prompt import PromptEncoder

if TYPE_CHECKING:
    from pyllama_raw.options.requests import TextOptions

NO_LIMITS: TextOptions = {}


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
        self.embedder = Embedder(parts, encoder, self.thread, workers, request_ids)
        self.n_callers = 0  # that may still submit requests

    @cached_property
    def info(self) -> EngineInfo:
        """See Facts.info."""
        return self.parts.describe()

    @cached_property
    def capabilities(self) -> Capabilities:
        """See Facts.capabilities."""
        from pyllama_raw.prompts.chat import are_printed

        template, is_apart = self.parts.chat_template, self.parts.template_process
        tried = partial(are_printed, template, is_apart)
        known, media = self.parts.capabilities, self.parts.media
        projector = None if media is None else media.projector
        return replace(
            known,
            prints_tools=tried,
            images=projector is not None and projector.sees,
            sounds=projector is not None and projector.hears,
        )


class Sessions:
    """The session of an engine, and those before it that have not ended. Thread: any."""

    def __init__(self, parts: EngineParts) -> None:
        self.workers = Workers()
        self._request_ids = count(1)
        try:
            self.current = self.make(parts)
        except BaseException:
            self.workers.close()
            raise
        self._old = set[Session]()
        self._watchers: list[Watcher] = []
        self._lock = RLock()  # a finaliser can leave where the lock is held
        self._pause: Future[None] | None = None  # answered when callers may go on
        self._why_paused = ""  # for whoever waited for that too long
        self._n_waiting = 0  # for that
        self._unused: Future[None] | None = None  # answered when no caller is left
        self._state: EngineState | None = None  # while no session runs
        self._is_closed = False
        self._n_mended = 0  # of earlier sessions

    def make(self, parts: EngineParts) -> Session:
        """A session that nobody uses yet."""
        return Session(parts, self.workers, self._request_ids)

    @property
    def state(self) -> EngineState:
        """The state of the engine."""
        return self._state or self.current.thread.state

    @property
    def n_mended(self) -> int:
        """Chats that their template took only changed."""
        return self._n_mended + self.current.encoder.n_mended

    @property
    def all(self) -> list[Session]:
        """Sessions that have not ended, and the latest one."""
        with self._lock:
            return [*self._old, self.current]

    # -- callers ----------------------------------------------------------------------

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
        self._check_ours()
        found = self._enter() or await self._wait(limits)
        try:
            found.thread.check()
            yield found
        finally:
            self._leave(found)

    def _check_ours(self) -> None:
        """Raise ClosedError in a fork, where nobody lets go of the lock."""
        if not self.current.thread.is_ours:
            self.current.thread.check()

    def _enter(self) -> Session | None:
        with self._lock:
            if self._pause is not None:
                return None
            self.current.n_callers += 1
            return self.current

    def _leave(self, session: Session) -> None:
        with self._lock:
            session.n_callers -= 1
            if session.n_callers:
                return
            if session is not self.current:
                session.thread.close(drains=True)
            elif self._unused is not None:
                self._unused.set_result(None)
                self._unused = None

    async def _wait(self, limits: TextOptions) -> Session:
        most = self.current.parts.admission.max_waiting
        with self._lock:
            if self._n_waiting >= most:
                raise QueueFull("max_waiting", self._n_waiting + 1, most)
            self._n_waiting += 1
        try:
            deadline_s, max_wait_s = limits.get("deadline_s"), limits.get("max_wait_s")
            given = [each for each in (deadline_s, max_wait_s) if each is not None]
            with anyio.move_on_after(min(given, default=inf)):
                while True:
                    if (pause := self._pause) is not None:
                        await arrival_of(pause)
                    if (found := self._enter()) is not None:
                        return found
        finally:
            with self._lock:
                self._n_waiting -= 1
        if max_wait_s is not None and (deadline_s is None or max_wait_s < deadline_s):
            raise WaitedTooLong("max_wait_s", max_wait_s, max_wait_s)
        raise DeadlineExceeded(0, 1, f"requests had begun, because {self._why_paused}")

    # -- sessions come and go ----------------------------------------------------------

    def replace(self, session: Session) -> None:
        """
        Give all callers from now on *session*.

        Raises:
            ClosedError: the engine is closed, and *session* is as before.
        """
        with self._lock:
            self.check_open()
            old, self.current, self._state = self.current, session, None
            self._n_mended += old.encoder.n_mended
            old.thread.loop.is_replaced = True
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

    def check_open(self) -> None:
        """Raise ClosedError after close()."""
        if self._is_closed:
            raise ClosedError("the engine is closed")

    def hold(self, why: str) -> None:
        """Let callers wait from now on; *why* they did, for those whose time is over."""
        with self._lock:
            if not self._is_closed:
                self._pause, self._why_paused = self._pause or Future(), why

    async def pause(self) -> None:
        """Let callers wait from now on; returns when no earlier one is left."""
        with self._lock:
            self.check_open()
            self.hold("the engine slept")
            if not self.current.n_callers:
                return
            unused = self._unused = self._unused or Future()
        await arrival_of(unused)

    def resume(self) -> None:
        """Let callers go on."""
        with self._lock:
            pause, self._pause = self._pause, None
        if pause is not None:
            pause.set_result(None)

    def note(self, state: EngineState) -> None:
        """No session runs: have the state of the engine, of which watchers know."""
        with self._lock:
            self._state = None if state.has_ended or self._is_closed else state

    def tell(self, state: EngineState) -> None:
        """As note(), and tell the watchers."""
        with self._lock:
            if self._is_closed:
                return
            self.note(state)
            Watchers(self._watchers).engine(state, self.current.thread.clock())

    def close(self) -> list[EngineThread]:
        """Take no caller and no session any more; those to be closed."""
        with self._lock:
            if self._state is not None:
                self.tell(EngineState.CLOSED)
            self._is_closed, self._state = True, None
        self.resume()
        return [session.thread for session in self.all]

    # -- watchers -----------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> Future[None]:
        """See Facts.watch."""
        self._check_ours()
        with self._lock:
            if self._state is None:
                begun = self.current.thread.watch(watcher)
            else:
                begun = Future()
                Watchers([watcher]).engine(self._state, self.current.thread.clock())
                begun.set_result(None)
            self._watchers.append(watcher)
            return begun

    def unwatch(self, watcher: Watcher) -> None:
        """See Facts.unwatch."""
        with self._lock:
            self._watchers = [each for each in self._watchers if each is not watcher]
        for session in self.all:
            session.thread.unwatch(watcher)
