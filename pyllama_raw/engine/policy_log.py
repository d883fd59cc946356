"""
Faults of a scheduling policy in the log: each kind once, then every thousandth.

An interrupt is the user's in the main thread only. The engine thread has none, so there it is
a fault like any other.
"""

from __future__ import annotations

from collections import Counter
from logging import getLogger
from threading import current_thread, main_thread

from pyllama_raw.core.policies.runner import PolicyFault, pass_on_interrupts

EVERY = 1000

_log = getLogger(__name__)


class PolicyLog:
    """Tells of faults, at a rate that a policy which always fails does not raise."""

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
