"""The bytes of an upload: given, or in a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TypeGuard

from pyllama_raw.errors import BadMedia, shown

MAX_BYTES = 2**28  # whatever the limits of an engine

Source = bytes | bytearray | memoryview | os.PathLike[str]


def is_source(value: object) -> TypeGuard[Source]:
    return isinstance(value, bytes | bytearray | memoryview | os.PathLike)


def read_source(source: Source, max_bytes: int = MAX_BYTES) -> bytes:
    """
    The bytes of *source*; a path is a Path, because a text of a stranger names no file.

    Raises:
        BadMedia: the file cannot be read, is none, or is too large.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        check_bytes(memoryview(source).nbytes, max_bytes)
        return bytes(source)
    try:
        path = Path(source)
    except Exception as error:  # whatever a stranger's object raises
        raise BadMedia(f"{shown(source)} is no path: {shown(error)}") from error
    try:
        with open(path, "rb", opener=_open_at_once) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadMedia(f"{path.name} is no regular file")
            check_bytes(status.st_size, max_bytes)
            return stream.read()
    except (OSError, ValueError) as error:
        raise BadMedia(f"{path.name}: {error}") from error


def check_bytes(n_bytes: int, max_bytes: int, index: int | None = None) -> None:
    """Raise BadMedia if an upload has too many bytes."""
    if n_bytes > max_bytes:
        raise BadMedia(f"{n_bytes} bytes, at most {max_bytes} are allowed", index)


def _open_at_once(path: str, flags: int) -> int:
    """A FIFO that nobody writes to would be waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
