"""
This machine: CPUs for computing, load by other processes, the Python of child processes, memory.

Rules:
1. The number of threads is that of physical cores, within what this process may use. Two threads on
   one core share its vector units, so the second one adds little. A cgroup stops all threads of a
   process for the rest of a period once they have used up its quota, and libllama's threads use CPU
   time also while they wait for each other. So a quota of one and a half CPUs is one thread.
2. Nothing is started that is no Python. A program that is frozen into one file, or embeds Python, has
   itself as `sys.executable`. To start that would start the program again, which would open its
   engine and start it again, without end. So each child process of this package asks here.
3. The standard library suffices, because `tune` needs no extra.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

# -- CPUs -----------------------------------------------------------------------

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


# -- load -----------------------------------------------------------------------

MAX_OTHERS = 0.1  # CPUs other processes may use while times are taken
STAT = Path("/proc/stat")

Clock = Callable[[], float]


def busy_s() -> float | None:
    """CPU time of the whole machine that was not idle; None if it does not tell."""
    if not STAT.exists():
        return None
    # user nice system idle iowait irq softirq steal, then guests, which are in user, too
    user, nice, system, _, _, *interrupts = map(int, STAT.read_text().split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def cpu_name() -> str:
    """The model of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    return next(names, platform.processor())


class OtherLoad:
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


# -- child processes ------------------------------------------------------------

VARIABLE = "PYLLAMA_RAW_PYTHON"
# Names of the programs of Python: python, python3.12, python3.13t, pypy3, Python (macOS).
NAMES = re.compile(
    r"(python|pypy|graalpy)[\d.]*[a-z]?(-intel64|-dbg)?(\.exe)?", re.IGNORECASE
)


class NoInterpreter(OSError):
    """There is no Python that child processes could run in; says what to set."""


def interpreter() -> str:
    """
    The path of the Python that child processes run in; any thread may call.

    It is the program that the variable PYLLAMA_RAW_PYTHON names, else that of this process.

    Raises:
        NoInterpreter: this process runs in no Python that can be started, and none is named.
    """
    if name := os.environ.get(VARIABLE):
        program = shutil.which(name)
        if program is None:
            text = f"{VARIABLE}={name!r} is no program: name one, as /usr/bin/python3"
            raise NoInterpreter(text)
        return program
    for path in _candidates():
        if NAMES.fullmatch(Path(path).name) and shutil.which(path) is not None:
            return path
    kind = "is a frozen application" if _is_frozen() else "embeds Python"
    raise NoInterpreter(
        f"this program {kind}, so it cannot start a Python of its own: name one of version "
        f"{sys.version_info[0]}.{sys.version_info[1]} by the variable {VARIABLE}"
    )


def has_own_path() -> bool:
    """Whether interpreter() may know other packages than this process does."""
    return bool(os.environ.get(VARIABLE)) or _is_frozen()


def _candidates() -> Iterator[str]:
    """Programs that may be the Python of this process, the likeliest first."""
    # In a frozen application this is the application, whatever its name is.
    frozen = sys.executable if _is_frozen() else None
    for path in (sys.executable, getattr(sys, "_base_executable", None)):
        if path and path != frozen:
            yield path
    # Where Python is embedded, its own program often lies beside its library.
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    yield str(Path(sys.base_prefix, "bin", f"python{version}"))


def _is_frozen() -> bool:
    return bool(getattr(sys, "frozen", False))


# -- memory ---------------------------------------------------------------------


def trim() -> None:
    """
    Give memory that is free back to the system, where the allocator of C can be told to.

    It keeps what is freed: in glibc a part of it for each thread. Thread: any.
    """
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # of glibc
        library.malloc_trim(ctypes.c_size_t(0))
    elif hasattr(library, "malloc_zone_pressure_relief"):  # of macOS
        library.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
