"""Lines in the log of Python about an engine that runs."""

from __future__ import annotations

import logging
from collections import Counter
from threading import current_thread, main_thread

from pyllama_raw.core.policies.runner import PolicyFault, pass_on_interrupts
from pyllama_raw.core.scheduling.scheduler import Scheduler

EVERY = 1000

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
