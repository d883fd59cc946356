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
4. What is not ours (own_files.py) is a miss and stays as it is. No call raises for
   what lies in the directory, and none waits without an end.

    DIR/.plrlock
    DIR/<fingerprint>/<unique>.plrstate
    DIR/<fingerprint>/<unique>.plrpart
"""

from __future__ import annotations

import os
import time
import uuid
import warnings
from contextlib import suppress
from pathlib import Path

from pyllama_raw.core.memory.tier import KnownState
from pyllama_raw.core.namespace import Adapted
from pyllama_raw.engine.directory_lock import WAIT_S, DirectoryLock
from pyllama_raw.engine.own_files import (
    PART,
    STATE,
    OwnFile,
    create_own,
    delete_own,
    make_folder,
    open_own,
    own_files,
    own_files_below,
)
from pyllama_raw.engine.span_keys import SpanKeys
from pyllama_raw.engine.span_records import from_file
from pyllama_raw.engine.state_file import (
    TOKEN_BYTES,
    BadFile,
    Rest,
    State,
    StoredFile,
    digest_of,
    make_header,
    no_rest,
    read_header,
    read_state,
    read_tokens,
    slices,
)
from pyllama_raw.errors import ConfigError

MAX_REST_S = WAIT_S / 4  # in which others wait for the lock


class DiskStore:
    """
    Files of one fingerprint, in a directory that others may use, too.

    Warns if files there can only be read: what is in them is used, nothing is written.

    Raises:
        ConfigError: the directory is not there and cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: str,
        max_bytes: int,
        lock_wait_s: float = WAIT_S,
    ) -> None:
        self.max_bytes = max_bytes
        self._root = _made(directory)
        self._fingerprint = fingerprint
        self._folder = self._root / fingerprint
        self._lock = DirectoryLock(self._root / ".plrlock", lock_wait_s)
        try:
            make_folder(self._folder)
            with self._lock.held_if_free() as is_held:
                if is_held:  # else whoever writes makes room
                    self._make_room(0)
        except OSError as error:
            warnings.warn(
                f"CacheConfig.directory={str(directory)!r} keeps nothing new, files there "
                f"are only read: {error}: give a directory that only you write to",
                RuntimeWarning,
                stacklevel=2,
            )

    def scan(self, keys: SpanKeys) -> list[KnownState]:
        """
        Complete files of this fingerprint, the latest used last; bad ones go.

        Args:
            keys: give the numbers that stand for rows of spans.
        """
        files = [f for f in own_files(self._folder) if f.path.suffix == STATE]
        looked_at = [self._look_at(file.path, keys) for file in sorted(files)]
        return [known for known in looked_at if known is not None]

    def write(
        self,
        namespace: str | Adapted | None,
        tokens: bytes,
        state: State,
        rest: Rest = no_rest,
    ) -> StoredFile | None:
        """
        Store *state*; None if it is larger than the limit, or the disk says no.

        Args:
            rest: see slices().
        """
        try:
            header = make_header(self._fingerprint, namespace, tokens, state, rest)
            block = header.block()
            with self._lock.held():
                if not self._make_room(header.file_bytes):
                    return None
                path = self._put(block, tokens, state, rest)
        except (OSError, BadFile):
            return None
        return StoredFile(path, header.file_bytes, digest_of(block))

    def read(self, file: StoredFile, rest: Rest = no_rest) -> State | None:
        """
        The state in *file*; None, and the file is deleted, if it is not as written.

        Args:
            rest: see slices().
        """
        try:
            return _verified(file, self._fingerprint, rest)
        except BadFile:
            delete_own(file.path)
        except OSError:
            pass  # gone, not ours, or not to be read now
        return None

    def delete(self, file: StoredFile) -> None:
        """Remove *file*, if it is still there."""
        delete_own(file.path)

    def _look_at(self, path: Path, keys: SpanKeys) -> KnownState | None:
        """What a later read() of the file at *path* can give."""
        try:
            with os.fdopen(open_own(path), "rb") as stream:
                header, digest = read_header(stream, self._fingerprint)
                tokens = from_file(read_tokens(stream, header), keys)
        except BadFile:
            delete_own(path)
            return None
        except OSError:
            return None
        file = StoredFile(path, header.file_bytes, digest)
        n_bytes = header.file_bytes - TOKEN_BYTES * header.n_tokens
        return KnownState(header.namespace, tokens, file, n_bytes)

    def _put(self, block: bytes, tokens: bytes, state: State, rest: Rest) -> Path:
        """Caller holds the lock, so the time to rest is limited."""
        until = time.monotonic() + MAX_REST_S

        def rest_a_while(worked_s: float) -> None:
            if time.monotonic() < until:
                rest(worked_s)

        make_folder(self._folder)
        part = self._folder / f"{uuid.uuid4().hex}{PART}"
        path = part.with_suffix(STATE)
        try:
            with os.fdopen(create_own(part), "wb") as stream:
                stream.write(block)
                stream.write(tokens)
                for data in slices(state, rest_a_while):
                    stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            part.rename(path)
        except OSError:
            delete_own(part)
            raise
        return path

    def _make_room(self, n_bytes: int) -> bool:
        """
        Delete parts, and states until *n_bytes* more are within the limit; False if there
        is no room all the same.

        Caller holds the lock.
        """
        files = own_files_below(self._root)
        n_used = sum(file.n_bytes for file in files)
        n_used -= _deleted([file for file in files if file.path.suffix == PART])
        if n_bytes > self.max_bytes:
            return False
        for file in sorted(file for file in files if file.path.suffix == STATE):
            if n_used + n_bytes <= self.max_bytes:
                break
            n_used -= _deleted([file])
        return n_used + n_bytes <= self.max_bytes


def _made(directory: Path) -> Path:
    try:
        root = directory.expanduser().absolute()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    # RuntimeError: of `~` without a home; ValueError: NUL, or a character without bytes.
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"CacheConfig.directory={str(directory)!r} is no directory and cannot be "
            f"made one: {error}: give a directory that you may write to"
        ) from error
    return root


def _deleted(files: list[OwnFile]) -> int:
    """Bytes of those of *files* that are gone now."""
    return sum(file.n_bytes for file in files if delete_own(file.path))


def _verified(file: StoredFile, fingerprint: str, rest: Rest) -> State:
    with os.fdopen(open_own(file.path), "rb") as stream:
        header, digest = read_header(stream, fingerprint)
        if digest != file.digest:
            raise BadFile("another file")
        read_tokens(stream, header)
        state = read_state(stream, header, rest)
        with suppress(OSError):  # a directory that can only be read has no order of use
            os.utime(stream.fileno())
    return state
