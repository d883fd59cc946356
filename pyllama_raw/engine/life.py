"""
The life of a context: it sleeps and wakes, is made anew, and comes back after failures.

Rules:
1. While it sleeps, or is to be made anew, no step is made. Requests come, wait, and end by
   their deadlines all the same.
2. The scheduler knows nothing of a sleep: the context holds afterwards what it held before.
   So nobody touches a scheduler that sleeps, also if another session has it meanwhile.
3. An exception of the executor leaves the scheduler as it was, so all requests go on from the
   tokens that are known. Only so many in a minute are survived (kept.py).
4. A context that cannot be made counts as another failure, and is tried again RETRY_S later.
"""

from __future__ import annotations

from logging import getLogger

from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.engine_state import EngineState
from pyllama_raw.engine.kept import RETRY_S, Restarts
from pyllama_raw.engine.parts import EngineExecutor
from pyllama_raw.errors import EngineFault, PyllamaError, SnapshotFailed, WrongUse

_log = getLogger(__name__)


class Life:
    """
    Belongs to the engine thread.

    Args:
        memory: what the context is to hold when wake() comes; None: it does not sleep.
    """

    def __init__(
        self,
        driver: Driver,
        executor: EngineExecutor,
        restarts: Restarts,
        memory: object = None,
    ) -> None:
        self._driver = driver
        self._executor = executor
        self._restarts = restarts
        self.is_asleep = memory is not None
        self._memory = memory  # of the context, while that sleeps
        self._failure: PyllamaError | None = None  # until there is another context
        self._retry_at = 0.0

    @property
    def hindrance(self) -> EngineState | None:
        """Why no step can be made; None: one can."""
        if self.is_asleep:
            return EngineState.SLEEPING
        return None if self._failure is None else EngineState.LOADING

    @property
    def retry_at(self) -> float | None:
        """When step() is to be called again, if nothing else happens."""
        return None if self._failure is None else self._retry_at

    def step(self) -> bool:
        """Make a step if one can be made; False: there was nothing to do."""
        if self._failure is not None and not self.is_asleep:
            self._come_back()
        if self.hindrance is not None:
            return self._driver.expire()
        try:
            return self._driver.step()
        except Exception as error:
            if not self._driver.is_failed_by_executor:
                raise
            self._survive(error)
            return True

    def sleep(self) -> None:
        """
        Free the context; what it holds is in host memory meanwhile. Can be repeated.

        Raises:
            SnapshotFailed, MemoryError: there is no room for that; all goes on.
            WrongUse: the context is being made anew after a failure.
        """
        if self.is_asleep:
            return
        if self._failure is not None:
            raise WrongUse(
                "the engine makes its context anew after a failure: put it to sleep when "
                "its state is another one"
            )
        self._memory = self._executor.suspend()
        self.is_asleep = True

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
        if not self.is_asleep:
            return
        is_whole = self._executor.resume(self._memory)
        self.is_asleep, self._memory = False, None
        self._lose(slots=not is_whole)

    def rebuild(self, cause: str) -> None:
        """
        Have another context in place of this one, because of *cause*.

        Raises:
            WrongUse: there is none, because the engine sleeps.
            ContextFailed, NativeError: it cannot be made now. It is tried again, as after a
                failure of the executor.
        """
        if self.is_asleep:
            raise WrongUse(
                "the engine sleeps, and wake() makes its context anew anyway"
            )
        _log.warning("the context is made anew: %s", cause)
        try:
            self._executor.rebuild()
        except Exception as error:
            self._note(error)
            raise
        self._lose(slots=True)

    def warm_up(self) -> None:
        """Compute as much as a step may have. Raises WrongUse, NativeError, MemoryError."""
        if self.hindrance is not None:
            raise WrongUse(f"the engine is {self.hindrance}: warm it up afterwards")
        is_whole = False
        try:
            is_whole = self._executor.warm_up()
        except (SnapshotFailed, MemoryError):
            is_whole = True
            raise
        finally:
            self._lose(slots=not is_whole)

    def _lose(self, *, slots: bool) -> None:
        scheduler = self._driver.scheduler
        scheduler.lose_reading()
        if slots:
            scheduler.lose_slots()

    def _survive(self, error: Exception) -> None:
        """Note a failure; raises *error* if there were too many."""
        if not self._restarts.take(self._driver.clock(), error):
            raise error
        self._note(error)

    def _note(self, error: Exception) -> None:
        """There is no context, because of *error*."""
        self._failure = EngineFault(f"a step has failed, the engine goes on: {error!r}")
        self._failure.__cause__ = error
        self._retry_at = self._driver.clock()

    def _come_back(self) -> None:
        """Make the context that has failed anew, when it is time."""
        if self._driver.clock() < self._retry_at or self._failure is None:
            return
        try:
            self._executor.rebuild()
        except Exception as error:  # noqa: BLE001 - raised, if there were too many
            self._survive(error)
            self._retry_at += RETRY_S
            return
        failure, self._failure = self._failure, None
        if self._driver.is_failed_by_executor:
            self._driver.give_up_step(failure)
        else:
            self._lose(slots=True)
