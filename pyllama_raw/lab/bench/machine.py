"""The machine that figures are taken on, and what a process uses of it."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from pyllama_raw import __version__
from pyllama_raw.errors import LibraryNotBuilt
from pyllama_raw.options.host import busy_s, cpu_name

PACKAGE = Path(__file__).resolve().parent
LOOK_S = 0.1  # between two looks at the memory of a process


@dataclass(slots=True)
class Use:
    """What a process and its children used while they were watched."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    others_cpus: float | None = None  # kept busy by others than it and this process


@contextmanager
def watching(pid: int | None) -> Iterator[Use]:
    """
    Watch the process *pid*; None: it is not known, and nothing but others_cpus is.

    The use is complete at the end of the block. Memory is looked at ten times a second,
    so a peak between two looks is missed.
    """
    use, done = Use(), threading.Event()
    watched = None if pid is None else psutil.Process(pid)

    def look() -> None:
        while watched is not None and not done.wait(LOOK_S):
            use.peak_rss_bytes = max(use.peak_rss_bytes, _rss_bytes(watched))

    if watched is not None:
        use.peak_rss_bytes = _rss_bytes(watched)
    thread = threading.Thread(target=look, name="bench-watch", daemon=True)
    before, was_busy_s = _times(watched), busy_s()
    thread.start()
    try:
        yield use
    finally:
        use.wall_s, use.cpu_s, own_s = (
            b - a for a, b in zip(before, _times(watched), strict=True)
        )
        now_busy_s = busy_s()
        done.set()
        thread.join()
        if was_busy_s is not None and now_busy_s is not None:
            beside_s = 0.0 if pid == os.getpid() else own_s
            others_s = now_busy_s - was_busy_s - use.cpu_s - beside_s
            use.others_cpus = max(others_s, 0.0) / max(use.wall_s, 1e-3)


def _times(watched: psutil.Process | None) -> tuple[float, float, float]:
    """Wall, CPU time of the watched, of this process."""
    own_s = _cpu_s(psutil.Process())
    watched_s = 0.0 if watched is None else _cpu_s(watched)
    return time.monotonic(), watched_s, own_s


def _family(process: psutil.Process) -> list[psutil.Process]:
    """Itself, and its children unless it is this one: those are targets of their own."""
    if process.pid == os.getpid():
        return [process]
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _rss_bytes(process: psutil.Process) -> int:
    total = 0
    for member in _family(process):
        with suppress(psutil.NoSuchProcess):
            total += member.memory_info().rss
    return total


def _cpu_s(process: psutil.Process) -> float:
    total = 0.0
    for member in _family(process):
        with suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total += times.user + times.system
    return total


def machine() -> dict[str, object]:
    """Where and on what the figures were taken."""
    return {
        "cpu": cpu_name(),
        "n_cpus": os.cpu_count(),
        "devices": _devices(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "python": platform.python_version(),
        "pyllama_raw": __version__,
        "llama_cpp": _llama_version(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _devices() -> list[str]:
    """What libllama found beside the CPU, if it is there to ask."""
    try:
        from pyllama_raw.native.libllama import devices

        return [found.description for found in devices() if found.kind != "cpu"]
    except LibraryNotBuilt:
        return []


def _llama_version() -> str | None:
    """Of the library that is loaded; None if there is none."""
    try:
        from pyllama_raw.native.libllama import llama_version

        return llama_version()
    except LibraryNotBuilt:
        return None


def _commit() -> str | None:
    """Of the checkout this package lies in; None if it is installed."""
    command = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
