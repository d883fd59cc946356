"""The bytes of an upload: given, or in a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pyllama_raw.errors import BadMedia, shown

MAX_BYTES = 2**28  # that are read of a file, whatever the limits of an engine

Source = bytes | bytearray | memoryview | os.PathLike[str]


def read_source(source: Source) -> bytes:
    """
    The bytes of *source*; a path is a Path, because a text of a stranger names no file.

    Raises:
        BadMedia: the file cannot be read, is none, or is too large.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    try:
        path = Path(source)
    except Exception as error:  # whatever a stranger's object raises
        raise BadMedia(f"{shown(source)} is no path: {shown(error)}") from error
    try:
        with open(path, "rb", opener=_open_at_once) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise BadMedia(
                    f"{path.name}: regular files of at most {MAX_BYTES} bytes go"
                )
            return stream.read()
    except (OSError, ValueError) as error:
        raise BadMedia(f"{path.name}: {error}") from error


def _open_at_once(path: str, flags: int) -> int:
    """A FIFO that nobody writes to would be waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
