"""
What is known of a library of C: how it was built, its version, and the file of a function.

`build_lib.py` loads this file by path: standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

RECORD = "build.json"  # beside the extension: how its library was built


class _Place(ctypes.Structure):
    """Dl_info of dladdr()."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def record_in(folder: Path) -> dict[str, str]:
    """How the library of the extension was built; empty: nobody wrote it down."""
    path = folder / RECORD
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def version_of(library: Path) -> str:
    """
    What a libllama says of itself: its version, and the commit of its ggml.

    Raises:
        OSError: it cannot be loaded.
    """
    if path := cut_short(libraries_in(library.parent)):
        raise OSError(f"{path} is cut short, as by a full disk")
    loaded = ctypes.CDLL(str(library))
    words = []
    for name in ("llama_version", "ggml_commit"):
        try:
            function = getattr(loaded, name)
        except AttributeError:  # a llama.cpp of long ago
            continue
        function.restype = ctypes.c_char_p
        words.append(function().decode("utf-8", "replace"))
    return ", ".join(words) or "unknown"


def lacks_its_end(library: Path) -> bool:
    """
    Whether a library of Linux is cut short, as by a full disk. The system would load it, and end the
    process with SIGBUS where the file ends.
    """
    with library.open("rb") as file:
        start = file.read(64)  # the header of a 64-bit ELF
        n_bytes = os.fstat(file.fileno()).st_size
    if len(start) < 64 or not start.startswith(b"\x7fELF\x02\x01"):
        return False  # of another system, or too short to be loaded at all
    # The table of its sections is written last.
    (table,) = struct.unpack_from("<Q", start, 0x28)
    size, n_sections = struct.unpack_from("<HH", start, 0x3A)
    return bool(n_bytes < table + size * n_sections)


def cut_short(files: Iterable[Path]) -> Path | None:
    """The first of *files* that lacks its end; None: none does."""
    for path in files:
        # Of a link to nothing, or a file that is not for this user, the loader says it better.
        with suppress(OSError):
            if lacks_its_end(path):
                return path
    return None


def libraries_in(folder: Path) -> list[Path]:
    """Those of llama.cpp in *folder*, which may be one of the system."""
    names = ("libggml", "libllama", "libmtmd")
    return sorted(path for name in names for path in folder.glob(f"{name}*.so*"))


def library_of(address: int) -> Path | None:
    """The library that has the function at *address*; None: the system does not tell."""
    place = _Place()
    try:
        dladdr = ctypes.CDLL(None).dladdr
    except AttributeError:
        return None
    has_place = dladdr(ctypes.c_void_p(address), ctypes.byref(place))
    return Path(os.fsdecode(place.file)) if has_place and place.file else None
