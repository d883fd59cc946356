"""
Time for which threads of libgomp wait awake at a barrier, before they sleep.

A thread that waits long keeps its CPU from the one that it waits for, where another program
computes. One that waits shortly sleeps too often, where the machine is quiet. So both: long, and
short while `SHORT_SPINS` is on. libgomp reads its variables once, when it is loaded, and then
waits shortly whenever it has more threads than CPUs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread

# A fifteenth of libgomp's own count, which costs nothing where the machine is quiet (10,000 cost 1.5 %
# on a Xeon with two cores), and the policy with which its short count is 1,000 instead of 100.
CHOICE = {"GOMP_SPINCOUNT": "20000", "OMP_WAIT_POLICY": "active"}


def has_choice() -> bool:
    """Whether the user has chosen how threads wait."""
    return any(name in os.environ for name in CHOICE)


@contextmanager
def choosing() -> Iterator[None]:
    """
    Let a libgomp that the block loads wait as CHOICE says, where the user has chosen nothing.

    Child processes inherit no variable of ours.
    """
    if has_choice():
        yield
        return
    os.environ.update(CHOICE)
    try:
        yield
    finally:
        for name in CHOICE:
            del os.environ[name]


class ShortSpins:
    """
    Short waits for all threads of libgomp in the process, while anybody wants them.

    A thread of ours then has a pool of one thread more than there are CPUs, all of them asleep.

    Thread:
        Any.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._n_users = 0
        self._over = Event()

    def begin(self) -> None:
        """Wait shortly, until as many end() as begin()."""
        with self._lock:
            self._n_users += 1
            if self._n_users == 1 and not has_choice():
                self._over = over = Event()
                name = "pyllama-spins"
                Thread(target=_have_pool, args=(over,), name=name, daemon=True).start()

    def end(self) -> None:
        """Take back one begin()."""
        with self._lock:
            self._n_users -= 1
            if not self._n_users:
                self._over.set()


def _have_pool(over: Event) -> None:
    """Enter a parallel region that does nothing, and keep its threads until *over*."""
    try:
        gomp = ctypes.CDLL("libgomp.so.1", os.RTLD_NOLOAD | os.RTLD_LAZY)
        do_nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of NULL
    except (AttributeError, OSError):  # not on Linux, or another OpenMP
        return
    gomp.GOMP_parallel(do_nothing, None, (os.cpu_count() or 1) + 1, 0)
    over.wait()


SHORT_SPINS = ShortSpins()
