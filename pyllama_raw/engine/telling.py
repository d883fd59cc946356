"""Lines in the log of Python about an engine that runs."""

from __future__ import annotations

import logging

from pyllama_raw.core.scheduling.scheduler import Scheduler

_log = logging.getLogger("pyllama_raw.engine")


class Teller:
    """Compares what an engine has done with what was told."""

    def __init__(self) -> None:
        self._n_preempted = self._n_evicted = 0

    def tell(self, scheduler: Scheduler) -> None:
        """Called a few times a second, and when requests end."""
        if _log.isEnabledFor(logging.INFO):
            self._tell_preempted(scheduler)
        if _log.isEnabledFor(logging.DEBUG):
            self._tell_evicted(scheduler)

    def _tell_preempted(self, scheduler: Scheduler) -> None:
        before, self._n_preempted = self._n_preempted, scheduler.stats().preempted
        if self._n_preempted > before:
            n_new = self._n_preempted - before
            _log.info("preempted %d times (%d in all)", n_new, self._n_preempted)

    def _tell_evicted(self, scheduler: Scheduler) -> None:
        evictions = scheduler.cache_stats().n_evictions
        before, self._n_evicted = self._n_evicted, sum(evictions.values())
        if self._n_evicted > before:
            by_reason = ", ".join(f"{why}: {n}" for why, n in evictions.items() if n)
            n_new = self._n_evicted - before
            _log.debug("the cache let %d snapshots go (in all %s)", n_new, by_reason)
