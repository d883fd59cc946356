"""
Leases: a model has a slot on each device that computes it, from before its load until it is gone.

Rules:
1. A slot is a file. The process that holds the lock of the file has the slot, and the system
   drops the lock of a process that dies. What such a process leaves is taken over.
2. A lease is of all its devices, or of none.
3. A file goes before its lock does. A lock counts only while its file is at its path.
4. A fork has no lease of its parent.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from pyllama_raw.errors import LeaseRefused
from pyllama_raw.native.libllama import Device, devices
from pyllama_raw.options.config import LeaseConfig


class Place(NamedTuple):
    """A device that can be leased."""

    key: str
    free_bytes: int | None  # None: it does not tell


class Lease:
    """Slots that are held until release()."""

    def __init__(self) -> None:
        self.files: dict[Path, int] = {}  # descriptors, whose locks are ours
        _leases.add(self)

    def take(self, place: Place, config: LeaseConfig, directory: Path) -> None:
        """Hold a slot of *place*, too. Raises LeaseRefused."""
        free, margin = place.free_bytes, config.margin_bytes
        # The device is too full, whoever fills it.
        if free is not None and free < margin:
            reason = f"has {free} bytes free, the safety margin is {margin}"
            raise LeaseRefused(place.key, f"{reason}: free some, or lower margin_bytes")
        # The first slot whose file nobody has locked.
        for slot in range(config.max_models):
            path = directory / f"gpu-{place.key}-slot-{slot}.lock"
            file = _locked(path)
            if file is not None:
                self.files[path] = file
                holder = {"pid": os.getpid(), "device": place.key, "slot": slot}
                holder["created_at_unix_ms"] = time.time_ns() // 10**6
                os.ftruncate(file, 0)  # what it says is for people
                os.pwrite(file, json.dumps(holder).encode(), 0)
                return
        reason = f"already has {config.max_models} models, which max_models allows"
        raise LeaseRefused(place.key, f"{reason}: close one, or raise max_models")

    def release(self) -> None:
        """Give the slots back; can be repeated."""
        while self.files:
            path, file = self.files.popitem()
            path.unlink(missing_ok=True)
            os.close(file)


_leases = WeakSet[Lease]()


def take_lease(
    options: Mapping[str, Any], machine: Iterable[Device] | None = None
) -> Lease | None:
    """
    A lease for a model that is loaded by *options*, fields of ModelConfig; None: it wants none.

    Args:
        machine: devices of the machine. None: those that libllama finds.

    Raises:
        LeaseRefused: a device is full or short of memory, or the directory is of no use;
            nothing is held.
    """
    if options.get("lease") is None or options.get("n_gpu_layers") == 0:
        return None
    config = LeaseConfig(**options["lease"])
    places = places_of(options, devices() if machine is None else machine)
    # It is computed by CPUs, which nobody leases.
    if not places:
        return None
    lease = Lease()
    try:
        directory = _directory(config)
        for place in places:
            lease.take(place, config, directory)
    except BaseException as error:
        lease.release()
        # The directory is of no use: no slot could be had of any device.
        if not isinstance(error, OSError):
            raise
        raise LeaseRefused(places[0].key, f"has no slots: {error}") from error
    return lease


def places_of(options: Mapping[str, Any], machine: Iterable[Device]) -> list[Place]:
    """Devices among *machine* that compute a model of *options*, by their keys."""
    names = options.get("devices")
    used: list[Place] = []
    for index, device in enumerate(machine):
        if device.kind in ("gpu", "igpu") and (names is None or device.name in names):
            name = device.stable_id or device.name or f"gpu-{index}"
            key = re.sub(r"[^A-Za-z0-9_-]", "_", name)  # that a file may be named by
            free = device.memory_free_bytes if device.memory_total_bytes else None
            used.append(Place(key, free))
    # One device has the whole model.
    if options.get("split_mode") == "none":
        main_gpu = options.get("main_gpu", 0)
        used = used[main_gpu : main_gpu + 1]
    # All processes take devices in one order, so two do not refuse each other.
    by_key = {place.key: place for place in reversed(used)}
    return [by_key[key] for key in sorted(by_key)]


def _directory(config: LeaseConfig) -> Path:
    if config.directory is not None:
        directory = Path(config.directory)
        directory.mkdir(parents=True, exist_ok=True)
        return directory
    directory = Path(tempfile.gettempdir()) / f"pyllama-raw-leases-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise LeaseRefused(str(directory), "is of another user: name a lease.directory")
    return directory


def _locked(path: Path) -> int | None:
    """The file at *path*, made if need be, with its lock; None: another one has the lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        with ExitStack() as resources:
            resources.callback(os.close, file := os.open(path, flags, 0o600))
            try:
                flock(file, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                return None
            with suppress(FileNotFoundError):  # its last owner may have deleted it
                if os.path.samestat(path.stat(), os.fstat(file)):
                    resources.pop_all()
                    return file


def _begin_anew() -> None:
    """Leave the slots to the parent process."""
    for lease in tuple(_leases):
        while lease.files:
            os.close(lease.files.popitem()[1])


os.register_at_fork(after_in_child=_begin_anew)
