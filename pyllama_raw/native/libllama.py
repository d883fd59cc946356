"""
The loaded libraries, initialised once, on first use of `lib` or `ffi`; what their codes mean; their
log; and pointers between Python and C.

`llama_backend_free` is never called: at the end of a process nothing is left to gain.

Log lines of llama.cpp are kept by the shim in a ring, and read here when somebody asks. No Python
runs inside a log callback. Debug lines are not kept.

Rules of pointers:
1. An object is freed once, and never before what was made from it. A parent that is closed while
   children are open is unusable at once, but freed only when the last child is. Hence any order of
   close() and of garbage collection is safe.
2. Arrays are of the standard library, or anything else with a buffer, such as numpy's. They are
   checked before C gets their address. numpy itself takes longer to import than a small model to
   load, so only what returns its arrays imports it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

from pyllama_raw import _ffi
from pyllama_raw._ffi.loaded import library_of
from pyllama_raw.errors import (
    ClosedError,
    ConfigError,
    DecodeAborted,
    DecodeFailed,
    InvalidBatch,
    LibraryNotBuilt,
    NativeError,
    NoKVSpace,
    Unsupported,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


__all__ = [
    "EXCEPTION",
    "Device",
    "check_decode",
    "check_states_of_files",
    "cpu_level",
    "cpu_variant",
    "decode_error",
    "device_pointers",
    "devices",
    "ffi",
    "last_error",
    "levels_in",
    "lib",
    "library_digest",
    "llama_version",
    "load",
    "need",
    "state_version",
    "system_info",
    "text",
]

_LIBRARY = re.compile(r"lib(llama|ggml|mtmd)[^/]*\.(so|dylib)\b")
WOVEN = "PYLLAMA_RAW_WOVEN"  # the level of our kernels for woven weights
_lock = threading.Lock()
_loaded: tuple[Any, Any] | None = None
_variant: _ffi.Variant | None = None
_address = 0  # of a function of libllama, once it is loaded


def load() -> tuple[Any, Any]:
    """
    Load and initialise libllama once; return (lib, ffi).

    Raises:
        LibraryNotBuilt: the extension or a backend is missing; the message says what to do.
        ConfigError: PYLLAMA_RAW_CPU or PYLLAMA_RAW_WOVEN names what this CPU cannot run.
    """
    global _loaded, _address, _variant  # noqa: PLW0603 -- one library a process
    with _lock:
        if _loaded is None:
            ffi, lib = _ffi.load()
            # Lines of the log and failed assertions go to the shim from the first call on.
            lib.plr_log_install()
            lib.plr_abort_install()
            # Before kernels are asked what they can do here.
            _variant = _ffi.use_variant(_ffi.LIBRARIES, lib)
            level = os.environ.get(WOVEN) or "auto"
            if not lib.plr_woven_choose(os.fsencode(level)):
                raise ConfigError(_wrong_woven(level, lib, ffi))
            # Backends that were built as modules are loaded here, others are there.
            if lib.ggml_backend_reg_count() == 0:
                lib.ggml_backend_load_all()
            if lib.ggml_backend_reg_count() == 0:
                raise LibraryNotBuilt(
                    "the installed llama.cpp has its backends as plug-ins (GGML_BACKEND_DL), and ggml "
                    "finds none: name the file of one by GGML_BACKEND_PATH, as "
                    "PREFIX/bin/libggml-cpu-haswell.so, or build llama.cpp with GGML_BACKEND_DIR, or "
                    "without GGML_BACKEND_DL"
                )
            lib.llama_backend_init()
            _address = int(ffi.cast("uintptr_t", ffi.addressof(lib, "llama_decode")))
            _loaded = lib, ffi
        return _loaded


def levels_in(lib: Any, ffi: Any) -> dict[str, bool]:
    """The levels of our kernels for woven weights, and whether this CPU has each, the least first."""
    levels: dict[str, bool] = {}
    is_usable = ffi.new("bool *")
    while name := lib.plr_woven_level(len(levels), is_usable):
        levels[ffi.string(name).decode()] = is_usable[0]
    return levels


def _wrong_woven(level: str, lib: Any, ffi: Any) -> str:
    """Why our kernels refuse *level*."""
    levels = {"auto": True} | levels_in(lib, ffi)
    here = ", ".join(name for name, is_here in levels.items() if is_here)
    problem = (
        f"this CPU does not have it; it has {here}"
        if level in levels
        else f"there is no such level; levels are {', '.join(levels)}, and this CPU has {here}"
    )
    return f"{WOVEN}={level}: {problem}: unset {WOVEN} to take the best of them"


class _Lazy:
    """Stands for one part of load() until an attribute is asked for."""

    def __init__(self, part: int) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        # From now on it is a plain attribute, which costs a call of C nothing.
        try:
            value = getattr(load()[self._part], name)
        except AttributeError:
            if not name.startswith("plr_"):  # an older llama.cpp may lack it: need()
                raise
            raise LibraryNotBuilt(
                f"the native library has no {name}, so it was compiled for another version of "
                "pyllama_raw than this one: run `pip install .` (or `pip install -e .`, or "
                "scripts/bootstrap) in the source tree"
            ) from None
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    from pyllama_raw._ffi._llama import ffi, lib
else:
    lib, ffi = _Lazy(0), _Lazy(1)


@dataclass(frozen=True, slots=True)
class Device:
    """A processor ggml can compute on."""

    name: str
    """Its name in options, which depends on the devices beside it."""
    description: str
    """Its model, in words."""
    kind: Literal["cpu", "gpu", "igpu", "accel", "other"]
    """What it is."""
    memory_free_bytes: int
    """Memory that is free now."""
    memory_total_bytes: int
    """Memory that it has."""
    stable_id: str = ""
    """Its place in the machine, as 0000:01:00.0, or its name: the same after a restart."""


def text(pointer: Any) -> str:
    """A C string as str; damaged UTF-8 is replaced, NULL is empty."""
    if not pointer:
        return ""
    raw: bytes = ffi.string(pointer)
    return raw.decode("utf-8", "replace")


def system_info() -> str:
    """Instruction sets and build options, as llama.cpp prints them."""
    return text(lib.llama_print_system_info())


def cpu_level() -> str:
    """The level of CPUs that the library and our kernels are built for; see _ffi/cpu_level.py."""
    return text(lib.plr_cpu_level())


def cpu_variant() -> _ffi.Variant | None:
    """The variant of the CPU backend that computes; None: the backend is linked."""
    load()
    return _variant


def llama_version() -> str:
    """Version of the llama.cpp that is loaded."""
    return text(lib.llama_version())


def need(operation: str, *names: str) -> None:
    """
    Raise Unsupported where the llama.cpp that is loaded is too old for *operation*.

    Args:
        names: functions and constants of C that it takes; scripts/c_fit.py lists what an older one lacks.
    """
    if lost := [name for name in names if not hasattr(lib, name)]:
        raise Unsupported(
            operation,
            f"llama.cpp {llama_version()}, which is loaded, has no {', '.join(lost)}",
            "build pyllama_raw with a newer llama.cpp, as the pinned one",
        )


def check_states_of_files() -> None:
    """Raise Unsupported where a file that anybody has forged would have libllama take all memory."""
    if not lib.plr_state_is_bounded():
        raise Unsupported(
            "states of slots in files",
            f"llama.cpp {llama_version()}, which is loaded, makes room for as many cells as a file says",
            "build pyllama_raw with a newer llama.cpp, as the pinned one, or mend that one: python -m "
            "scripts.llama_source before",
        )


def state_version() -> int:
    """The version of libllama's states of one sequence, by the header."""
    return int(lib.LLAMA_STATE_SEQ_VERSION)


@functools.cache
def library_digest() -> str:
    """
    A name for the files of llama.cpp, which `llama_version` does not tell apart for weeks.

    They are all of its libraries in the folder of the loaded libllama. The version counts, too:
    it is all that is known where the system does not tell the folder.

    Raises:
        OSError: a file cannot be read.
    """
    load()
    # The system says which file a function of libllama is from.
    path = library_of(_address)
    # Links to one file, as libllama.so.0 is, count once.
    names = () if path is None else path.parent.iterdir()
    files = {name.resolve() for name in names if _LIBRARY.match(name.name)}
    digest = sha256(llama_version().encode())
    for file in sorted(files):
        digest.update(sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def last_error() -> str:
    """The error that the shim caught last on this thread."""
    return text(lib.plr_last_error())


def device_pointers() -> dict[str, Any]:
    """ggml_backend_dev_t by name, in the order of ggml."""
    pointers = {}
    for index in range(lib.ggml_backend_dev_count()):
        device = lib.ggml_backend_dev_get(index)
        pointers[text(lib.ggml_backend_dev_name(device))] = device
    return pointers


def devices() -> tuple[Device, ...]:
    """Every device ggml found, the CPU included."""
    return tuple(_describe(name, ptr) for name, ptr in device_pointers().items())


def _describe(name: str, device: Any) -> Device:
    kinds: dict[int, Literal["cpu", "gpu", "igpu", "accel"]] = {
        lib.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
        lib.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
        lib.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu",
        lib.GGML_BACKEND_DEVICE_TYPE_ACCEL: "accel",
    }
    props = ffi.new("struct ggml_backend_dev_props *")
    lib.ggml_backend_dev_get_props(device, props)
    return Device(
        name=name,
        description=text(lib.ggml_backend_dev_description(device)),
        kind=kinds.get(lib.ggml_backend_dev_type(device), "other"),
        memory_free_bytes=int(props.memory_free),
        memory_total_bytes=int(props.memory_total),
        stable_id=text(props.device_id) or name,
    )


EXCEPTION = -1000  # errors.h: PLR_EXCEPTION

# llama.h, llama_decode:
#     Upon fatal-error or abort, the ubatches that managed to be been processed will remain
#     in the memory state of the context
#     Upon other return values, the memory state is restored to the state before this call
#      0 - success
#      1 - could not find a KV slot for the batch
#      2 - aborted     (processed ubatches will remain in the context's memory)
#     -1 - invalid input batch
#     < -1 - fatal error (processed ubatches will remain in the context's memory)
DECODE_ERRORS: dict[int, tuple[type[NativeError], str]] = {
    1: (NoKVSpace, "no room in the KV memory; nothing has changed"),
    2: (DecodeAborted, "stopped by the abort flag; some micro-batches were applied"),
    -1: (InvalidBatch, "the batch was refused; nothing has changed"),
    -2: (DecodeFailed, "memory for the graph could not be had"),
    -3: (DecodeFailed, "the computation failed"),
    EXCEPTION: (DecodeFailed, "a C++ exception"),
}


def decode_error(
    code: int, message: str = "", function: str = "llama_decode"
) -> NativeError:
    """The exception for *code*, which is not 0; *message* says more than its default."""
    kind, text = DECODE_ERRORS.get(code, (DecodeFailed, "unknown code"))
    return kind(function, code, f"{text}: {message}" if message else text)


def check_decode(code: int, message: str = "") -> None:
    """Raise what *code* stands for; 0 is success."""
    if code != 0:
        raise decode_error(code, message)


DEBUG, INFO, WARN, ERROR = 1, 2, 3, 4  # ggml.h: enum ggml_log_level

_MAX_LINES = 1024
_BUFFER_BYTES = 128 * 1024  # more than the ring holds
_lines: deque[LogLine] = deque(maxlen=_MAX_LINES)
_errors: deque[tuple[int, str]] = deque(maxlen=64)  # serial number, text
_n_read = 0
_log_lock = threading.Lock()  # of the ring; the other one is held while C is loaded


class LogLine(NamedTuple):
    """One line, without its newline."""

    level: int  # DEBUG, INFO, WARN or ERROR
    text: str


def drain() -> list[LogLine]:
    """Take all lines since the last call; the oldest beyond 1024 are gone."""
    with _log_lock:
        _read()
        lines = list(_lines)
        _lines.clear()
    return lines


_PYTHON_LEVELS = {
    DEBUG: logging.DEBUG,
    INFO: logging.INFO,
    WARN: logging.WARNING,
    ERROR: logging.ERROR,
}

_log = logging.getLogger("pyllama_raw.libllama")
_log.addHandler(logging.NullHandler())  # whoever sets up no logging is told nothing


def pass_on_lines() -> None:
    """Hand over to Python's log what came since the last call; some levels may not be asked for."""
    for level, text in drain():
        _log.log(_PYTHON_LEVELS.get(level, logging.INFO), "%s", text.strip())


def mark() -> int:
    """A moment in the log, for last_errors()."""
    with _log_lock:
        _read()
        return _n_read


def last_errors(since: int = 0, limit: int = 4) -> str:
    """The latest *limit* warnings and errors after mark *since*, in order, as one line."""
    with _log_lock:
        _read()
        recent = [text for serial, text in _errors if serial > since]
    return "; ".join(recent[-limit:])


def reason(since: int) -> str:
    """The cause of a failure after mark *since*: an exception of this thread, or the log."""
    return last_error() or last_errors(since) or "llama.cpp gave no reason"


def _read() -> None:
    """Move what the ring holds into _lines and _errors."""
    global _n_read  # noqa: PLW0603 -- one ring a process
    buffer = ffi.new("char[]", _BUFFER_BYTES)
    n_bytes = lib.plr_log_drain(buffer, _BUFFER_BYTES)
    for record in bytes(ffi.buffer(buffer, n_bytes)).split(b"\0"):
        # A record is a level byte and text; after level NONE (0) the split left only text.
        level = record[0] if record and record[0] < 8 else INFO
        text = record[1:] if record and record[0] < 8 else record
        for line in text.decode("utf-8", "replace").splitlines():
            if line.strip():
                _n_read += 1
                _lines.append(LogLine(level, line))
                # Failures are explained by these, long after a program has read its lines.
                if level in (WARN, ERROR):
                    _errors.append((_n_read, line.strip()))


# Re-entrant: a finaliser can run wherever Python allocates, also inside the lock.
_handles_lock = threading.RLock()


class _Resource:
    """The pointer, its free function and its open children; knows no Handle."""

    __slots__ = ("closed", "free", "n_children", "parents", "pointer")

    def __init__(
        self,
        pointer: Any,
        free: Callable[[Any], object],
        parents: list[_Resource],
    ) -> None:
        self.pointer = pointer
        self.free: Callable[[Any], object] | None = free
        self.parents = parents
        self.n_children = 0
        self.closed = False

    def close(self) -> None:
        """Free now, or when the last child is freed."""
        with _handles_lock:
            self.closed = True
            # Children still read it; the last of them calls this again.
            if self.n_children or self.free is None:
                return
            free, self.free = self.free, None
        # Without the lock: freeing may take long, and C may call back.
        free(self.pointer)
        self.pointer = None
        # Parents that were closed before can be freed now.
        parents, self.parents = self.parents, []
        for parent in parents:
            with _handles_lock:
                parent.n_children -= 1
            if parent.closed:
                parent.close()


class Handle:
    """
    One C object. Close it, leave its `with` block, or let it be collected.

    Args:
        pointer: to the object.
        free: called once with it.
        parents: freed after this one, in whatever order they are closed.

    Raises:
        MemoryError: *pointer* is NULL.
    """

    def __init__(
        self,
        pointer: Any,
        free: Callable[[Any], object],
        *,
        parents: Sequence[Handle] = (),
    ) -> None:
        if not pointer:
            raise MemoryError(f"no memory for {type(self).__name__}")
        # A closed parent is refused before anything is counted.
        with _handles_lock:
            owners = [parent._open_resource() for parent in parents]
            self._resource = _Resource(pointer, free, owners)
            for owner in owners:
                owner.n_children += 1
        self.closed = False
        # The resource knows no Handle, so the garbage collector can free this one.
        self._finalizer = weakref.finalize(self, self._resource.close)

    def _open_resource(self) -> _Resource:
        if self._resource.closed:
            raise ClosedError(f"{type(self).__name__} is closed")
        return self._resource

    def keep(self, parent: Handle) -> None:
        """Have *parent* freed after this one, as if it had been given at first."""
        with _handles_lock:
            owner = parent._open_resource()
            self._open_resource().parents.append(owner)
            owner.n_children += 1

    @property
    def ptr(self) -> Any:
        """The C pointer. Raises ClosedError after close()."""
        resource = self._resource
        if resource.closed:
            raise ClosedError(f"{type(self).__name__} is closed")
        return resource.pointer

    def close(self) -> None:
        """Free the object, at the latest when its last child is closed. Idempotent."""
        self.closed = True
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Array: TypeAlias = "array[Any] | NDArray[Any]"
Buffer: TypeAlias = "Array | bytes | memoryview"

# As the modules array and struct name them.
INT32, INT64, UINT8, UINT32, FLOAT32 = "i", "q", "B", "I", "f"

_C_NAMES = {
    INT32: "int32_t[]",
    INT64: "int64_t[]",
    UINT8: "uint8_t[]",
    UINT32: "uint32_t[]",
    FLOAT32: "float[]",
}


def pointer(
    values: Buffer, code: str, *, min_size: int = 0, writable: bool = False
) -> Any:
    """
    Address of the first element of *values*, which stay alive and in place meanwhile.

    Args:
        code: the type of an element: INT32, INT64, UINT8, UINT32 or FLOAT32.

    Raises:
        TypeError: another type, not one-dimensional, not C-contiguous, too short, or
            read-only where C writes; or a memoryview, because its address outlives it
            where the garbage collector clears both, which ends the process: see lent().
    """
    if isinstance(values, memoryview):
        raise TypeError("a memoryview is lent() to C only as long as a block runs")
    _check(values, code, min_size)
    return ffi.from_buffer(_C_NAMES[code], values, require_writable=writable)


@contextmanager
def lent(values: Buffer, code: str, *, writable: bool = False) -> Iterator[Any]:
    """The address of *values* within the block, as pointer() gives it."""
    _check(values, code)
    name = _C_NAMES[code]
    with ffi.from_buffer(name, values, require_writable=writable) as address:
        yield address


def _check(values: Buffer, code: str, min_size: int = 0) -> None:
    """Raise TypeError unless *values* are as pointer() needs them."""
    # numpy's stubs tell of its buffers from Python 3.12 on.
    with memoryview(values) as view:  # type: ignore[arg-type]
        if view.format != code or view.ndim != 1 or not view.c_contiguous:
            raise TypeError(
                f"need a contiguous one-dimensional array of {_C_NAMES[code]}, "
                f"got {view.format!r} of shape {view.shape}"
            )
        if len(view) < min_size:
            raise TypeError(
                f"the array has {len(view)} elements, {min_size} are needed"
            )


def zeros(code: str, count: int) -> array[Any]:
    """An array of *count* zeros."""
    return array(code, [0]) * count


def new_bytes(count: int) -> memoryview:
    """Writable memory of *count* bytes that are not set yet; MemoryError if there is none."""
    allocate = ffi.new_allocator(should_clear_after_alloc=False)
    return memoryview(ffi.buffer(allocate("uint8_t[]", count)))
