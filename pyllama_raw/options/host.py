"""
The load of this machine by other processes.

The standard library suffices, because `tune` needs no extra.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_OTHERS = 0.1  # CPUs other processes may use while times are taken
STAT = Path("/proc/stat")

Clock = Callable[[], float]


def busy_s() -> float | None:
    """CPU time of the whole machine that was not idle; None if it does not tell."""
    if not STAT.exists():
        return None
    # user nice system idle iowait irq softirq steal, then guests, which are in user, too
    user, nice, system, _, _, *rest = map(int, STAT.read_text().split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def cpu_name() -> str:
    """The model of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    return next(names, platform.processor())


class Others:
    """The number of CPUs that other processes kept busy, over all watched blocks."""

    def __init__(
        self,
        busy: Callable[[], float | None] = busy_s,
        own: Clock = own_s,
        clock: Clock = time.monotonic,
    ) -> None:
        self._busy, self._own, self._clock = busy, own, clock
        self._others_s = self._wall_s = 0.0

    @property
    def cpus(self) -> float | None:
        """The mean; None if nothing was watched or the machine does not tell."""
        return max(self._others_s / self._wall_s, 0.0) if self._wall_s else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count what runs during the block."""
        before, own, started = self._busy(), self._own(), self._clock()
        try:
            yield
        finally:
            after = self._busy()
            if before is not None and after is not None:
                self._others_s += after - before - (self._own() - own)
                self._wall_s += self._clock() - started
