"""
States of slots in a directory: written whole or not at all, verified before use.

Rules:
1. A file gets its name by a rename, when it is complete and synced. Names are unique and
   contents never change, so readers need no lock: a file that is gone, cut off or changed
   is a miss.
2. Who writes holds the lock of the directory; a process that is killed lets go of it. So
   the files of all processes and models, the one being written included, are never more
   than max_bytes, and a partial file that the holder finds is nobody's.
3. What was not used for longest is deleted first; a read counts as a use.

    DIR/.plrlock
    DIR/<fingerprint>/<unique>.plrstate
    DIR/<fingerprint>/<unique>.plrpart
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pyllama_raw.core.disk_tier import KnownState
from pyllama_raw.engine.state_file import (
    TOKEN_BYTES,
    BadFile,
    State,
    StoredFile,
    digest_of,
    make_header,
    read_header,
    read_state,
    read_tokens,
)
from pyllama_raw.errors import ConfigError


class _Item(NamedTuple):
    """A file in the order of deletion."""

    used: int  # ns
    n_bytes: int
    path: Path


class DiskStore:
    """
    Files of one fingerprint, in a directory that others may use, too.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(self, directory: Path, fingerprint: str, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._root = directory.expanduser().absolute()
        self._fingerprint = fingerprint
        self._folder = self._root / fingerprint
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                self._make_room(0)
        except OSError as error:
            raise ConfigError(f"CacheConfig.directory={directory}: {error}") from error

    def scan(self) -> list[KnownState]:
        """Complete files of this fingerprint, the latest used last; bad ones go."""
        known = []
        for item in sorted(self._items(self._folder.glob("*.plrstate"))):
            try:
                known.append(self._look_at(item))
            except (OSError, BadFile):
                _delete(item.path)
        return known

    def write(
        self, namespace: str | None, tokens: bytes, state: State
    ) -> StoredFile | None:
        """Store *state*; None if it is larger than the limit, or the disk says no."""
        try:
            header = make_header(self._fingerprint, namespace, tokens, state)
            block = header.block()
            with self._locked():
                if not self._make_room(header.file_bytes):
                    return None
                path = self._put(block, tokens, state)
        except (OSError, BadFile):
            return None
        return StoredFile(path, header.file_bytes, digest_of(block))

    def read(self, file: StoredFile) -> State | None:
        """The state in *file*; None, and the file is deleted, if it is not as written."""
        try:
            state = _verified(file)
            os.utime(file.path)
        except (OSError, BadFile):
            _delete(file.path)
            return None
        return state

    def delete(self, file: StoredFile) -> None:
        """Remove *file*, if it is still there."""
        _delete(file.path)

    def _look_at(self, item: _Item) -> KnownState:
        with item.path.open("rb") as stream:
            header, digest = read_header(stream)
            if header.fingerprint != self._fingerprint:
                raise BadFile("of another context")
            if header.file_bytes != item.n_bytes:
                raise BadFile("a wrong size")
            tokens = read_tokens(stream, header)
        file = StoredFile(item.path, item.n_bytes, digest)
        n_bytes = item.n_bytes - TOKEN_BYTES * header.n_tokens
        return KnownState(header.namespace, tokens, file, n_bytes)

    def _put(self, block: bytes, tokens: bytes, state: State) -> Path:
        """Caller holds the lock."""
        part = self._folder / f"{uuid.uuid4().hex}.plrpart"
        path = part.with_suffix(".plrstate")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with part.open("xb") as stream:
                part.chmod(0o600)
                for data in (block, tokens, state):
                    stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            part.rename(path)
        except OSError:
            _delete(part)
            raise
        return path

    def _make_room(self, n_bytes: int) -> bool:
        """
        Delete until *n_bytes* more are within the limit; False if they can never be.

        Caller holds the lock.
        """
        for part in self._root.glob("*/*.plrpart"):
            part.unlink()
        if n_bytes > self.max_bytes:
            return False
        items = sorted(self._items(self._root.glob("*/*.plrstate")))
        n_used = sum(item.n_bytes for item in items)
        for item in items:
            if n_used + n_bytes <= self.max_bytes:
                break
            item.path.unlink(missing_ok=True)
            n_used -= item.n_bytes
        return True

    @staticmethod
    def _items(paths: Iterable[Path]) -> Iterator[_Item]:
        for path in paths:
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another process has deleted it
            yield _Item(status.st_mtime_ns, status.st_size, path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; waits for a write of another one."""
        descriptor = os.open(self._root / ".plrlock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _verified(file: StoredFile) -> State:
    with file.path.open("rb") as stream:
        header, digest = read_header(stream)
        if digest != file.digest:
            raise BadFile("another file")
        read_tokens(stream, header)
        return read_state(stream, header)


def _delete(path: Path) -> None:
    """Files that are gone already, or that cannot be deleted, are no concern here."""
    try:
        path.unlink()
    except OSError:
        return
