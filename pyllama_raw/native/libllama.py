"""
The loaded libraries, initialised once, on first use of `lib` or `ffi`; and what their codes mean.

`llama_backend_free` is never called: at the end of a process nothing is left to gain.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from pyllama_raw import _ffi
from pyllama_raw._ffi import variants
from pyllama_raw._ffi.loaded import library_of
from pyllama_raw.errors import (
    ConfigError,
    DecodeAborted,
    DecodeFailed,
    InvalidBatch,
    NativeError,
    NoKVSpace,
)

__all__ = [
    "EXCEPTION",
    "Device",
    "check_decode",
    "cpu_level",
    "cpu_variant",
    "decode_error",
    "device_pointers",
    "devices",
    "ffi",
    "last_error",
    "lib",
    "library_digest",
    "llama_version",
    "load",
    "state_version",
    "system_info",
    "text",
]

_LIBRARY = re.compile(r"lib(llama|ggml|mtmd)[^/]*\.(so|dylib)\b")
WOVEN = "PYLLAMA_RAW_WOVEN"  # the level of our kernels for woven weights
_lock = threading.Lock()
_loaded: tuple[Any, Any] | None = None
_variant: variants.Variant | None = None
_address = 0  # of a function of libllama, once it is loaded


def load() -> tuple[Any, Any]:
    """
    Load and initialise libllama once; return (lib, ffi).

    Raises:
        LibraryNotBuilt: the extension is missing; the message says what to do.
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
            _variant = variants.use(_ffi.LIBRARIES, lib)
            level = os.environ.get(WOVEN) or "auto"
            if not lib.plr_woven_choose(level.encode()):
                raise ConfigError(
                    f"{WOVEN}={level}: levels are auto, plain, avx2, avxvnni and avx512vnni, "
                    f"and this CPU does not have this one: unset {WOVEN}"
                )
            # Backends that were built as modules are loaded here, others are there.
            if lib.ggml_backend_reg_count() == 0:
                lib.ggml_backend_load_all()
            lib.llama_backend_init()
            _address = int(ffi.cast("uintptr_t", ffi.addressof(lib, "llama_decode")))
            _loaded = lib, ffi
        return _loaded


class _Lazy:
    """Stands for one part of load() until an attribute is asked for."""

    def __init__(self, part: int) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        # From now on it is a plain attribute, which costs a call of C nothing.
        value = getattr(load()[self._part], name)
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


def cpu_variant() -> variants.Variant | None:
    """The variant of the CPU backend that computes; None: the backend is linked."""
    load()
    return _variant


def llama_version() -> str:
    """Version of the llama.cpp that is loaded."""
    return text(lib.llama_version())


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
