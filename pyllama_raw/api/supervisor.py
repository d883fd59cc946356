"""
Opens an engine again that has ended by itself, as many times as its options allow.

Rules:
1. An exception of the executor does not end an engine (engine/life.py). What comes here is an
   engine thread that has ended, so its requests have ended with EngineStopped.
2. Callers wait while the model is loaded, and are served by the same engine object.
3. Whoever closes or reloads the engine meanwhile is obeyed.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING

from pyllama_raw.engine.engine_state import EngineState
from pyllama_raw.engine.kept import RETRY_S

if TYPE_CHECKING:
    from pyllama_raw.api.session import Session, Sessions


class Supervisor:
    """Belongs to one engine."""

    def __init__(self, sessions: Sessions, remake: Callable[[Session], None]) -> None:
        """
        Args:
            remake: opens another session in place of one that has ended, unless there is one
                already; blocks.
        """
        self._sessions = sessions
        self._remake = remake
        self._closes = Event()  # wakes a thread that waits to try again
        self._ended: Session | None = None  # by itself, and not the engine with it

    def watch(self, session: Session) -> None:
        """Have another one in place of *session*, if that ends by itself."""
        if not session.parts.restarts.most:
            return
        session.thread.is_survived = lambda error: self._takes(session, error)
        session.thread.gone.add_done_callback(lambda _: self._note_end(session))

    def close(self) -> None:
        """Open nothing any more."""
        self._closes.set()

    def _takes(self, session: Session, error: BaseException) -> bool:
        """Whether the end of *session* is not that of the engine. Thread: the session's."""
        if self._closes.is_set() or session is not self._sessions.current:
            return False
        if not session.parts.restarts.take(monotonic(), error):
            return False
        self._ended = session
        session.parts.logs.share()  # the next one goes on with them
        self._sessions.hold("the engine had ended by itself and was opened again")
        self._sessions.tell(EngineState.LOADING)
        return True

    def _note_end(self, session: Session) -> None:
        if session is self._ended:
            self._ended = None
            Thread(
                target=self._restart,
                args=(session,),
                name="pyllama-restart",
                daemon=True,
            ).start()

    def _restart(self, session: Session) -> None:
        try:
            while self._is_wanted(session) and not self._has_restarted(session):
                self._closes.wait(RETRY_S)
        finally:
            session.parts.logs.close()

    def _is_wanted(self, session: Session) -> bool:
        return not self._closes.is_set() and session is self._sessions.current

    def _has_restarted(self, session: Session) -> bool:
        """Open another one; True, too, if no more is to be tried."""
        try:
            self._remake(session)
        except Exception as error:  # noqa: BLE001 - it is told in the log
            if not self._is_wanted(session):
                return True
            if session.parts.restarts.take(monotonic(), error):
                return False
            self._sessions.tell(EngineState.ERROR)
            self._sessions.resume()
        return True
