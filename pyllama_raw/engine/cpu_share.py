"""Whether the thread that computes has a CPU while it computes."""

from __future__ import annotations

from logging import getLogger

from pyllama_raw.core.stats import StepTimes

WINDOW_S = 1.0  # of decodes
LEAST = 0.6  # one neighbour with the same right to the CPUs leaves about half

_log = getLogger("pyllama_raw.engine")


class CpuShare:
    """
    CPU time of decodes, as a part of the time that they took.

    Who waits for another thread of libllama sleeps; so it is small also where only that other
    one has no CPU.
    """

    def __init__(self) -> None:
        self.latest: float | None = None  # of the latest window
        self._before = StepTimes()
        self._is_told = False

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
