"""The lock of a cache directory: one process writes there, others wait for a while."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyllama_raw.engine.own_files import create_own, open_own

WAIT_S = 10.0  # longer than a write of another process takes
_POLL_S = 0.01


class DirectoryLock:
    """
    A lock file at *path*; a process that ends or is killed lets go of the lock.

    A process that is stopped does not. So a wait has an end, and after a wait in vain
    there is no other one until the lock was had again: all that close() still has to
    write waits once.
    """

    def __init__(self, path: Path, wait_s: float = WAIT_S) -> None:
        self._path = path
        self._wait_s = wait_s
        self._was_in_vain = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """
        Hold the lock; waits for a write of another process.

        Raises:
            TimeoutError: another process does not let go.
            OSError: there cannot be a lock file of ours.
        """
        until = time.monotonic() + (0 if self._was_in_vain else self._wait_s)
        while (descriptor := self._take()) is None:
            if time.monotonic() >= until:
                self._was_in_vain = True
                raise TimeoutError("another process holds the lock")
            time.sleep(_POLL_S)
        self._was_in_vain = False
        try:
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def held_if_free(self) -> Iterator[bool]:
        """Hold the lock if nobody else does, and say so. Raises as held(), never waits."""
        descriptor = self._take()
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _take(self) -> int | None:
        """A descriptor that has the lock; None if another process has it."""
        with suppress(FileExistsError):
            os.close(create_own(self._path))
        descriptor = open_own(self._path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever deletes the file and makes another one would have a lock, too.
            if os.path.samestat(os.fstat(descriptor), self._path.lstat()):
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None
