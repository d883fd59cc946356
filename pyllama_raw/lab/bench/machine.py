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

from pyllama_raw.errors import LibraryNotBuilt
from pyllama_raw.options.machine import OtherLoad, cpu_name
from pyllama_raw.options.version import __version__

PACKAGE = Path(__file__).resolve().parent
LOOK_S = 0.1  # between two looks at the memory of a process


@dataclass(slots=True)
class Use:
    """Memory and time that a process and its children used while they were watched."""

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
    beside = set() if pid is None else {pid}

    def look() -> None:
        use.peak_rss_bytes = max(use.peak_rss_bytes, _used(pid)[1])

    def keep_looking() -> None:
        while not done.wait(LOOK_S):
            look()

    look()
    thread = threading.Thread(target=keep_looking, name="bench-watch", daemon=True)
    started, before_s = time.monotonic(), _used(pid)[0]
    neighbours = OtherLoad(
        own=lambda: sum(_used(process)[0] for process in {os.getpid(), *beside})
    )
    thread.start()
    try:
        with neighbours.watched():
            yield use
    finally:
        use.wall_s, use.cpu_s = time.monotonic() - started, _used(pid)[0] - before_s
        use.others_cpus = neighbours.cpus
        done.set()
        thread.join()


def _used(pid: int | None) -> tuple[float, int]:
    """CPU time in seconds and resident bytes of a process that may be gone, and its children."""
    cpu_s, rss_bytes = 0.0, 0
    for process in () if pid is None else _family(pid):
        with suppress(psutil.NoSuchProcess), process.oneshot():
            times = process.cpu_times()
            cpu_s += times.user + times.system
            rss_bytes += process.memory_info().rss
    return cpu_s, rss_bytes


def _family(pid: int) -> list[psutil.Process]:
    """Children of this process are targets of their own."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        children = [] if pid == os.getpid() else process.children(recursive=True)
        return [process, *children]
    return []


def machine() -> dict[str, object]:
    """The machine and the software that figures are taken on."""
    return {
        "cpu": cpu_name(),
        "n_cpus": os.cpu_count(),
        **_library(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "python": platform.python_version(),
        "pyllama_raw": __version__,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _library() -> dict[str, object]:
    """The version of libllama, and what it found beside the CPU, if it is there to ask."""
    try:
        from pyllama_raw.native.libllama import devices, llama_version
    except LibraryNotBuilt:
        return {"devices": [], "llama_cpp": None}
    names = [device.description for device in devices() if device.kind != "cpu"]
    return {"devices": names, "llama_cpp": llama_version()}


def _commit() -> str | None:
    """The commit of the checkout that this package lies in; None if it is installed."""
    command = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
