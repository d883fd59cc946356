"""What else runs on the machine, and what memory this process holds."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from pyllama_raw.options.machine import busy_s

ROOT = Path(__file__).resolve().parents[2]


class OthersCpu:
    """CPU time of the whole machine since now, without ours and our ended children's."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._busy_s, self._own_s = busy_s() or 0.0, _own_s()

    def n_cpus(self) -> float:
        """CPUs that others kept busy on average; children must have ended."""
        others_s = (busy_s() or 0.0) - self._busy_s - (_own_s() - self._own_s)
        return max(others_s, 0.0) / max(time.monotonic() - self._started, 1e-3)


def _own_s() -> float:
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(
        usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, processes)
    )


def settled_rss_bytes() -> int:
    """Resident memory of this process once all that is free has been given back."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def stolen_s() -> float:
    """For how long a hypervisor has run others on our CPUs, their mean; 0 if it never does."""
    stolen: float = getattr(psutil.cpu_times(), "steal", 0.0)
    return stolen / psutil.cpu_count()
