"""
The one channel for what an engine tells of itself: logs, events, metrics, spans.

A program of yours may watch, too: `engine.watch(watcher)`. A watcher that raises is let go of,
and nobody else suffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from logging import getLogger
from threading import current_thread, main_thread
from typing import NamedTuple

from pyllama_raw.core.request import Finished, Request
from pyllama_raw.core.scheduling.roster import SlotChange
from pyllama_raw.engine.engine_state import EngineState

METHODS = ("came", "changed", "stepped", "ended", "engine")

_log = getLogger(__name__)


class StepRecord(NamedTuple):
    """One step; what its time depends on, and what was there after it."""

    at_s: float  # when it was planned, on the engine clock
    seconds: float  # from then until its result was taken in
    n_prefill: int  # tokens of prompts
    n_decode: int  # streams that went on by a token
    n_context: int  # cells that all its tokens looked at
    n_saved: int  # tokens captured into host memory or files
    n_loaded: int  # tokens copied or restored
    n_running: int
    n_waiting: int
    n_cells_used: int
    n_host_bytes: int = 0  # of snapshots in host memory
    n_disk_bytes: int = 0  # of files
    n_preempted: int = 0  # in this step
    budget: int | None = None  # tokens it could have; None: it had no prompt to divide
    host_s: float = 0.0  # of planning, of taking the result in and of telling it
    decode_s: float = 0.0  # in llama_decode; also what ran before it was planned
    sample_s: float = 0.0  # of choosing tokens
    restore_s: float = 0.0  # of copying back from host memory or files
    status: str = "ok"  # how the decode ended
    decodes: tuple[tuple[int, int], ...] = ()  # request_id, slot
    chunks: tuple[tuple[int, int, int], ...] = ()  # request_id, slot, tokens
    warms_up: bool = False  # a request of it only warms the engine up; logs say so


class Watcher:
    """
    Methods that an engine calls in the thread that runs steps; they must return soon.

    A subclass has those that it needs; times are on the engine clock. A watcher that raises
    is told nothing more.
    """

    def came(self, requests: Sequence[Request], submitted: float) -> None:
        """*requests* wait now. Context variables are those of the caller of the requests."""

    def changed(self, change: SlotChange, request_id: int, now: float) -> None:
        """A request got a slot, or gave it up and waits again."""

    def stepped(self, step: StepRecord) -> None:
        """A step has run, and its events are told."""

    def ended(self, request: Request, end: Finished) -> None:
        """
        A request has ended, also one that came before anybody watched.

        Context variables are those of its caller.
        """

    def engine(self, state: EngineState, now: float) -> None:
        """The state of the engine: told first, when it changes, and last of all at the end."""


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
        self._set(tuple(other for other in self._all if other is not watcher))

    def _set(self, watchers: tuple[Watcher, ...]) -> None:
        self._all = watchers
        # Who does not override a method is never called for it.
        self._those_of = {  # watchers with a method of their own
            name: [watcher for watcher in watchers if _has(watcher, name)]
            for name in METHODS
        }
        self.wants_steps = bool(self._those_of["stepped"])

    def came(self, requests: Sequence[Request], submitted: float) -> None:
        self._each("came", requests, submitted)

    def changed(self, change: SlotChange, request_id: int, now: float) -> None:
        self._each("changed", change, request_id, now)

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
            # A watcher must not end the engine. An interrupt of the user's must end the
            # program.
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
