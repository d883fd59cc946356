"""
Models that engines share: a process loads each once.

Rules:
1. Two are the same if their files are, unchanged, and their options are equal.
2. A user that comes while a model loads waits for it. One that leaves does not disturb the
   others; the loading stops when all have left.
3. The weights are freed when the last user leaves. Any thread may come and leave.
4. The lease of devices is taken before the load, and given back after all else.

A fingerprint stands for all that must be equal for a state to be of use in another process.

Leases: a model has a slot on each device that computes it, from before its load until it is gone.
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
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import partial
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from threading import Event, RLock, Thread
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

from pyllama_raw.errors import ClosedError, LeaseRefused, ModelLoadFailed
from pyllama_raw.native.gguf import split_names
from pyllama_raw.native.kernels import table
from pyllama_raw.native.libllama import (
    Device,
    devices,
    library_digest,
    state_version,
    system_info,
)
from pyllama_raw.native.model import LoadProgress, Model

if TYPE_CHECKING:
    from pyllama_raw.options.config import LeaseConfig

# "PLR"; the last byte is the version of files of states, and of their index
LAYOUT = 0x504C5203

MAX_HEAD_BYTES = 2**23  # read of the metadata of a model; most have less
MAX_PART_BYTES = 2**20  # of a further file: a list of its tensors
N_BLOCKS = 512  # read of the tensors of a model, all its files together
MIN_BLOCKS = 8  # of each file
BLOCK_BYTES = 4096
WITHOUT_EFFECT = {"n_threads", "n_threads_batch", "n_batch", "n_ubatch"}


class ModelFile(NamedTuple):
    """
    A file as the file system knows it.

    Copying another file over it, or to its place, changes the times or the inode. So do
    a copy of all files from a backup, a new owner and another name: too often rather than
    too seldom, because a wrong state is worse than a cold cache.
    """

    path: str
    n_bytes: int
    inode: int
    mtime_ns: int
    ctime_ns: int


def model_files(path: Path) -> tuple[ModelFile, ...]:
    """The file at *path*, or all parts of a split model; () if it cannot be found."""
    try:  # libllama, too, finds the other parts by their names
        parts = list(takewhile(Path.exists, map(Path, split_names(str(path)))))
        return tuple(map(_look_at, parts if path in parts else [path]))
    except (OSError, ValueError):  # NUL in the path: whoever loads it says so
        return ()


def _look_at(path: Path) -> ModelFile:
    status = path.stat()
    return ModelFile(
        str(path.resolve()),
        status.st_size,
        status.st_ino,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def fingerprint(
    files: Sequence[ModelFile],
    tensor_bytes: int,
    model_fields: Mapping[str, object],
    context_fields: Mapping[str, object],
) -> str:
    """
    32 hexadecimal digits for the model in *files*, loaded and used with these fields, here.

    A file that was changed in place, moved or touched counts as another model. File
    systems exist that keep neither inodes nor times, so samples of the contents count,
    too: all metadata, and blocks at equal distances in the tensors. The layout of a state is
    libllama's, whose files therefore count. Last bits depend on the instructions that the
    library and our kernels use, so these count as well.

    Args:
        tensor_bytes: of all files; what else is in them is metadata.

    Raises:
        OSError: a file cannot be read.
    """
    # Tensors are at the end of a file, so no more than this comes before them.
    n_head = max(sum(file.n_bytes for file in files) - tensor_bytes, BLOCK_BYTES)
    # A split model repeats little of its metadata, so less is read of the other parts.
    heads = [
        min(n_head, MAX_HEAD_BYTES if i == 0 else MAX_PART_BYTES)
        for i in range(len(files))
    ]
    n_blocks = max(N_BLOCKS // len(files), MIN_BLOCKS)
    # Threads and sizes of batches change no state.
    used = {k: v for k, v in context_fields.items() if k not in WITHOUT_EFFECT}
    # The layout of a state, the kernels that computed it, the model, and how it is used.
    facts = [
        [LAYOUT, state_version(), library_digest()],
        [sys.byteorder, system_info(), table()],
        [[*f, _sample(f, n, n_blocks)] for f, n in zip(files, heads, strict=True)],
        dict(model_fields),
        used,
    ]
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _sample(file: ModelFile, n_head: int, n_blocks: int) -> str:
    """The digest of the first *n_head* bytes and of blocks that are spread over the rest."""
    n_between = max(file.n_bytes - n_head - BLOCK_BYTES, 0)
    with Path(file.path).open("rb", buffering=0) as stream:
        digest = sha256(stream.read(n_head))
        # At equal distances, the last block included.
        for i in range(n_blocks):
            at = n_head + n_between * i // (n_blocks - 1)
            digest.update(os.pread(stream.fileno(), BLOCK_BYTES, at))
    return digest.hexdigest()


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
    A lease for a model that is loaded by *options*; None: it wants none.

    Args:
        machine: devices of the machine. None: those that libllama finds.

    Raises:
        LeaseRefused: a device is full or short of memory, or the directory is of no use;
            nothing is held.
    """
    if options.get("lease") is None or options.get("n_gpu_layers") == 0:
        return None
    config: LeaseConfig = options["lease"]
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


T = TypeVar("T")
Report = Callable[[float], bool]  # gets the loaded fraction; False: do not go on
POLL_S = 0.05  # between two reports


class Shared(Generic[T]):
    """
    Values that a process makes once for all who want the same, by their keys. Thread: any.

    A fork finds none of them, because no thread of its own loads or encodes, and nobody there
    lets go of a lock.
    """

    def __init__(self) -> None:
        self._users = Counter[T]()
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self.lock = RLock()  # a finaliser can leave where it is held
        self._values: dict[object, T] = {}

    def __len__(self) -> int:
        return len(self._values)

    def enter(self, key: object, make: Callable[[], T]) -> T:
        """Use the value of *key*, which *make* makes while others wait, if there is none."""
        with self.lock:
            value = self._values[key] if key in self._values else make()
            self._values[key] = value
            self._users[value] += 1
            return value

    def share(self, value: T) -> None:
        """Another one uses *value*."""
        with self.lock:
            self._users[value] += 1

    def leave(self, value: T) -> bool:
        """One user leaves; True: the last one, who is to free *value*."""
        with self.lock:
            self._users[value] -= 1
            if self._users[value] > 0:
                return False
            del self._users[value]
            self.forget(value)
            return True

    def forget(self, value: T) -> None:
        """Whoever comes from now on makes another one."""
        with self.lock:
            self._values = {k: v for k, v in self._values.items() if v is not value}


class ModelUse:
    """One user of a model, who is counted already, until close()."""

    def __init__(self, loading: _Loading) -> None:
        self._loading: _Loading | None = loading

    @property
    def model(self) -> Model:
        """Raises ClosedError after close()."""
        return self._open.loaded

    @property
    def files(self) -> tuple[ModelFile, ...]:
        """Files of the model, as they were before it was loaded."""
        return self._open.files

    @property
    def closed(self) -> bool:
        return self._loading is None

    def share(self) -> ModelUse:
        """Another user of the same model. Raises ClosedError after close()."""
        with _models.lock:
            loading = self._open
            _models.share(loading)
            return ModelUse(loading)

    def close(self) -> None:
        """Leave; the last one frees the model. Idempotent."""
        with _models.lock:
            loading, self._loading = self._loading, None
        # The last one frees it, outside of the lock, because that takes long.
        if loading is not None and _models.leave(loading):
            loading.end()

    @property
    def _open(self) -> _Loading:
        if self._loading is None:
            raise ClosedError("the model is closed: open it again")
        return self._loading


class _Loading:
    """A model that is loaded, or being loaded by a thread of its own."""

    def __init__(
        self, path: Path, files: tuple[ModelFile, ...], options: Mapping[str, Any]
    ) -> None:
        self.files = files
        self._path, self._options = path, options
        self._lease: Lease | None = None
        self._progress = LoadProgress()
        self._model: Model | None = None
        self._error: BaseException | None = None
        self._done = Event()
        self._thread = Thread(target=self._load, name="pyllama-model")
        self._thread.start()

    @property
    def loaded(self) -> Model:
        assert self._model is not None
        return self._model

    def wait(self, report: Report) -> None:
        """Until the model is loaded; raises why it could not be, or what *report* does."""
        # The caller may give up between two looks. Others may go on waiting for the same load.
        while not self._done.wait(POLL_S):
            if report(self._progress.fraction) is False:
                reason = "cancelled by the progress function"
                raise ModelLoadFailed(str(self._path), reason)
        # All that have waited are told, each by an error of its own.
        if self._error is not None:
            error = copy(self._error)  # each user that waits raises one of its own
            raise error.with_traceback(self._error.__traceback__)
        report(1.0)

    def end(self) -> None:
        """Nobody uses it any more."""
        # A load that nobody waits for stops.
        self._progress.cancel()
        self._thread.join()
        try:
            if self._model is not None:
                self._model.close()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if self._lease is not None:
            self._lease.release()

    def _load(self) -> None:
        options = {**self._options}
        try:
            if options.pop("lease", None) is not None:
                self._lease = take_lease(self._options)
            self._model = Model.load(self._path, progress=self._progress, **options)
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            self._give_back()
            self._error = error
            _models.forget(self)  # the next one tries again
        self._done.set()


_models = Shared[_Loading]()


def open_model(
    path: Path, options: Mapping[str, Any], report: Report = lambda _: True
) -> ModelUse:
    """
    A user of the model at *path*; blocks while it loads.

    Args:
        options: see ModelConfig.opening.
        report: called in this thread about every 50 ms.

    Raises:
        ModelLoadFailed, ConfigError: as Model.load().
        LeaseRefused: there is no slot for it.
    """
    files = model_files(path)
    # Equal files and equal options are one model. A path stands for files that cannot be read.
    key = files or str(path), repr(sorted(options.items()))  # repr: True is not 1
    loading = _models.enter(key, partial(_Loading, path, files, options))
    use = ModelUse(loading)
    try:
        loading.wait(report)
    except BaseException:
        use.close()
        raise
    return use
