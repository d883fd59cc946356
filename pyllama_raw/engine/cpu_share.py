"""Whether the thread that computes has a CPU while it computes, and what follows if not."""

from __future__ import annotations

from logging import getLogger

from pyllama_raw._ffi.openmp import SHORT_SPINS, ShortSpins
from pyllama_raw.core.stats import StepTimes

WINDOW_S = 0.5  # of decodes
LEAST = 0.75  # one neighbour with the same right to the CPUs leaves about half
# Of decodes with short waits, before long ones are tried again.
FIRST_S, LONGEST_S = 2.0, 16.0

_log = getLogger("pyllama_raw.engine")


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
        is_small = self.latest < LEAST
        if is_small and not self._is_told:
            _log.info(
                "decodes take %.1f times their CPU time: other programs compute on the same "
                "CPUs, fewer CPUs are granted than n_threads, or libgomp may not spin",
                wall_s / max(cpu_s, 1e-9),
            )
        self._is_told = is_small
        if self._left_s is None:
            if is_small:
                more_s = 2 * self._hold_s if self._tries else FIRST_S
                self._left_s = self._hold_s = min(more_s, LONGEST_S)
                self._spins.begin()
            self._tries = False
        else:
            self._left_s -= wall_s
            if self._left_s <= 0:
                self.close()
                self._tries = True

    def close(self) -> None:
        """Let threads wait long; can be repeated."""
        if self._left_s is not None:
            self._left_s = None
            self._spins.end()
