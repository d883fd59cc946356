"""
The bytes of an upload: given, or in a file; and as a decoder reads them.

A decoder reads within bounds, and until it is stopped.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, TypeGuard

from pyllama_raw.errors import BadMedia, shown

MAX_BYTES = 2**28  # whatever the limits of an engine

Source = bytes | bytearray | memoryview | os.PathLike[str]
Stop = Callable[[], bool]


class DecodeStopped(Exception):
    """Nobody wants what is decoded any more."""


def never() -> bool:
    """Decode to the end."""
    return False


class Upload(BytesIO):
    """
    A file in memory.

    Args:
        max_reads: calls that read or seek; what is in millions of tiny parts takes a
            decoder seconds, and is no image or sound of anybody.
        stop: whether to end soon.

    Raises, from read():
        BadMedia: it takes more reads.
        DecodeStopped: *stop* says so.
    """

    def __init__(self, content: bytes, max_reads: int, stop: Stop = never) -> None:
        super().__init__(content)
        self._n_left, self._stop = max_reads, stop

    def read(self, size: int | None = -1, /) -> bytes:
        if self._stop():
            raise DecodeStopped
        if not self._spend():
            raise BadMedia("it has too many parts: save it anew")
        return super().read(size)

    def readinto(self, buffer: Any, /) -> int:
        """Read as read() does, but end where read() raises, because C calls it."""
        return super().readinto(buffer) if self._spend() else 0

    def _spend(self) -> bool:
        self._n_left -= 1
        return self._n_left >= 0


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
