"""Which file a C function that is loaded comes from, as the system tells."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


class _Place(ctypes.Structure):
    """Dl_info of dladdr()."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def library_of(address: int) -> Path | None:
    """The library that has the function at *address*; None: the system does not tell."""
    place = _Place()
    try:
        dladdr = ctypes.CDLL(None).dladdr
    except AttributeError:
        return None
    has_place = dladdr(ctypes.c_void_p(address), ctypes.byref(place))
    return Path(os.fsdecode(place.file)) if has_place and place.file else None
