"""Files that a model is made of, and what tells that one of them is another one now."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from pyllama_raw.native.gguf_header import split_names


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
