"""Several watchers as one; one that raises is let go of, and nobody else suffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from logging import getLogger
from threading import current_thread, main_thread

from pyllama_raw.core.request import Finished, Request
from pyllama_raw.core.scheduling.slot_change import SlotChange
from pyllama_raw.engine.engine_state import EngineState
from pyllama_raw.engine.watcher import StepRecord, Watcher

METHODS = ("came", "changed", "stepped", "ended", "engine")

_log = getLogger(__name__)


class Watchers(Watcher):
    """Tells each of *watchers* what it is told, in their order."""

    def __init__(self, watchers: Iterable[Watcher] = ()) -> None:
        self.n_faults = 0  # watchers that raised
        self._set(tuple(watchers))

    def add(self, watcher: Watcher) -> None:
        """Tell *watcher*, too."""
        self._set((*self._all, watcher))

    def discard(self, watcher: Watcher) -> None:
        """Tell it nothing more; can be repeated."""
        self._set(tuple(each for each in self._all if each is not watcher))

    def _set(self, watchers: tuple[Watcher, ...]) -> None:
        self._all = watchers
        self._those_of = {  # watchers with a method of their own
            name: [each for each in watchers if _has(each, name)] for name in METHODS
        }

    def came(self, requests: Sequence[Request], submitted: float) -> None:
        self._each("came", requests, submitted)

    def changed(self, change: SlotChange, request_id: int, now: float) -> None:
        self._each("changed", change, request_id, now)

    @property
    def wants_steps(self) -> bool:
        """Whether anybody is told of steps."""
        return bool(self._those_of["stepped"])

    def stepped(self, step: StepRecord) -> None:
        self._each("stepped", step)

    def ended(self, request: Request, end: Finished) -> None:
        self._each("ended", request, end)

    def engine(self, state: EngineState, now: float) -> None:
        self._each("engine", state, now)

    def _each(self, method: str, *arguments: object) -> None:
        for watcher in self._those_of[method]:
            try:
                getattr(watcher, method)(*arguments)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and (
                    current_thread() is main_thread()  # other threads get none
                ):
                    raise
                self.n_faults += 1
                name = type(watcher).__name__
                _log.exception("%s raised; it is told nothing more", name)
                self.discard(watcher)


def _has(watcher: Watcher, method: str) -> bool:
    return getattr(type(watcher), method) is not getattr(Watcher, method)
