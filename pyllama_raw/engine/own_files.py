"""
Files of ours in a directory where others may have put anything.

Rules:
1. A file is ours if it is regular and its owner is the user of this process. In listings
   its name has the form that we give, too. Nothing else is read, counted or deleted.
2. No call waits and none follows a link: a pipe that nobody writes would be waited for,
   and a device may do something when it is opened.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

STATE, PART = ".plrstate", ".plrpart"
_NAME = re.compile(rf"[0-9a-f]{{32}}({re.escape(STATE)}|{re.escape(PART)})")
_SAFELY = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class OwnFile(NamedTuple):
    """A file in the order of deletion."""

    used: int  # ns
    n_bytes: int
    path: Path


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """
    A descriptor of the file at *path*.

    Raises:
        OSError: there is no file of ours.
    """
    _check_own(path, path.lstat())
    descriptor = os.open(path, flags | _SAFELY)
    try:
        _check_own(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def create_own(path: Path) -> int:
    """
    A descriptor to write a new file at *path*; nobody else may read it.

    Raises:
        OSError: something is there, or the file system refuses.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o600)


def delete_own(path: Path) -> bool:
    """Delete the file at *path* if it is ours; True if there is nothing any more."""
    try:
        _check_own(path, path.lstat())
        path.unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def make_folder(path: Path) -> None:
    """
    Have a folder at *path*, which nobody else may read if it is new.

    Raises:
        OSError: something else is there, a link included, or the file system refuses.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "something else is there", str(path))


def own_files(folder: Path) -> list[OwnFile]:
    """States and parts in *folder*; none if it is a link or cannot be listed."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return []
        with os.scandir(folder) as entries:
            return list(_own(entries))
    except OSError:
        return []


def own_files_below(root: Path) -> list[OwnFile]:
    """
    States and parts in the folders of *root*.

    Raises:
        OSError: *root* cannot be listed.
    """
    with os.scandir(root) as entries:
        folders = [Path(entry.path) for entry in entries]
    return [file for folder in folders for file in own_files(folder)]


def _own(entries: Iterator[os.DirEntry[str]]) -> Iterator[OwnFile]:
    for entry in entries:
        if not _NAME.fullmatch(entry.name):
            continue
        with suppress(OSError):  # another process may have deleted it
            status = entry.stat(follow_symlinks=False)
            if _is_own(status):
                yield OwnFile(status.st_mtime_ns, status.st_size, Path(entry.path))


def _check_own(path: Path, status: os.stat_result) -> None:
    if not _is_own(status):
        raise PermissionError(errno.EPERM, "not a file of ours", str(path))


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
