"""
The one channel for what an engine tells of itself: logs, events, metrics, spans.

A program of yours may watch, too: `engine.watch(watcher)`. A watcher that raises is let go of,
and nobody else suffers.

Notices are what an engine tells in the log of Python. It looks a few times a second, and when
requests end: at preemptions and evictions, and at the share of the CPUs that its decodes get. Faults
of a scheduling policy come as they happen. Log lines of libllama become lines of Python's log.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from logging import getLogger
from threading import current_thread, main_thread
from typing import NamedTuple

from pyllama_raw._ffi.openmp import SHORT_SPINS, ShortSpins
from pyllama_raw.core.policy_runner import PolicyFault, pass_on_interrupts
from pyllama_raw.core.request import Finished, Request, SlotChange
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.stats import StepTimes
from pyllama_raw.engine.info import EngineState

METHODS = ("came", "changed", "stepped", "ended", "engine")

_watcher_log = getLogger(__name__)


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
    n_drafted: int = 0  # rows beside n_decode, of drafts
    n_accepted: int = 0  # of these, those that were sampled
    n_draft_model: int = 0  # tokens that a draft model computed, in a step of its own


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
                _watcher_log.exception("%s raised; it is told nothing more", name)
                self.discard(watcher)


def _has(watcher: Watcher, method: str) -> bool:
    return getattr(type(watcher), method) is not getattr(Watcher, method)


EVERY = 1000  # faults of a policy
WINDOW_S = 0.5  # of decodes
LEAST = 0.75  # one neighbour with the same right to the CPUs leaves about half
# Of decodes with short waits, before long ones are tried again.
FIRST_S, LONGEST_S = 2.0, 16.0
_log = logging.getLogger("pyllama_raw.engine")


class Teller:
    """Compares what an engine has done with what was told."""

    def __init__(self) -> None:
        self._n_preempted = self._n_evicted = 0

    def tell(self, scheduler: Scheduler) -> None:
        """Called a few times a second, and when requests end."""
        if _log.isEnabledFor(logging.INFO):
            before, self._n_preempted = self._n_preempted, scheduler.counters.preempted
            if n_new := self._n_preempted - before:
                _log.info("preempted %d times (%d in all)", n_new, self._n_preempted)
        if _log.isEnabledFor(logging.DEBUG):
            evictions = scheduler.cache_stats().n_evictions
            before, self._n_evicted = self._n_evicted, sum(evictions.values())
            if n_new := self._n_evicted - before:
                by_reason = ", ".join(f"{w}: {n}" for w, n in evictions.items() if n)
                text = "the cache let %d snapshots go (in all %s)"
                _log.debug(text, n_new, by_reason)


class PolicyLog:
    """
    Tells of faults of a scheduling policy: of each kind once, then of every thousandth.

    An interrupt is the user's in the main thread only. The engine thread has none, so there it
    is a fault like any other.
    """

    def __init__(self) -> None:
        self._counts = Counter[tuple[str, type[BaseException]]]()

    def __call__(self, fault: PolicyFault) -> None:
        if current_thread() is main_thread():
            pass_on_interrupts(fault)
        kind = (fault.hook, type(fault.error))
        self._counts[kind] += 1
        if self._counts[kind] % EVERY == 1:
            _log.error(
                "policy %s: %s failed %d times; the scheduler goes on without its answer",
                fault.policy,
                fault.hook,
                self._counts[kind],
                exc_info=fault.error,
            )


class CpuShare:
    """
    CPU time of decodes, as a part of the time that they took.

    While it is small, threads wait shortly for each other. Whether the neighbour has gone is
    found out by a window with long waits, after twice the time if it had not.
    """

    def __init__(self, spins: ShortSpins = SHORT_SPINS) -> None:
        self.latest: float | None = None  # of the latest window
        self._before = StepTimes()
        self._is_told = False
        self._spins = spins
        self._left_s: float | None = None  # of short waits; None: they are long
        self._hold_s = FIRST_S
        self._tries = False  # long waits, for the first window

    def note(self, times: StepTimes) -> None:
        """Take in what an executor has needed in all."""
        wall_s = times.decode_s - self._before.decode_s
        cpu_s = times.decode_cpu_s - self._before.decode_cpu_s
        if wall_s < WINDOW_S or not times.decode_cpu_s:
            return
        self.latest, self._before = cpu_s / wall_s, times
        # Another program computes on the same CPUs: told once, until it has gone.
        is_small = self.latest < LEAST
        if is_small and not self._is_told:
            _log.info(
                "decodes take %.1f times their CPU time: other programs compute on the same "
                "CPUs, fewer CPUs are granted than n_threads, or libgomp may not spin",
                wall_s / max(cpu_s, 1e-9),
            )
        self._is_told = is_small
        # Threads wait long for each other, as on a quiet machine.
        if self._left_s is None:
            if is_small:
                more_s = 2 * self._hold_s if self._tries else FIRST_S
                self._left_s = self._hold_s = min(more_s, LONGEST_S)
                self._spins.begin()
            self._tries = False
        else:
            # They wait shortly. After a while long waits are tried again.
            self._left_s -= wall_s
            if self._left_s <= 0:
                self.close()
                self._tries = True

    def close(self) -> None:
        """Let threads wait long; can be repeated."""
        if self._left_s is not None:
            self._left_s = None
            self._spins.end()
