"""
Engines that were never closed end before the interpreter does.

A daemon thread inside C while Python is taken down can crash the process, and a thread
that is joined too early can hang it; `atexit` runs between the two.
"""

from __future__ import annotations

import atexit
from typing import Protocol
from weakref import WeakSet

JOIN_S = 30.0  # longer than any step that cannot be aborted should take


class Closable(Protocol):
    """An engine thread, as this file sees it."""

    def close(self) -> object: ...
    def join(self, timeout_s: float, /) -> object: ...


_threads: WeakSet[Closable] = WeakSet()


def close_at_exit(thread: Closable) -> None:
    """Close *thread* when the interpreter ends, unless that happened before."""
    # The newest is called first: before the finalisers of what the thread uses.
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    _threads.add(thread)


def _close_all() -> None:
    threads = list(_threads)
    for thread in threads:
        thread.close()
    for thread in threads:
        thread.join(JOIN_S)
