"""The allocator of C, which keeps what is freed: in glibc a part of it for each thread."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Give back to the system what is free, where the allocator can be told to. Thread: any."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # of glibc
        library.malloc_trim(ctypes.c_size_t(0))
    elif hasattr(library, "malloc_zone_pressure_relief"):  # of macOS
        library.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
