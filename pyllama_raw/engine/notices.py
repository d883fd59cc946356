"""
What an engine notices of itself now and then, and tells in the log of Python.

It looks a few times a second, and when requests end: at preemptions and evictions, and at the
share of the CPUs that its decodes get. Faults of a scheduling policy come as they happen. Log lines
of libllama become lines of Python's log.
"""

from __future__ import annotations

import logging
from collections import Counter
from threading import current_thread, main_thread

from pyllama_raw._ffi.openmp import SHORT_SPINS, ShortSpins
from pyllama_raw.core.policies.runner import PolicyFault, pass_on_interrupts
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.stats import StepTimes
from pyllama_raw.native import libllama as native

LEVELS = {
    native.DEBUG: logging.DEBUG,
    native.INFO: logging.INFO,
    native.WARN: logging.WARNING,
    native.ERROR: logging.ERROR,
}

_library_log = logging.getLogger("pyllama_raw.libllama")
_library_log.addHandler(
    logging.NullHandler()
)  # whoever sets up no logging is told nothing


def pass_on_lines() -> None:
    """Hand over what came since the last call; some levels may not be asked for."""
    for level, text in native.drain():
        _library_log.log(LEVELS.get(level, logging.INFO), "%s", text.strip())


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
            before, self._n_preempted = self._n_preempted, scheduler.stats().preempted
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
