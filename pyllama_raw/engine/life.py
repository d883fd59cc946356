"""
The life of an engine: a table of phases and events, and the context that comes and goes.

Who owns which part of the state of an engine:

- `Life` has the phase of one engine thread, and alone writes it, in that thread. Everybody else
  reads it. Other threads write one fact: `shut()` says that no request is taken any more.
- `Sessions` (api/session.py) has which thread serves callers, and the state of an engine whose
  weights are freed or loaded, because no thread runs meanwhile.
- `EngineOpening` (api/model.py) has the state before there is an engine.

Rules:
1. A step needs a context. Where there is none, requests come, wait, and end by their deadlines.
2. The scheduler knows nothing of a sleep: the context holds afterwards what it held before.
3. An exception of the executor leaves the scheduler as it was, so all requests go on from the
   tokens that are known. Only so many in a minute are survived.
4. A context that cannot be made counts as another failure, and is tried again RETRY_S later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, auto
from logging import getLogger
from typing import Protocol

from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.stats import StepTimes
from pyllama_raw.core.step import Executor
from pyllama_raw.engine.info import EngineState
from pyllama_raw.errors import (
    MAX_SHOWN,
    EngineFault,
    PyllamaError,
    SnapshotFailed,
    WrongUse,
    cut,
)

WINDOW_S = 60.0
RETRY_S = 1.0  # between two tries of one restart

_log = getLogger(__name__)


class Phase(Enum):
    """A row of the table: what everybody sees, whether steps can be made, and its course."""

    # It makes steps; the context has failed, and another one is to be made; it is freed.
    AWAKE = EngineState.READY, True, "serves"
    LOST = EngineState.LOADING, False, "serves"
    ASLEEP = EngineState.SLEEPING, False, "serves"
    # It makes steps until no request is left, or would, but the context has failed.
    DRAINING = EngineState.CLOSING, True, "drains"
    DRAINING_LOST = EngineState.CLOSING, False, "drains"
    # Requests that are left end without a step; without a context nothing can be saved either.
    ENDING = EngineState.CLOSING, True, "ends"
    ENDING_LOST = EngineState.CLOSING, False, "ends"
    # The thread is over, in the second case by an error.
    CLOSED = EngineState.CLOSED, False, "over"
    FAILED = EngineState.ERROR, False, "over"

    def __init__(self, state: EngineState, has_context: bool, course: str) -> None:
        self.state = state  # as everybody sees it; READY is RUNNING if there is work
        self.has_context = has_context
        self.drains = course == "drains"
        self.ends = course == "ends"
        self.is_over = course == "over"  # no command is obeyed any more


class LifeEvent(Enum):
    """A column of the table."""

    SLEEP = auto()  # free the context
    WAKE = auto()  # have it again
    WARM_UP = auto()  # compute for nothing
    REBUILD = auto()  # have another context in place of this one
    LOSE = auto()  # the executor has failed
    RENEW = auto()  # it has another context
    DRAIN = auto()  # end when all requests have
    DRAINED = auto()  # they have
    CLOSE = auto()  # end
    END = auto()  # the thread is over
    FAIL = auto()  # the thread is over by an error


_IS_LOST = "the engine makes its context anew after a failure: call again when its state is another one"
_SLEEPS = "the engine sleeps: wake() it before"
_WAKES_ANEW = "the engine sleeps, and wake() makes its context anew anyway"
_CLOSES = "the engine is closing"

# The next phase, or why an event is refused there. What is not in a row cannot happen in it.
TABLE: Mapping[Phase, Mapping[LifeEvent, Phase | str]] = {
    Phase.AWAKE: {
        LifeEvent.SLEEP: Phase.ASLEEP,
        LifeEvent.WAKE: Phase.AWAKE,
        LifeEvent.WARM_UP: Phase.AWAKE,
        LifeEvent.REBUILD: Phase.AWAKE,
        LifeEvent.LOSE: Phase.LOST,
        LifeEvent.DRAIN: Phase.DRAINING,
        LifeEvent.CLOSE: Phase.ENDING,
        LifeEvent.FAIL: Phase.FAILED,
    },
    Phase.LOST: {
        LifeEvent.SLEEP: _IS_LOST,
        LifeEvent.WAKE: Phase.LOST,
        LifeEvent.WARM_UP: _IS_LOST,
        LifeEvent.REBUILD: Phase.LOST,  # the next step does it once more, and goes on
        LifeEvent.LOSE: Phase.LOST,
        LifeEvent.RENEW: Phase.AWAKE,
        LifeEvent.DRAIN: Phase.DRAINING_LOST,
        LifeEvent.CLOSE: Phase.ENDING_LOST,
        LifeEvent.FAIL: Phase.FAILED,
    },
    Phase.ASLEEP: {
        LifeEvent.SLEEP: Phase.ASLEEP,
        LifeEvent.WAKE: Phase.AWAKE,
        LifeEvent.WARM_UP: _SLEEPS,
        LifeEvent.REBUILD: _WAKES_ANEW,
        LifeEvent.DRAIN: Phase.ENDING_LOST,  # no step could end the requests
        LifeEvent.CLOSE: Phase.ENDING_LOST,
        LifeEvent.FAIL: Phase.FAILED,
    },
    Phase.DRAINING: {
        LifeEvent.SLEEP: Phase.ENDING_LOST,
        LifeEvent.WAKE: Phase.DRAINING,
        LifeEvent.WARM_UP: Phase.DRAINING,
        LifeEvent.REBUILD: Phase.DRAINING,
        LifeEvent.LOSE: Phase.DRAINING_LOST,
        LifeEvent.DRAIN: Phase.DRAINING,
        LifeEvent.DRAINED: Phase.ENDING,
        LifeEvent.CLOSE: Phase.ENDING,
        LifeEvent.FAIL: Phase.FAILED,
    },
    Phase.DRAINING_LOST: {
        LifeEvent.SLEEP: _IS_LOST,
        LifeEvent.WAKE: Phase.DRAINING_LOST,
        LifeEvent.WARM_UP: _IS_LOST,
        LifeEvent.REBUILD: Phase.DRAINING_LOST,
        LifeEvent.LOSE: Phase.DRAINING_LOST,
        LifeEvent.RENEW: Phase.DRAINING,
        LifeEvent.DRAIN: Phase.DRAINING_LOST,
        LifeEvent.DRAINED: Phase.ENDING_LOST,
        LifeEvent.CLOSE: Phase.ENDING_LOST,
        LifeEvent.FAIL: Phase.FAILED,
    },
    Phase.ENDING: {
        LifeEvent.SLEEP: _CLOSES,
        LifeEvent.WAKE: Phase.ENDING,
        LifeEvent.WARM_UP: Phase.ENDING,
        LifeEvent.REBUILD: Phase.ENDING,
        LifeEvent.LOSE: Phase.ENDING_LOST,
        LifeEvent.DRAIN: Phase.ENDING,
        LifeEvent.CLOSE: Phase.ENDING,
        LifeEvent.END: Phase.CLOSED,
        LifeEvent.FAIL: Phase.FAILED,
    },
    Phase.ENDING_LOST: {
        LifeEvent.SLEEP: _CLOSES,
        LifeEvent.WAKE: _CLOSES,
        LifeEvent.WARM_UP: _CLOSES,
        LifeEvent.REBUILD: _CLOSES,
        LifeEvent.DRAIN: Phase.ENDING_LOST,
        LifeEvent.CLOSE: Phase.ENDING_LOST,
        LifeEvent.END: Phase.CLOSED,
        LifeEvent.FAIL: Phase.FAILED,
    },
    Phase.CLOSED: {LifeEvent.FAIL: Phase.FAILED},  # something could not be freed
    Phase.FAILED: {LifeEvent.FAIL: Phase.FAILED},
}


class Restarts:
    """
    A budget of restarts: so many in a minute, then no more, whatever had to be made anew.

    Each is told in the log.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit  # in WINDOW_S
        self._moments = deque[float]()

    def take(self, now: float, error: BaseException) -> bool:
        """Whether the engine may restart after *error*, which is noted."""
        # What is older than a minute does not count.
        while self._moments and self._moments[0] <= now - WINDOW_S:
            self._moments.popleft()
        if len(self._moments) >= self.limit:
            return False
        self._moments.append(now)
        text = "the engine failed, restart %d of at most %d in %g s: %r"
        _log.error(text, len(self._moments), self.limit, WINDOW_S, error)
        return True


class EngineExecutor(Executor, Protocol):
    """An executor whose contexts come and go, and that keeps times."""

    @property
    def times(self) -> StepTimes:
        """A frozen value, replaced after every step. Thread: any."""

    def suspend(self) -> object:
        """
        Free the contexts; the value is what they held, for resume().

        Raises:
            SnapshotFailed, MemoryError: nothing has changed.
        """

    def resume(self, state: object) -> bool:
        """
        Make the contexts again, with *state*; False: they hold nothing.

        Raises:
            NativeError: there is none, and the call can be repeated.
        """

    def rebuild(self) -> None:
        """Make other contexts, which hold nothing. Raises as resume()."""

    def warm_up(self) -> bool:
        """
        Compute as much as a step may have, for nothing; False: what contexts held is gone.

        Raises:
            NativeError, MemoryError: it cannot be computed.
        """


class Life:
    """
    The phase of an engine thread, and the verbs that change it. Thread: the engine's.

    Args:
        memory: what the context is to hold when wake() comes; None: it does not sleep.
    """

    def __init__(
        self,
        executor: EngineExecutor,
        scheduler: Scheduler,
        restarts: Restarts,
        clock: Callable[[], float],
        memory: object = None,
    ) -> None:
        self.phase = Phase.AWAKE if memory is None else Phase.ASLEEP
        self.is_shut = False  # no request is taken any more
        self.error: BaseException | None = (
            None  # has ended the thread, or came at its end
        )
        self._executor = executor
        self._scheduler = scheduler
        self._restarts = restarts
        self._clock = clock
        self._memory = memory  # of the context, while that sleeps
        self._failure: PyllamaError | None = None  # of the context that is lost
        self.retry_at: float | None = None  # when come_back() is to be called

    def _after(self, event: LifeEvent) -> Phase:
        """The phase that follows *event*. Raises WrongUse if that is refused now."""
        phase = TABLE[self.phase][event]
        if isinstance(phase, str):
            raise WrongUse(phase)
        return phase

    # -- the context -----------------------------------------------------------------------

    def sleep(self) -> None:
        """
        Free the context; what it holds is in host memory meanwhile. Can be repeated.

        Raises:
            SnapshotFailed, MemoryError: there is no room for that; all goes on.
            WrongUse: the context is being made anew after a failure.
        """
        phase = self._after(LifeEvent.SLEEP)
        # It may sleep already.
        if self.phase is not Phase.ASLEEP:
            self._memory = self._executor.suspend()
            self.phase = phase

    def take_memory(self) -> object:
        """What the context held that sleeps; it will not wake."""
        memory, self._memory = self._memory, None
        return memory

    def wake(self) -> None:
        """
        Have the context again; can be repeated.

        Raises:
            ContextFailed, NativeError: it sleeps on.
        """
        phase = self._after(LifeEvent.WAKE)
        # It may be awake already.
        if self.phase is Phase.ASLEEP:
            # It sleeps on if this raises.
            is_whole = self._executor.resume(self._memory)
            self.phase, self._memory = phase, None
            self._lose(slots=not is_whole)

    def rebuild(self, cause: str) -> None:
        """
        Have another context in place of this one, because of *cause*.

        Raises:
            WrongUse: there is none, because the engine sleeps.
            ContextFailed, NativeError: it cannot be made now. It is tried again, as after a
                failure of the executor.
        """
        phase = self._after(LifeEvent.REBUILD)
        _log.warning("the context is made anew: %s", cut(cause, MAX_SHOWN))
        try:
            self._executor.rebuild()
        except Exception as error:
            self._note(error)
            raise
        self.phase = phase
        self._lose(slots=True)

    def warm_up(self) -> None:
        """Compute as much as a step may have. Raises WrongUse, NativeError, MemoryError."""
        self._after(LifeEvent.WARM_UP)
        # A decode that fails leaves nothing in the context.
        is_whole = False
        try:
            is_whole = self._executor.warm_up()
        # There was no room for a copy of it, and nothing has changed.
        except (SnapshotFailed, MemoryError):
            is_whole = True
            raise
        finally:
            self._lose(slots=not is_whole)

    def _lose(self, *, slots: bool) -> None:
        self._scheduler.lose_reading()
        if slots:
            self._scheduler.lose_slots()

    # -- failures --------------------------------------------------------------------------

    def survive(self, error: Exception) -> None:
        """Note that the executor has failed; raises *error* if there were too many."""
        if not self._restarts.take(self._clock(), error):
            raise error
        self._note(error)

    def _note(self, error: Exception) -> None:
        """There is no context, because of *error*."""
        # From here on no step is made until come_back() has succeeded.
        self.phase = self._after(LifeEvent.LOSE)
        self._failure = EngineFault(f"a step has failed, the engine goes on: {error!r}")
        self._failure.__cause__ = error
        self.retry_at = self._clock()

    def come_back(self) -> PyllamaError | None:
        """
        Make the context anew that has failed; it is time.

        Returns:
            The failure, if there is a context again; None: it is tried again.

        Raises:
            Exception: it cannot be made, and there were too many failures.
        """
        try:
            self._executor.rebuild()
        except Exception as error:  # noqa: BLE001 - raised, if there were too many
            self.survive(error)
            self.retry_at = self._clock() + RETRY_S
            return None
        self.phase = self._after(LifeEvent.RENEW)
        failure, self._failure, self.retry_at = self._failure, None, None
        return failure

    # -- the end ---------------------------------------------------------------------------

    def close(self, *, drains: bool) -> None:
        """End every request, with *drains* once it is done; then the thread."""
        self.phase = self._after(LifeEvent.DRAIN if drains else LifeEvent.CLOSE)

    def shut(self) -> None:
        """Take no request any more; close() follows as a command. Thread: any."""
        self.is_shut = True

    def drained(self) -> None:
        """No request is left to wait for."""
        self.phase = self._after(LifeEvent.DRAINED)

    def end(self) -> None:
        """The thread obeys nothing any more."""
        self.phase = self._after(LifeEvent.END)

    def fail(self, error: BaseException) -> None:
        """The thread is over by *error*; the first one counts."""
        self.error = self.error or error  # before the phase, which others look at first
        self.phase = self._after(LifeEvent.FAIL)
