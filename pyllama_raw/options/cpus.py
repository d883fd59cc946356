"""
The number of CPUs for computing: physical cores, within what this process may use.

Two threads on one core share its vector units, so the second one adds little. A cgroup
stops all threads of a process for the rest of a period once they have used up its quota,
and libllama's threads use CPU time also while they wait for each other. So a quota of one
and a half CPUs is one thread.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath

Read = Callable[[str], str | None]  # the text of a file; None: it cannot be read

# A cgroup of this process: its controllers, none for version 2, and its path.
CGROUP = re.compile(r"^\d+:([^:]*):(.*)$", re.MULTILINE)
# What is mounted: the part of it, where, the kind and its options (man 5 proc).
MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .*- (\S+) \S+ (\S+)$", re.MULTILINE)
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def n_threads() -> int:
    """One thread a physical core, within the CPUs and the quota of this process."""
    if sys.platform == "darwin":
        return _n_cores_of_macos() or n_cpus()
    return _threads_here(frozenset(_usable_cpus()))


def n_cpus() -> int:
    """Logical CPUs that this process may use."""
    return len(_usable_cpus())


def threads_for(cpus: Collection[int], read: Read) -> int:
    """
    One thread for each core that *cpus* belong to, within the cgroup quota; at least 1.

    Args:
        cpus: numbers of the logical CPUs that may be used.
        read: of files in /proc and /sys.
    """
    cores = {read(SIBLINGS.format(cpu)) or str(cpu) for cpu in cpus}
    quotas = (_quota(folder, read) for folder in _cgroups(read))
    return max(1, min([len(cores), *(q for q in quotas if q is not None)]))


@functools.cache
def _threads_here(cpus: frozenset[int]) -> int:
    return threads_for(cpus, _read)


def _quota(cgroup: PurePosixPath, read: Read) -> int | None:
    """Whole CPUs that *cgroup* may use; None: no limit, or none of its own."""
    # Version 2 has "150000 100000" or "max 100000" in one file, version 1 two files.
    fields = (read(f"{cgroup}/cpu.max") or "").split()
    if not fields:
        texts = (read(f"{cgroup}/cpu.cfs_{x}_us") for x in ("quota", "period"))
        fields = [text.strip() for text in texts if text]
    if len(fields) != 2 or not all(field.isdecimal() for field in fields):
        return None  # "max", or -1
    quota, period = map(int, fields)
    return quota // period if period else None


def _cgroups(read: Read) -> Iterator[PurePosixPath]:
    """Folders of the cgroups that limit the CPU time of this process, innermost first."""
    mounts = MOUNT.findall(read("/proc/self/mountinfo") or "")
    for controllers, path in CGROUP.findall(read("/proc/self/cgroup") or ""):
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root, point, kind, options in mounts:
            # Version 1 mounts a tree for each controller, version 2 one for all.
            fits = "cpu" in options.split(",") if controllers else kind == "cgroup2"
            if kind.startswith("cgroup") and fits:
                yield from _with_parents(*map(PurePosixPath, (path, root, point)))


def _with_parents(
    path: PurePosixPath, root: PurePosixPath, point: PurePosixPath
) -> Iterator[PurePosixPath]:
    """The folders of *path* and of what it lies in, where *root* is mounted at *point*."""
    inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
    for part in (inside, *inside.parents):
        yield point / part


def _usable_cpus() -> Collection[int]:
    if sys.platform != "darwin" and hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except (OSError, ValueError):
        return None


@functools.cache
def _n_cores_of_macos() -> int | None:
    """Fast cores of a Mac: the slow ones would keep those waiting."""
    import subprocess  # nothing else needs it

    for name in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
        command = ["/usr/sbin/sysctl", "-n", name]
        try:
            done = subprocess.run(  # noqa: S603 - a fixed command
                command, capture_output=True, text=True, check=False
            )
        except OSError:
            return None
        if done.stdout.strip().isdecimal() and int(done.stdout) > 0:
            return int(done.stdout)
    return None
