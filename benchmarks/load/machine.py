"""The machine under the figures: what it is, what else runs on it, what memory we hold."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]


class OthersCpu:
    """CPU time of the whole machine since now, without ours and our ended children's."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._busy_s, self._own_s = _busy_s(), _own_s()

    def n_cpus(self) -> float:
        """CPUs that others kept busy on average; children must have ended."""
        others_s = _busy_s() - self._busy_s - (_own_s() - self._own_s)
        return max(others_s, 0.0) / max(time.monotonic() - self._started, 1e-3)


def _busy_s() -> float:
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle_s - guests_s)  # guests are in user and nice, too


def _own_s() -> float:
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(
        usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, who)
    )


def machine() -> dict[str, object]:
    """Where and on what the figures were taken."""
    return {
        "cpu": _cpu(),
        "n_cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    return next(names, platform.processor())


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def settled_rss_bytes() -> int:
    """Resident memory of this process once all that is free has been given back."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)
